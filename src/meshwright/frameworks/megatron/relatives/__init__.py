"""Frameworks that take Megatron-LM arguments.

- `mindspeed`: mindSpeed-LLM (Ascend)
- `nemo`: megatron-Bridge (NeMo)
- `slime`: slime
"""
