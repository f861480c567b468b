"""What watching costs: plain, ours, objwatch and viztracer, in turns, in one run.

    python benchmarks/watch.py [--repeats 3]

CPU seconds, start and stop of the watch and all its writing included. Every case has a process of its own, in which plain
and watched rounds take turns. The mean of the faster half of either makes its overhead, and of several processes the middle
one is told: of rounds of 0.3 s the best of nine differs by 5 ms from one try to the next, that mean by 2.
'calls' and 'changes' are counted in what was written: ours has more changes where something changes in place.
'model' trains a small GPT for 20 steps on one CPU thread, 'tiny' calls a method of two lines 5,000 times. Peers that are
not installed are left out by name: `pip install objwatch viztracer`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
STEPS, CALLS, ROUNDS = 20, 5000, 15
TORCH = ["torch.nn.modules.module", "torch.optim.optimizer", "torch.optim.adamw"]  # code that is not the user's own
LOGGED = re.compile(r".*?\d+ +(run|end|upd|apd|pop) ")  # objwatch: [#rank] line, indent, what
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

        given = {key: value for key, value in options.items() if key != "shapes"}
        if options.get("shapes"):
            from objwatch.wrappers import TensorShapeWrapper

            given["wrapper"] = TensorShapeWrapper
        return peer.ObjWatch(targets, output=os.path.join(folder, "run.objwatch"), **given)

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
    "model, one file, numbers of tensors: ours": ("model", ours("watched", attributes=True, wrapper="tensor")),
    "model, one file, shapes: ours": ("model", ours("watched", attributes=True, wrapper="plain")),
    "model, one file, shapes: objwatch": ("model", objwatch(["watched.py"], shapes=True)),
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
    """Plain and watched rounds in turns in this process: processes differ by more than a watch costs."""
    what, context = CASES[name]
    work = work_of(what)
    work()
    plain_seconds, seconds = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            plain_seconds.append(timed(work))
            watching = context(folder)
            start = time.process_time()
            with watching:
                work()
            seconds.append(time.process_time() - start)
        calls, changes = written(folder)
    return {"seconds": calm(seconds), "plain": calm(plain_seconds), "calls": calls, "changes": changes}


def calm(rounds: list[float]) -> float:
    """The mean of the faster half: what disturbs a round only makes it slower.

    >>> calm([3.0, 1.0, 2.0, 9.0])
    1.5
    """
    faster = sorted(rounds)[: (len(rounds) + 1) // 2]
    return sum(faster) / len(faster)


def written(folder: str) -> tuple[int, int]:
    """Calls and changes of one round; ours writes the file anew in every round, objwatch appends to it."""
    rounds = 1
    found: collections.Counter[str] = collections.Counter()
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), errors="replace") as file:
            if name.endswith(".jsonl"):
                found.update(json.loads(line)["event"] for line in file)
            elif name.endswith(".objwatch"):
                found.update(word[1] for line in file if (word := LOGGED.match(line)))
                rounds = ROUNDS
    changes = sum(found[one] for one in ("set", "del", "upd", "apd", "pop"))
    return found["run"] // rounds, changes // rounds


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
    parser.add_argument("--repeats", type=int, default=3)
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
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(asked.repeats):  # in turns, so that a slow minute of the machine hits all of them
        for name in names:
            found[name].append(in_its_own_process(name))
    middle = {name: sorted(many, key=overhead)[len(many) // 2] for name, many in found.items()}
    print(
        f"{'case':42} {'CPU-s':>8} {'of plain':>9} {'us/call':>8} {'calls':>6} {'changes':>8} {'of objwatch':>12}  bars"
    )
    for name in names:
        print(row(name, middle))


def overhead(one: dict[str, float]) -> float:
    return one["seconds"] - one["plain"]


def row(name: str, middle: dict[str, dict[str, float]]) -> str:
    one = middle[name]
    each = f"{overhead(one) / CALLS * 1e6:8.2f}" if CASES[name][0] == "tiny" else " " * 8
    counts = f"{one['calls']:6.0f} {one['changes']:8.0f}" if one["calls"] else " " * 15
    peer = middle.get(name.replace(": ours", ": objwatch")) if name.endswith("ours") else None
    share = overhead(one) / max(overhead(peer), 1e-9) if peer else None
    of_plain, said = one["seconds"] / one["plain"], f"{share:12.1%}" if share is not None else " " * 12
    met = bars(name, of_plain - 1, share)
    return f"{name:42} {one['seconds']:8.4f} {of_plain:8.2f}x {each} {counts} {said}  {met}".rstrip()


def bars(name: str, more: float, share: float | None) -> str:
    """Which of the bars a case of ours meets: a tenth of objwatch; 2 % for nothing, 5 % for a file of the small model."""
    found = [("<= 10 % of objwatch", share <= 0.1)] if share is not None else []
    if name.startswith("model") and name.endswith("ours"):
        limit = {"model, nothing matches: ours": 0.02, "model, one file: ours": 0.05}.get(name)
        found += [(f"<= {1 + limit:.2f}x", more <= limit)] if limit else []
    return ", ".join(f"{bar}: {'met' if met else 'MISSED'}" for bar, met in found)


if __name__ == "__main__":
    main()
