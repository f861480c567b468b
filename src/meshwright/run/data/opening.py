"""Open the data that a user names as a source of training."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from meshwright.errors import InputError
from meshwright.run.data.batches import Batches, Source, Split
from meshwright.run.data.dataset import Dataset
from meshwright.run.data.manifest import VERSION, is_prepared
from meshwright.run.data.prepare import prepare
from meshwright.run.data.sources import KINDS, find_files
from meshwright.run.data.synthetic import Synthetic

_VALID = f"synthetic, a folder that `meshwright prepare` wrote, or a {', '.join(KINDS[:-1])} or {KINDS[-1]} file"


def open_data(
    spec: str | Path, *, vocab: int, seq_len: int, global_batch: int, seed: int = 0, packed: bool = True,
    held_out: float = 0, split: Split = "train",
) -> Source:  # fmt: skip
    """Open `synthetic` data, a prepared folder, or a raw file, which is prepared as bytes once in the user's cache.

    `vocab` is the model's. `held_out` is a fraction of all samples, or a count, that only `split="evaluation"` sees.

    >>> open_data("synthetic", vocab=512, seq_len=4, global_batch=2).samples(0, range(2)).tokens.shape
    (2, 4)
    """
    for name, value in (("vocab", vocab), ("seq_len", seq_len), ("global_batch", global_batch)):
        if value < 1:
            raise InputError(f"is {value}", field=name, valid="1 or more")
    if str(spec) == "synthetic":
        return Synthetic(vocabulary=vocab, seq_len=seq_len, global_batch=global_batch, seed=seed, split=split)
    folder = Path(spec)
    if not folder.exists():
        raise InputError("no such file or folder", file=str(spec), field="data", valid=_VALID)
    dataset = Dataset(folder if folder.is_dir() else _cached(folder))
    if dataset.manifest.vocabulary > vocab:
        problem = f"its vocabulary is {dataset.manifest.vocabulary:,}, larger than the model's {vocab:,}"
        raise InputError(problem, file=str(spec), field="data", valid="the tokenizer of the model, or a larger model")
    return Batches(
        dataset, seq_len=seq_len, global_batch=global_batch, seed=seed, packed=packed, held_out=held_out, split=split
    )


def _cached(file: Path) -> Path:
    """Return the folder with the tokens of a raw file, prepared once for each version of it.

    It is in the user's cache and not beside the file, because data often lies where only others may write. All ranks
    may call this at once: one prepares, the others wait. It prepares in a single process, because a training process
    must not fork.
    """
    find_files([file])  # checked before anything is created, with the messages of `prepare`
    facts = file.stat()
    identity = f"{file.resolve()}\0{facts.st_size}\0{facts.st_mtime_ns}\0{VERSION}"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright" / "data"
    home.mkdir(parents=True, exist_ok=True)
    target = home / f"{file.stem[:40]}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if not is_prepared(target):
        prepare([file], target, workers=1, wait=True)
    return target
