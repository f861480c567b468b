"""Checkpoints: written in the background, whole or not at all, read under any plan.

- `checkpoint`: checkpoints
- `files`: the files of a checkpoint
- `gather`: whole parameters out of the pieces that processes have, one at a time
- `huggingface`: weights in Hugging Face's names and files
- `residuals`: what compressed gradients have not said yet, in checkpoints
- `state`: the state of a training as PyTorch's distributed checkpoint takes it
"""
