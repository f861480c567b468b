"""Megatron-LM and its relatives: a plan as arguments of `pretrain_gpt.py`, and a script of such arguments as a plan."""

from __future__ import annotations

from meshwright.export.contract import Format
from meshwright.export.megatron.arguments import READ
from meshwright.export.megatron.read import read
from meshwright.export.megatron.write import write

FORMAT = Format("megatron", "Megatron-LM", "megatron", write, read, READ)
