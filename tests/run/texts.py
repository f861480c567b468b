"""Texts, and what plain Python makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwright.run.data import Dataset, prepare

END = 256
TEXTS = ["hello", "wörld\n", "", "🦙 " * 40, "x" * 700, "last"]


def stream_of(texts: list[str]) -> list[int]:
    """The reference: every document's bytes and its end."""
    return [token for text in texts if text for token in [*text.encode(), END]]


def documents_of(texts: list[str]) -> list[int]:
    kept = [text for text in texts if text]
    return [number for number, text in enumerate(kept) for _ in [*text.encode(), END]]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts))
    return path


def all_tokens(folder: Path) -> list[int]:
    data = Dataset(folder)
    return data.tokens(0, data.manifest.tokens).tolist()


def prepared(folder: Path, lengths: list[int], **options: Any) -> Dataset:
    """Documents whose tokens can be told apart by eye: the n-th is made of one letter."""
    texts = [chr(97 + i % 26) * length for i, length in enumerate(lengths)]
    prepare([write_jsonl(folder / "in.jsonl", texts)], folder / "tokens", workers=1, overwrite=True, **options)
    return Dataset(folder / "tokens")
