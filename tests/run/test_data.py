"""Samples against brute force, resuming, ranks; every way a folder can be wrong; synthetic tokens; the device."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.run.data import Batches, Dataset, Samples, open_data
from meshwright.run.data.prefetch import device_batches
from meshwright.run.data.shuffle import shuffled
from meshwright.run.parallel.stage import next_tokens
from tests.run.texts import END, documents_of, prepared, stream_of

# --- reading


def break_manifest(folder: Path, **changes: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def damage(folder: Path, what: str) -> None:
    if what == "token":
        with open(folder / "tokens-00000.bin", "r+b") as file:
            file.write(b"\xff\xff")
    elif what == "ends":
        with open(folder / "documents.bin", "r+b") as file:
            file.write((999).to_bytes(8, "little"))
    elif what == "last end":
        with open(folder / "documents.bin", "r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write((7).to_bytes(8, "little"))
    elif what == "shorter":
        os.truncate(folder / "tokens-00000.bin", 8)
    elif what == "longer":
        os.truncate(folder / "documents.bin", 1000)
    elif what == "gone":
        (folder / "tokens-00000.bin").unlink()
    elif what == "unfinished":
        (folder / "manifest.json").unlink()
    elif what == "cut":
        (folder / "manifest.json").write_text('{"format": "mesh')
    else:
        break_manifest(folder, **json.loads(what))


DAMAGES = {
    "token": r"tokens-00000\.bin: is damaged: token 65535 in a vocabulary of 257",
    "ends": r"documents\.bin: is damaged",
    "last end": r"documents\.bin: is damaged: its last document ends at 7",
    "shorter": r"tokens-00000\.bin: is truncated: it has 8 bytes, manifest\.json says 68",
    "longer": r"documents\.bin: is damaged: it has 1,000 bytes, manifest\.json says 24",
    "gone": r"tokens-00000\.bin: is missing",
    "unfinished": "is not prepared: it holds no manifest",
    "cut": r"manifest\.json:1:\d+: malformed JSON",
    '{"version": 2}': r"version: is 2.*valid: 1",
    '{"format": "other"}': "format: is 'other'",
    '{"dtype": "int8"}': "dtype",
    '{"tokens": 99}': "tokens: does not agree",
    '{"documents": 0}': "documents: does not agree",
    '{"vocabulary": 70000}': "dtype: does not agree",
    '{"end_of_document": 300}': "end_of_document: does not agree",
    '{"shards": []}': "shards: does not agree",
    '{"extra": 1}': "unknown field 'extra'",
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_noticed(tmp_path: Path, what: str) -> None:
    prepared(tmp_path, [10, 10, 11])
    damage(tmp_path / "tokens", what)
    with pytest.raises(InputError, match=DAMAGES[what]):
        open_data(tmp_path / "tokens", vocab=300, seq_len=34, global_batch=1).samples(0, [0])


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    prepared(tmp_path, [10, 10, 11])
    with pytest.raises(InputError, match=r"nowhere: data: no such file or folder .valid: synthetic"):
        open_data("nowhere", vocab=300, seq_len=4, global_batch=1)
    with pytest.raises(InputError, match="vocabulary is 257, larger than the model's 256"):
        open_data(tmp_path / "tokens", vocab=256, seq_len=4, global_batch=1)
    with pytest.raises(InputError, match="holds 3 samples for train, one step needs 4"):
        open_data(tmp_path / "tokens", vocab=257, seq_len=10, global_batch=4)
    with pytest.raises(InputError, match=r"holds 2 samples .1 of 3 are held out.* one step needs 3"):
        open_data(tmp_path / "tokens", vocab=257, seq_len=10, global_batch=3, held_out=1)
    with pytest.raises(InputError, match="held_out"):
        open_data(tmp_path / "tokens", vocab=257, seq_len=10, global_batch=3, held_out=1.0)
    with pytest.raises(InputError, match="is not prepared"):
        open_data(tmp_path, vocab=257, seq_len=10, global_batch=3)
    with pytest.raises(InputError, match="seq_len: is 0"):
        open_data("synthetic", vocab=257, seq_len=0, global_batch=3)


def test_raw_files_are_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "a.txt"
    path.write_text("abcdef")
    for _ in range(2):
        found = open_data(path, vocab=257, seq_len=7, global_batch=1).samples(0, [0])
        assert found.tokens[0].tolist() == stream_of(["abcdef"])
    assert len(list((tmp_path / "cache/meshwright/data").iterdir())) == 1
    path.write_text("ghijklm")  # a changed file is another one
    assert open_data(path, vocab=257, seq_len=8, global_batch=1).samples(0, [0]).tokens[0].tolist() == stream_of(
        ["ghijklm"]
    )


# --- batches

QUICK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUICK
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any),
    seq_len=st.integers(1, 25),
    shard=st.integers(1, 200),
    held=st.sampled_from([0, 1, 0.3]),
    packed=st.booleans(),
)
def test_every_sample_once_an_epoch_as_brute_force_cuts_it(
    tmp_path: Path, lengths: list[int], seq_len: int, shard: int, held: float, packed: bool
) -> None:
    data = prepared(tmp_path, lengths, shard_bytes=shard)
    texts = [chr(97 + i % 26) * length for i, length in enumerate(lengths)]
    expected = packed_samples(texts, seq_len) if packed else padded_samples(texts, seq_len)
    if len(expected) < 3:
        return
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for split in ("train", "evaluation") if held else ("train",):
        one = Batches(data, seq_len=seq_len, global_batch=1, seed=5, packed=packed, held_out=held, split=split)
        for step in range(one.count):
            seen += rows_of(one.samples(step, [0]))
    assert sorted(seen) == sorted(expected)


def rows_of(samples: Samples) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    assert samples.documents is not None
    return [
        (tuple(tokens), tuple(numbers))
        for tokens, numbers in zip(samples.tokens.tolist(), samples.documents.tolist(), strict=True)
    ]


def packed_samples(texts: list[str], seq_len: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    tokens, numbers = stream_of(texts), documents_of(texts)
    cuts = range(0, len(tokens) - seq_len + 1, seq_len)
    return [(tuple(tokens[i : i + seq_len]), tuple(n - numbers[i] for n in numbers[i : i + seq_len])) for i in cuts]


def padded_samples(texts: list[str], seq_len: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    found = []
    for text in filter(None, texts):
        tokens = stream_of([text])[:seq_len]
        padding = seq_len - len(tokens)
        found.append((tuple(tokens + [END] * padding), tuple([0] * len(tokens) + [-1] * padding)))
    return found


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    return prepared(tmp_path, [17, 3, 50, 1, 29] * 8)


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("spec", ["files", "synthetic"])
def test_all_ranks_together_see_the_batch_of_one_process(data: Dataset, ranks: int, spec: str) -> None:
    source = open_data(data.folder if spec == "files" else spec, vocab=300, seq_len=16, global_batch=6, seed=3)
    for step in (0, 7, 40):
        whole = source.samples(step, range(6))
        parts = [source.samples(step, range(rank, 6, ranks)) for rank in range(ranks)]
        for rank, part in enumerate(parts):
            assert (part.tokens == whole.tokens[rank::ranks]).all()


def test_resuming_needs_the_step_alone(data: Dataset) -> None:
    def steps(first: int) -> list[list[list[int]]]:
        source = open_data(data.folder, vocab=300, seq_len=16, global_batch=6, seed=3)
        return [source.samples(step, range(6)).tokens.tolist() for step in range(first, 40)]

    assert steps(0)[23:] == steps(23)


def test_epochs_and_seeds_have_orders_of_their_own(data: Dataset) -> None:
    one = Batches(data, seq_len=4, global_batch=5, seed=1)
    two = Batches(data, seq_len=4, global_batch=5, seed=2)
    assert one.count == data.manifest.tokens // 4
    steps = one.count  # five epochs
    order = np.concatenate([one.numbers(step, range(5)) for step in range(steps)]).reshape(5, one.count)
    assert (np.sort(order, axis=1) == np.arange(one.count)).all()
    assert len({tuple(epoch) for epoch in order.tolist()}) == 5
    assert (one.numbers(0, range(5)) != two.numbers(0, range(5))).any()


def test_the_order_is_the_one_of_earlier_versions(data: Dataset) -> None:
    """Runs resume under a later version: these numbers may never change."""
    batches = Batches(data, seq_len=4, global_batch=5, seed=1)
    assert batches.numbers(0, range(5)).tolist() == [17, 181, 185, 147, 111]
    assert batches.numbers(1000, range(5)).tolist() == [179, 129, 21, 87, 135]


def test_rows_of_another_step_are_refused(data: Dataset) -> None:
    batches = Batches(data, seq_len=4, global_batch=5, seed=1)
    for step, rows in ((0, [5]), (0, [-1]), (-1, [0])):
        with pytest.raises(ValueError, match=r"rows are 0 .. 4"):
            batches.samples(step, rows)
    assert batches.samples(0, []).tokens.shape == (0, 4)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 64, 65, 1000, 4097])
def test_a_permutation(count: int) -> None:
    for key in range(8):
        assert (np.sort(shuffled(np.arange(count), count, key)) == np.arange(count)).all()


@pytest.mark.parametrize("count", [2, 3, 5, 8, 17, 100])
def test_places_are_spread_evenly(count: int) -> None:
    """Chi-square of where a place goes over many keys; 5 standard deviations. Fewer rounds fail it."""
    keys = 100_000
    for place in {0, 1, count - 1}:
        found = shuffled(np.full(keys, place), count, np.arange(keys, dtype=np.uint64))
        chi = ((np.bincount(found, minlength=count) - keys / count) ** 2 / (keys / count)).sum()
        assert chi < count - 1 + 5 * (2 * (count - 1)) ** 0.5


# --- synthetic


def test_synthetic_samples_differ_and_repeat() -> None:
    def source(seed: int = 0, split: Any = "train") -> Any:
        return open_data("synthetic", vocab=50_000, seq_len=100, global_batch=4, seed=seed, split=split)

    first = source().samples(0, range(4)).tokens
    assert (first == source().samples(0, range(4)).tokens).all()
    assert len({tuple(row) for row in first.tolist()}) == 4
    for other in (source(seed=1).samples(0, range(4)), source(split="evaluation").samples(0, range(4))):
        assert (first != other.tokens).any()
    assert 0 <= first.min() <= first.max() < 50_000


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 257])
def test_synthetic_fits_any_vocabulary(vocabulary: int) -> None:
    found = open_data("synthetic", vocab=vocabulary, seq_len=65, global_batch=1).samples(9, [0]).tokens
    assert found.shape == (1, 65)
    assert 0 <= found.min() <= found.max() < vocabulary


def test_synthetic_can_be_learnt() -> None:
    """A table of what follows what, the smallest model there is, comes near the entropy of the chain."""
    torch.manual_seed(0)
    table = torch.zeros(64, 64, requires_grad=True)
    optimizer = torch.optim.Adam([table], lr=0.3)
    source = open_data("synthetic", vocab=64, seq_len=64, global_batch=8)
    losses = []
    for step in range(40):
        tokens = torch.from_numpy(source.samples(step, range(8)).tokens)
        loss = torch.nn.functional.cross_entropy(table[tokens].flatten(0, 1), next_tokens(tokens).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(np.log(64), abs=0.01)
    assert losses[-1] < 1.7  # of 1.21 nats at best


# --- on a device


def test_batches_come_in_order_and_ahead(data: Dataset) -> None:
    source = open_data(data.folder, vocab=300, seq_len=16, global_batch=6, seed=3)
    before = threading.active_count()
    with device_batches(source, [1, 3], first=5, last=12) as steps:
        for step, batch in zip(range(5, 12), steps, strict=True):
            expected = source.samples(step, [1, 3])
            assert batch.step == step
            assert batch.documents is not None
            assert (batch.tokens.numpy() == expected.tokens).all()
            assert (batch.documents.numpy() == expected.documents).all()
    assert threading.active_count() == before


class Watched:
    """A source that notes what is asked of it, and fails at one step."""

    vocabulary, seq_len, global_batch = 8, 2, 1

    def __init__(self, fails: int = -1) -> None:
        self.fails, self.asked = fails, threading.Semaphore(0)
        self.steps: list[int] = []

    def samples(self, step: int, rows: object) -> Samples:
        self.steps.append(step)
        self.asked.release()
        if step == self.fails:
            raise OSError("the disk is gone")
        return Samples(np.zeros((1, 2), np.int64), None)


def test_it_reads_a_bounded_number_ahead_and_ends_when_closed() -> None:
    source = Watched()
    steps = device_batches(source, [0], last=10**6, depth=3)
    for _ in range(4):
        assert source.asked.acquire(timeout=5)
    assert not source.asked.acquire(timeout=0.05)  # three wait, one is in its hands
    assert next(iter(steps)).step == 0
    assert source.asked.acquire(timeout=5)
    steps.close()
    assert not any(thread.name == "meshwright-data" for thread in threading.enumerate())
    assert list(steps) == []


def test_a_failure_reaches_the_one_who_waits() -> None:
    seen = []
    with pytest.raises(OSError, match="the disk is gone"), device_batches(Watched(fails=2), [0], last=9) as steps:
        seen.extend(batch.step for batch in steps)
    assert not any(thread.name == "meshwright-data" for thread in threading.enumerate())
