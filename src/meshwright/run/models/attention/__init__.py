"""Attention layers and their parallel forms.

- `attention`: attention layers
- `dropout_attention`: attention whose probabilities are dropped
- `ring_attention`: causal attention in a ring (Liu et al., "Ring Attention", 2023)
- `sequence_parallel`: attention over tokens that several processes hold
"""
