"""Frameworks that take Megatron-LM arguments.

- `mindspeed`: MindSpeed-LLM (Ascend)
- `nemo`: Megatron-Bridge (NeMo)
- `slime`: slime
"""
