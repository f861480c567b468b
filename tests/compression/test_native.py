"""How codecs are built: once, by whichever process comes first, and not at all where there is no compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from meshwright.base import native
from meshwright.compression import Codec, codec
from meshwright.compression import language as l
from meshwright.compression.backends.numpy.batch import PortableBatch
from tests.compression.data import numbers, received, sent

needs_compiler = pytest.mark.skipif(not native.compiler(), reason="no C compiler")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(native, "_cache_folder", lambda: tmp_path)
    native.loaded.cache_clear()
    return tmp_path


@needs_compiler
def test_a_codec_is_built_once(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codec("onebit").batch([10])
    made = list(empty_cache.iterdir())
    assert [path.suffix for path in made] == [".so"]
    native.loaded.cache_clear()
    monkeypatch.setattr(native.subprocess, "run", lambda *_, **__: pytest.fail("was built again"))
    codec("onebit").batch([20])
    assert list(empty_cache.iterdir()) == made


@needs_compiler
def test_processes_that_build_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    script = (
        "import torch; from meshwright.compression import codec; b = codec('onebit').batch([10]);"
        "m = b.new_message(); b.encode(torch.ones(10), m); o = torch.zeros(10); b.decode(m, o); assert bool((o == 1).all())"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    running = [subprocess.Popen([sys.executable, "-c", script], env=environment) for _ in range(3)]
    assert [process.wait(120) for process in running] == [0, 0, 0]
    assert len(list((tmp_path / "meshwright" / "native").iterdir())) == 1


@needs_compiler
def test_an_old_compiler_builds_without_the_newest_instructions(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = numbers("heavy", 2000)
    fast = sent(codec("int4").batch([2000]), flat)
    native.loaded.cache_clear()
    monkeypatch.setattr(native, "FASTEST_FIRST", (("-O3", "-march=no-such-machine"), ("-O2",)))
    assert torch.equal(fast, sent(codec("int4").batch([2000]), flat))
    assert len(list(empty_cache.iterdir())) == 2


def test_without_a_compiler_numpy_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "compiler", lambda: "")
    batch = codec("terngrad").batch([100])
    assert isinstance(batch, PortableBatch)
    flat = numbers("normal", 100)
    assert (received(batch, sent(batch, flat)) - flat).abs().max() <= (flat.max() - flat.min()) / 3 * 1.001


@needs_compiler
def test_a_compiler_that_fails_is_told_and_replaced(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "FLAGS", ("-no-such-flag",))
    with pytest.warns(UserWarning, match="codec onebit runs in NumPy: .*no-such-flag"):
        assert isinstance(codec("onebit").batch([10]), PortableBatch)
    assert not list(empty_cache.iterdir())


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_told_and_replaced(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty_cache / "broken.so").write_bytes(b"half of a file")
    monkeypatch.setattr(native, "_shared_object", lambda *_: empty_cache / "broken.so")
    with pytest.warns(UserWarning, match=r"codec onebit runs in NumPy: .*broken\.so"):
        assert isinstance(codec("onebit").batch([10]), PortableBatch)


@needs_compiler
def test_batches_of_several_threads_do_not_mix() -> None:
    one = Codec("own", lambda g: {"n": l.half(g), "m": l.mean(g)}, lambda m: m["n"] + 0 * m["m"])
    right: list[bool] = []

    def work(seed: int) -> None:
        batch, flat = one.batch([5000]), numbers("normal", 5000, seed)
        right.extend(torch.equal(received(batch, sent(batch, flat)), flat.half().float()) for _ in range(20))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert right == [True] * 60
