"""The largest model that one server trains, and the longest sequence a mixed cluster trains, against simpler planners.

    python benchmarks/largest.py

Every entry is the largest of a family of Llama-like models (width h, h / 128 blocks) for which a plan fits, batch 8 and
2048 tokens; by our own memory model, with its stated margin.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

import meshwright as mw
from meshwright.clusters.device import Group
from meshwright.cost.runtime import RUNTIMES
from meshwright.errors import MeshwrightError
from meshwright.search.exact.solve import Search
from meshwright.search.space.limits import Limits

SERVERS = [("8xv100-32gb", "fp16"), ("8xa100-40gb", "bf16"), ("8xa100-80gb", "bf16"), ("8xrtx4090", "bf16")]
WAYS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "full recomputation only": ({"recompute": "full"}, ["offload", "zero", "adaptive"]),
    "ZeRO-3 only": ({"zero": 3, "tp": 1, "pp": 1}, ["offload", "recompute", "ulysses", "ring"]),
    "CPU offload only": ({"tp": 1, "pp": 1}, ["recompute", "ulysses", "ring"]),
    "everything": ({}, []),
}
MIXED = [
    ("llama3-8b", "1x8xh100+1x8xa100-40gb", "bf16"), ("gpt3-6.7b", "1x8xa100-80gb+1x8xv100-32gb", "fp16"),
    ("gpt3-6.7b", "1x8xascend-910a+1x8xascend-910b", "fp16"),
]  # fmt: skip


def family(width: int) -> mw.Model:
    config = {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": width, "num_hidden_layers": width // 128,
        "num_attention_heads": width // 128, "num_key_value_heads": width // 128,
        "intermediate_size": width * 8 // 3 // 128 * 128, "max_position_embeddings": 4_194_304,
    }  # fmt: skip
    return mw.Model.from_config(config, name=f"width {width}")


def fits(job: mw.Job, fixed: dict[str, Any], forbidden: list[str]) -> bool:
    try:
        search = Search(job, RUNTIMES["meshwright"], Limits.of(fixed, forbidden), deadline=time.monotonic() + 5)
        search.first_only = True
        search.run()
    except MeshwrightError:
        return False
    return bool(search.best)


def largest(values: list[int], good: Callable[[int], bool]) -> int:
    """The last of rising values that is good, by halving; 0 if none is."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if good(values[middle]) else (low, middle)
    return values[low - 1] if low else 0


def servers() -> Table:
    table = Table(title="the largest model on one server, billions of parameters")
    table.add_column("server")
    for name in WAYS:
        table.add_column(name, justify="right")
    widths = list(range(1024, 32769, 1024))
    for server, precision in SERVERS:
        cells = []
        for fixed, forbidden in WAYS.values():

            def good(width: int, fixed: dict[str, Any] = fixed, forbidden: list[str] = forbidden) -> bool:
                job = mw.Job(family(width), mw.Cluster.preset(server), 8, 2048, precision)  # noqa: B023
                return fits(job, fixed, forbidden)

            width = largest(widths, good)
            cells.append(f"{family(width).parameters / 1e9:.1f}" if width else "none")
        table.add_row(server, *cells)
    return table


def group_job(model: str, group: Group, length: int, precision: str) -> mw.Job:
    """A group's part of the job; models with learned positions give way to a Llama of their size beyond them."""
    base = mw.Model.preset(model)
    if base.learned_positions and length > base.max_seq_len:
        base = family(4096)
    return mw.Job(base, mw.Cluster(group.device.name, (group,)), 8, length, precision)


def longest(model: str, cluster: str, precision: str, limits: tuple[dict[str, Any], list[str]], every: bool) -> int:
    """Tokens of the longest sequence that every group, or any group, can train under some limits."""
    groups = mw.Cluster.preset(cluster).groups
    ask = all if every else any
    lengths = [1024 * 2**i for i in range(13)]
    return largest(lengths, lambda n: ask(fits(group_job(model, g, n, precision), *limits) for g in groups))


def sequences() -> Table:
    """Where one way must do for all devices the smallest decides; plans per group may leave one idle."""
    table = Table(title="the longest sequence on a mixed cluster, thousands of tokens, batch 8 per group")
    for name in ("model", "cluster", "one way for all devices", "no recompute or context parallelism", "ours"):
        table.add_column(name)
    for model, cluster, precision in MIXED:
        plain: tuple[dict[str, Any], list[str]] = ({"ring": 1, "ulysses": 1}, ["recompute"])
        found = (
            longest(model, cluster, precision, ({}, []), every=True),
            longest(model, cluster, precision, plain, every=False),
            longest(model, cluster, precision, ({}, []), every=False),
        )
        table.add_row(model, cluster, *(f"{n // 1024}K" for n in found))
    return table


def main() -> None:
    out = Console(width=120)
    out.print(servers())
    out.print(sequences())


if __name__ == "__main__":
    main()
