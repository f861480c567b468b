"""What watching costs: plain, ours, objwatch and viztracer, in turns, in one run.

    python benchmarks/watch.py [--repeats 5]

CPU seconds, start and stop of the watch and all its writing included, best of the repeats; every case in a fresh process,
against the same work in that process before.
'model' trains a small GPT for 20 steps on one CPU thread, 'tiny' calls a method of three lines 5,000 times. Peers that are
not installed are left out by name: `pip install objwatch viztracer`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
STEPS, CALLS = 20, 5000
TORCH = ["torch.nn.modules.module", "torch.optim.optimizer", "torch.optim.adamw"]  # code that is not the user's own
Context = Callable[[str], Any]


def plain(folder: str) -> Any:
    return contextlib.nullcontext()


def ours(targets: Any, **options: Any) -> Context:
    def context(folder: str) -> Any:
        import meshwright

        return meshwright.watch(targets, output=os.path.join(folder, "run"), **options)

    return context


def objwatch(targets: list[str], **options: Any) -> Context:
    def context(folder: str) -> Any:
        import objwatch as peer

        if options.pop("shapes", False):
            from objwatch.wrappers import TensorShapeWrapper

            options["wrapper"] = TensorShapeWrapper
        return peer.ObjWatch(targets, output=os.path.join(folder, "run.objwatch"), **options)

    return context


def viztracer(folder: str) -> Any:
    import viztracer as peer

    return peer.VizTracer(output_file=os.path.join(folder, "run.json"), verbose=0)


# case -> (what runs, who watches); the peer's case on the same line of the table has the same name up to the colon
CASES: dict[str, tuple[str, Context]] = {
    "model, plain": ("model", plain),
    "model, nothing matches: ours": ("model", ours("watched:never")),
    "model, nothing matches: objwatch": ("model", objwatch(["no_such_file.py"])),
    "model, one file: ours": ("model", ours("watched", attributes=True)),
    "model, one file: objwatch": ("model", objwatch(["watched.py"])),
    "model, one file, tensors: ours": ("model", ours("watched", attributes=True, wrapper="tensor")),
    "model, one file, tensors: objwatch": ("model", objwatch(["watched.py"], shapes=True)),
    "model, one file, locals: ours": ("model", ours("watched", attributes=True, locals=True)),
    "model, one file, locals: objwatch": ("model", objwatch(["watched.py"], with_locals=True)),
    "model, with torch's own: ours": ("model", ours(["watched", *TORCH], attributes=True)),
    "model, with torch's own: objwatch": (
        "model",
        objwatch(["watched.py", *(f"{name.replace('.', '/')}.py" for name in TORCH)]),
    ),
    "model, everything: viztracer": ("model", viztracer),
    "tiny, plain": ("tiny", plain),
    "tiny, calls: ours": ("tiny", ours("watched:Tiny")),
    "tiny, attributes: ours": ("tiny", ours("watched:Tiny", attributes=True)),
    "tiny, attributes: objwatch": ("tiny", objwatch(["watched.py"])),
    "tiny, locals: ours": ("tiny", ours("watched:Tiny", attributes=True, locals=True)),
    "tiny, locals: objwatch": ("tiny", objwatch(["watched.py"], with_locals=True)),
    "tiny, everything: viztracer": ("tiny", viztracer),
}


def work_of(what: str) -> Callable[[], None]:
    import torch
    import watched

    torch.set_num_threads(1)
    if what == "tiny":
        tiny = watched.Tiny()

        def tick() -> None:
            for _ in range(CALLS):
                tiny.tick(1)

        return tick
    trainer = watched.Trainer()
    tokens = torch.randint(0, watched.WORDS, (watched.BATCH, watched.LENGTH))
    trainer.step(tokens)

    def train() -> None:
        for _ in range(STEPS):
            trainer.step(tokens)

    return train


def measure(name: str) -> dict[str, float]:
    what, context = CASES[name]
    work = work_of(what)
    plain_seconds = min(
        timed(work) for _ in range(3)
    )  # of this very process: processes differ by more than a watch costs
    with tempfile.TemporaryDirectory() as folder:
        watching = context(folder)
        start = time.process_time()
        with watching:
            work()
        seconds = time.process_time() - start
        size = sum(os.path.getsize(os.path.join(folder, one)) for one in os.listdir(folder))
    return {"seconds": seconds, "plain": plain_seconds, "bytes": size}


def timed(work: Callable[[], None]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def in_its_own_process(name: str) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, os.path.abspath(__file__), "--case", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case:
        with contextlib.redirect_stdout(io.StringIO()):
            found = measure(asked.case)
        print(json.dumps(found))
        return
    missing = [peer for peer in ("objwatch", "viztracer") if importlib.util.find_spec(peer) is None]
    print("".join(f"left out, not installed: {peer}\n" for peer in missing), end="")
    names = [name for name in CASES if not any(name.endswith(peer) for peer in missing)]
    best: dict[str, dict[str, float]] = {}
    for _ in range(asked.repeats):  # in turns, so that a slow minute of the machine hits all of them
        for name in names:
            found = in_its_own_process(name)
            if name not in best or found["seconds"] - found["plain"] < best[name]["seconds"] - best[name]["plain"]:
                best[name] = found
    print(f"{'case':40} {'CPU-s':>9} {'of plain':>9} {'us/call':>9} {'of its peer':>12} {'written':>9}")
    for name in names:
        print(row(name, best))


def row(name: str, best: dict[str, dict[str, float]]) -> str:
    what = CASES[name][0]
    base, mine = best[name]["plain"], best[name]["seconds"]
    each = f"{(mine - base) / CALLS * 1e6:9.2f}" if what == "tiny" else " " * 9
    peer = best.get(name.replace(": ours", ": objwatch")) if name.endswith("ours") else None
    share = f"{(mine - base) / max(peer['seconds'] - peer['plain'], 1e-9):12.1%}" if peer else " " * 12
    return f"{name:40} {mine:9.4f} {mine / base:8.2f}x {each} {share} {best[name]['bytes'] / 1e6:6.2f} MB"


if __name__ == "__main__":
    main()
