"""Tokenizers: UTF-8 bytes, or one in Hugging Face's format from a local folder or file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.base.files import read_json
from meshwright.errors import InputError

_VALID = "bytes, a tokenizer.json, or a folder that holds one"
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Tokenizer(Protocol):
    """Interface of tokenizers."""

    vocabulary: int  # every token is smaller
    end_of_document: int

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the tokens of every text, without the end-of-document token."""


class Bytes:
    """Tokenizer whose tokens are the bytes of UTF-8; 256 ends a document.

    >>> Bytes().encode(["hi"])[0].tolist()
    [104, 105]
    """

    vocabulary, end_of_document = 257, 256

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]


class HuggingFace:
    """Tokenizer of a `tokenizer.json`, run by the `tokenizers` library; special tokens only end documents."""

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        self._tokenizer = _load(file)
        known: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary = (
            max(known.values(), default=-1) + 1
        )  # numbers may have gaps, so that counting them is not enough
        self.end_of_document = _end_of_document(file, known)

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(one.ids, np.uint32) for one in found]


def tokenizer_at(name: str) -> Tokenizer:
    """Return the `bytes` tokenizer, or the one at a path.

    >>> tokenizer_at("bytes").vocabulary
    257
    """
    if name == "bytes":
        return Bytes()
    path = Path(name)
    if not path.exists():
        raise InputError("no such file or folder", file=name, field="tokenizer", valid=_VALID)
    if path.is_dir() and not (path / "tokenizer.json").exists():
        raise InputError("is a folder without a tokenizer.json", file=name, field="tokenizer", valid=_VALID)
    return HuggingFace(path)


def _load(file: Path) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise InputError(
            "needs the tokenizers library", file=str(file), valid="pip install 'meshwright[data]'"
        ) from None
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise InputError(f"is not a tokenizer: {error}", file=str(file), field="tokenizer", valid=_VALID) from None


def _end_of_document(file: Path, known: dict[str, int]) -> int:
    """Return the `eos_token` of the config beside the file, else the first usual one in the vocabulary."""
    config = file.parent / "tokenizer_config.json"
    named = read_json(config).get("eos_token") if config.exists() else None
    name = named.get("content") if isinstance(named, dict) else named
    if name is None:
        name = next((usual for usual in _USUAL_ENDS if usual in known), None)
    if name not in known:
        problem = "names no token that ends a document" if name is None else f"does not know '{name}', its eos_token"
        raise InputError(
            problem, file=str(file), field="tokenizer", valid="an eos_token in tokenizer_config.json beside it"
        )
    return known[name]
