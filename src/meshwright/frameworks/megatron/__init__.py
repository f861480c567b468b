"""Megatron-LM and its relatives: a plan as arguments of `pretrain_gpt.py`, and such a script as a plan."""

from __future__ import annotations

from meshwright.frameworks.contract import Format
from meshwright.frameworks.megatron.arguments import READ
from meshwright.frameworks.megatron.read import read
from meshwright.frameworks.megatron.write import write

FORMAT = Format("megatron", "Megatron-LM", "megatron", write, read, READ)
