"""Attention layers and their parallel forms.

- `attention`: attention layers
- `dropout_attention`: attention with dropout of its probabilities
- `ring_attention`: causal attention in a ring (Liu et al., "Ring Attention", 2023)
- `sequence_parallel`: attention over tokens that are sharded over ranks
"""
