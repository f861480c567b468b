"""Checkpoints: written in the background, whole or not at all, read under any plan.

- `checkpoint`: checkpoints
- `files`: the files of a checkpoint
- `gather`: gather whole parameters from the shards of all ranks, one at a time
- `huggingface`: weights in Hugging Face's names and files
- `residuals`: error-feedback residuals of compressed gradients
- `state`: the training state as PyTorch's distributed checkpoint takes it
"""
