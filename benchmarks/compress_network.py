"""Training over slow links: DDP and its hooks against ours, by seconds per step, bytes, and seconds to a validation loss.

    python benchmarks/compress_network.py [--rates 50 200 500 0] [--model mlp text] [--ours int8/scatter onebit/gather]
    python benchmarks/compress_network.py --reshape 500 50 500  # links change during a run: what is decided, when

Four ranks on CPUs (gloo), each in a network namespace behind a link of `--rates` Mbit/s (0: no limit), which needs root and
iproute2; elsewhere links are imitated by waiting, which is rough. All modes run in one world, one after the other, from the
same weights and on the same data; `--repeat` runs them in turns. "alone" exchanges nothing: what computing takes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

RANKS = 4
ROOT = Path(__file__).resolve().parents[1]
BUCKET_MB = 8
LOOK, PAUSE = 2, 10  # steps between weights that are validated, and between pauses in which that is done
EARLY = 3  # steps that no median or count of bytes looks at: buckets are cut anew, PowerSGD begins
PEERS = ("alone", "ddp", "ddp/fp16", "ddp/powersgd/1", "ddp/powersgd/4")


# --- in every rank


def mlp() -> tuple[Any, Callable[[int, int], tuple[Any, Any]], Callable[[Any, Any], Any], float]:
    """Eight layers of 1,024 (8.4 M parameters) that tell 64 noisy patterns apart; module, data, loss, learning rate."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    patterns = 0.5 * torch.randn(64, 1024)
    layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())][:-1]
    for layer in layers[::2]:
        nn.init.kaiming_normal_(layer.weight)

    def data(rank: int, step: int) -> tuple[Any, Any]:
        seed = torch.Generator().manual_seed(1000 * step + rank)
        which = torch.randint(0, 64, (16,), generator=seed)
        return patterns[which] + torch.randn(16, 1024, generator=seed), which

    return nn.Sequential(*layers), data, nn.functional.cross_entropy, 3e-4


def text() -> tuple[Any, Callable[[int, int], tuple[Any, Any]], Callable[[Any, Any], Any], float]:
    """A character model (3.3 M parameters) on this project's own documents, as they were one day."""
    import torch
    from torch import nn

    pages = gzip.decompress((ROOT / "benchmarks" / "data" / "documents.txt.gz").read_bytes()).decode()
    codes = torch.tensor([min(ord(char), 127) for char in pages])

    class Block(nn.Module):
        def __init__(self, width: int = 256) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
            self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.wide, self.thin = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.into(self.norms[0](x)).chunk(3, -1))
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            return x + self.thin(nn.functional.gelu(self.wide(self.norms[1](x))))

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.place = nn.Embedding(128, 256), nn.Parameter(torch.zeros(64, 256))
            self.blocks = nn.Sequential(*[Block() for _ in range(4)])
            self.head = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 128))

        def forward(self, x: Any) -> Any:
            return self.head(self.blocks(self.embed(x) + self.place))

    def data(rank: int, step: int) -> tuple[Any, Any]:
        starts = torch.randint(0, len(codes) - 65, (4,), generator=torch.Generator().manual_seed(1000 * step + rank))
        rows = torch.stack([codes[start : start + 65] for start in starts.tolist()])
        return rows[:, :-1], rows[:, 1:]

    def loss(found: Any, wanted: Any) -> Any:
        return nn.functional.cross_entropy(found.flatten(0, 1), wanted.flatten())

    torch.manual_seed(0)
    return Text(), data, loss, 2e-3


MODELS = {"mlp": mlp, "text": text}
# The text has 3.40 nats a character by their frequencies, and 2.62 by those of pairs: the model has learned pairs by then.
TARGETS = {"mlp": 0.5, "text": 2.65}


def hooked(ddp: Any, mode: str, pace: Any) -> Any:
    """Register what a mode stands for; what is to be closed after it."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    name, _, rest = mode.partition("/")
    if name not in {"alone", "ddp"}:
        return ours(ddp, name, rest, pace)
    if rest == "fp16":
        ddp.register_comm_hook(None, paced(default_hooks.fp16_compress_hook, pace, 0.5))
    elif rest:
        rank = int(rest.removeprefix("powersgd/"))
        state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=2, min_compression_rate=1)
        ddp.register_comm_hook(state, paced(powerSGD_hook.powerSGD_hook, pace, 0.005 * rank))
    elif pace:
        ddp.register_comm_hook(None, paced(default_hooks.allreduce_hook, pace, 1.0))
    return None


def paced(hook: Any, pace: Any, part: float) -> Any:
    """A hook of torch over an imitated link: its result comes after the bytes would have."""
    if not pace:
        return hook
    import torch
    import torch.distributed as dist

    def late(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        size = int(part * 2 * (RANKS - 1) / RANKS * bucket.buffer().nbytes)
        return hook(state, bucket).then(lambda future: (pace(size), future.value())[1])

    late.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    return late


def ours(ddp: Any, name: str, rest: str, pace: Any) -> Any:
    """`int8/scatter`, `terngrad:bits=2/gather/65536`, `plain`: a codec with options, a topology, numbers of a piece;
    `auto`: what is expected to pay."""
    from meshwright.compression import codec
    from meshwright.compression.auto import Auto
    from meshwright.compression.sync import Choice, Traffic, register

    name, _, given = name.partition(":")
    options = {
        key: json.loads(value) if value[:1].isdigit() else value
        for key, _, value in (one.partition("=") for one in given.split(",") if one)
    }
    topology, _, piece = rest.partition("/")
    more = {"piece": int(piece)} if piece else {}
    if name == "auto":
        choice: Any = Auto()
    else:
        choice = Choice() if name == "plain" else Choice(codec(name, **options), topology or "scatter", **more)
    return register(ddp, choice, traffic=Traffic(pace=pace))


def trained(model: str, mode: str, steps: int, target: float, limit: float, rate: float, rank: int) -> dict[str, Any]:
    """One run of a mode until it has reached the loss, or for so many steps or seconds: seconds of every step, bytes, and
    when the loss was reached (validation is not counted)."""
    import torch
    import torch.distributed as dist
    from benchmarks.network_bed import Pace, sent_bytes
    from torch.nn.parallel import DistributedDataParallel

    module, data, loss, learning_rate = MODELS[model]()
    ddp = DistributedDataParallel(
        module, bucket_cap_mb=1000 if "ddp/powersgd" in mode else BUCKET_MB, gradient_as_bucket_view=True
    )
    pace = Pace(1e6 * rate) if rate else None
    closed = hooked(ddp, mode, pace)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=learning_rate, fused=True)
    proofs = [data(9, 10**6 + i) for i in range(16)]
    looks: list[tuple[int, list[Any]]] = []  # weights after some steps; the first rank has them
    dist.barrier()
    seconds: list[float] = []
    losses: list[float] = []
    before, reached = 0, None
    for step in range(steps):
        if step == EARLY:
            before = pace.sent if pace else sent_bytes()
        begin = time.perf_counter()
        x, y = data(rank, step)
        optimizer.zero_grad()
        with ddp.no_sync() if mode == "alone" else nullcontext():
            loss(ddp(x), y).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
        if rank == 0 and step % LOOK == LOOK - 1:
            looks.append((step + 1, [one.detach().clone() for one in module.parameters()]))
        if step % PAUSE == PAUSE - 1:
            losses += validated(module, looks, proofs, loss, target)
            found = looks[len(losses) - 1][0] if losses and losses[-1] <= target else 0
            late = sum(seconds) > limit
            found, late = told(found, late)
            reached = sum(seconds[:found]) if found else None
            if found or late:
                break
    decisions = outlooks(closed)
    sent = ((pace.sent if pace else sent_bytes()) - before) / max(len(seconds) - EARLY, 1)
    dist.barrier()
    if closed:
        closed.close()
    return {
        "step": statistics.median(seconds[EARLY:]), "spread": [min(seconds), max(seconds)], "sent": sent,
        "reached": reached, "each": seconds, "losses": losses, "decisions": decisions, "steps": found or len(seconds),
    }  # fmt: skip


def validated(module: Any, looks: list[tuple[int, list[Any]]], proofs: Any, loss: Any, target: float) -> list[float]:
    """Losses of the weights that were kept and not looked at yet, until one has reached the target."""
    import torch

    found: list[float] = []
    fresh = [(place, weights) for place, (_, weights) in enumerate(looks) if weights]
    with torch.no_grad():
        now = [one.clone() for one in module.parameters()]
        for place, weights in fresh:
            torch._foreach_copy_(list(module.parameters()), weights)
            found.append(statistics.fmean(loss(module(x), y).item() for x, y in proofs))
            looks[place] = (looks[place][0], [])
            if found[-1] <= target:
                break
        torch._foreach_copy_(list(module.parameters()), now)
    return found


def told(found: int, late: bool) -> tuple[int, bool]:
    """What the first rank says: all stop together."""
    import torch
    import torch.distributed as dist

    numbers = torch.tensor([found, int(late)])
    dist.broadcast(numbers, 0)
    return int(numbers[0]), bool(numbers[1])


def outlooks(synchroniser: Any) -> list[dict[str, Any]]:
    """What was decided during a run, with the seconds of a step that were expected and seen."""
    if synchroniser is None or synchroniser.pilot is None:
        return []
    return [
        {
            "step": one.step, "expected": one.expected, "seen": one.seen,
            "ways": sorted({way.name for way in one.decision.ways}),
            "compute": one.facts.ready[-1], "worker": one.decision.times.worker, "wire": one.decision.times.wire,
            "mbit": 8e-6 / one.facts.link.messages.byte, "latency": one.facts.link.messages.latency,
        }
        for one in synchroniser.pilot.history
    ]  # fmt: skip


def bandwidth() -> float:
    """Mbit/s that leave a rank in an all-reduce of 4 MiB: what the links really carry."""
    import torch
    import torch.distributed as dist

    numbers = torch.ones(1 << 20)
    dist.all_reduce(numbers)
    begin = time.perf_counter()
    for _ in range(2):
        dist.all_reduce(numbers)
    return 2 * 2 * (RANKS - 1) / RANKS * 32 * (1 << 20) / (time.perf_counter() - begin) / 1e6


def rank_main(rank: int, address: str, port: int, device: str) -> None:
    """A rank: reads one order a line, answers one line each."""
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), GLOO_SOCKET_IFNAME=device)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    for line in sys.stdin:
        order = json.loads(line)
        answer = {"mbit": bandwidth()} if order.pop("check", False) else trained(**order, rank=rank)
        print(json.dumps(answer), flush=True)


# --- around them


def order_all(processes: list[Any], order: dict[str, Any]) -> None:
    for process in processes:
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()


def ask(processes: list[Any], order: dict[str, Any]) -> list[dict[str, Any]]:
    order_all(processes, order)
    return answers(processes)


def answers(processes: list[Any]) -> list[dict[str, Any]]:
    lines = [process.stdout.readline() for process in processes]
    if not all(lines):
        raise SystemExit("a rank has ended; see above")
    return [json.loads(line) for line in lines]


def started(star: Any) -> Iterator[Any]:
    port = 20000 + os.getpid() % 20000
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    for rank in range(RANKS):
        inside = star.inside(rank) if star else []
        where = [star.address(0), str(port), "eth0"] if star else ["127.0.0.1", str(port), "lo"]
        command = [*inside, sys.executable, __file__, "--rank", str(rank), *where]
        yield subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def measured(asked: argparse.Namespace, processes: list[Any], star: Any) -> list[dict[str, Any]]:
    found = []
    for rate in asked.rates:
        if star:
            star.shape(f"{rate}mbit" if rate else "")
        mbit = statistics.fmean(one["mbit"] for one in ask(processes, {"check": True}))
        print(f"\n{rate or 'no limit'} Mbit/s asked; an all-reduce of 4 MiB carries {mbit:.0f}")
        for model in asked.model:
            print(
                f"{model:6} {'mode':22} {'s/step':>8} {'(min-max)':>15} {'MiB/step':>9} {'steps':>6} {'s to loss':>10}"
            )
            for _ in range(asked.repeat):
                for mode in (*asked.peers, *asked.ours):
                    order = {"model": model, "mode": mode, "steps": 40 if mode == "alone" else asked.steps}
                    order["limit"] = asked.limit
                    order["target"] = TARGETS[model] if asked.target is None else asked.target
                    got = ask(processes, order | {"rate": 0 if star else rate})
                    found.append({"rate": rate, "model": model, "mode": mode, "carried": mbit, **row(got)})
                    show(found[-1])
    return found


def reshaped(asked: argparse.Namespace, processes: list[Any], star: Any) -> None:
    """One run of each model, during which links change (`tc qdisc change`): looks, with what was measured and decided."""
    for model in asked.model:
        star.shape(f"{asked.reshape[0]}mbit")
        ask(processes, {"check": True})
        seconds = asked.limit / len(asked.reshape)
        begin = time.monotonic()
        order_all(
            processes, {"model": model, "mode": "auto", "steps": 10**6, "target": 0.0, "limit": asked.limit, "rate": 0}
        )
        for place, rate in enumerate(asked.reshape[1:], 1):
            time.sleep(max(begin + place * seconds - time.monotonic(), 0))
            star.shape(f"{rate}mbit")
        one = answers(processes)[0]
        print(f"\n{model}: links of {asked.reshape} Mbit/s, one after the other, for about {seconds:.0f} s each")
        print(f"{'step':>5} {'after s':>8} {'link':>6} {'expected':>9} {'seen':>7}  from then on")
        before = ""
        for look in one["decisions"]:
            at = sum(one["each"][: look["step"]])
            ways = ", ".join(look["ways"])
            times = f"{look['expected']:9.3f} {look['seen']:7.3f}"
            print(f"{look['step']:5} {at:8.1f} {look['mbit']:6.0f} {times}  {ways if ways != before else '...'}")
            before = ways


def row(got: list[dict[str, Any]]) -> dict[str, Any]:
    """All ranks as one: the slowest decides."""
    worst = max(got, key=lambda one: one["step"])
    mib = max(one["sent"] for one in got) / 2**20
    reached = None if any(one["reached"] is None for one in got) else max(one["reached"] for one in got)
    own = {key: worst[key] for key in ("step", "spread", "each", "losses", "decisions", "steps")}
    return {**own, "mib": mib, "reached": reached}


def show(one: dict[str, Any]) -> None:
    low, high = one["spread"]
    reached = "-" if one["reached"] is None else f"{one['reached']:.1f}"
    times = f"{one['step']:8.3f} {f'{low:.2f}-{high:.2f}':>15}"
    print(f"{'':6} {one['mode']:22} {times} {one['mib']:9.2f} {one['steps']:6} {reached:>10}", flush=True)
    if one["decisions"]:
        last = one["decisions"][-1]
        print(f"{'':6} {'':22} chose {', '.join(last['ways'])}; link of {last['mbit']:.0f} Mbit/s")


def verdict(found: list[dict[str, Any]]) -> None:
    """The best peer and ours for every link and model, and how well steps were predicted."""
    print(f"\n{'Mbit/s':>7} {'model':6} {'best peer':>22} {'s':>7} {'ours':>7} {'times':>6}")
    for rate, model in sorted(
        {(one["rate"], one["model"]) for one in found}, key=lambda pair: (pair[0] or 1e9, pair[1])
    ):
        rows = [one for one in found if (one["rate"], one["model"]) == (rate, model) and one["reached"]]
        peers = {one["mode"] for one in rows if one["mode"].startswith("ddp")}
        modes = {one["mode"] for one in rows}
        by_mode = {mode: statistics.median(one["reached"] for one in rows if one["mode"] == mode) for mode in modes}
        if "auto" in by_mode and peers:
            best = min(peers, key=lambda mode: by_mode[mode])
            ours = by_mode["auto"]
            print(f"{rate or '-':>7} {model:6} {best:>22} {by_mode[best]:7.1f} {ours:7.1f} {by_mode[best] / ours:6.2f}")
    errors = [abs(look["expected"] / look["seen"] - 1) for one in found for look in one["decisions"] if look["seen"]]
    if errors:
        print(f"steps predicted: {len(errors)}, median error {statistics.median(errors):.1%}")


def main() -> None:
    if "--rank" in sys.argv:
        _, _, rank, address, port, device = sys.argv
        rank_main(int(rank), address, int(port), device)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=int, nargs="*", default=[50, 200, 500, 0])
    parser.add_argument("--model", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--peers", nargs="*", default=list(PEERS))
    parser.add_argument("--ours", nargs="*", default=["auto"])
    parser.add_argument("--steps", type=int, default=260, help="at most")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds of training that a run may take")
    parser.add_argument("--target", type=float, help="the validation loss to reach; each model has one of its own")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--reshape", type=int, nargs="*", help="Mbit/s of links during one run, one after the other")
    parser.add_argument("--imitate", action="store_true", help="imitate links though namespaces could be made")
    parser.add_argument("--write", type=Path, help="a file for all figures")
    asked = parser.parse_args()
    from benchmarks.network_bed import Star, usable

    with ExitStack() as stack:
        star = stack.enter_context(Star(RANKS)) if usable() and not asked.imitate else None
        if star is None:
            print("no namespaces (they need root, Linux and iproute2): links are imitated by waiting")
        processes = list(started(star))
        try:
            if asked.reshape and star:
                reshaped(asked, processes, star)
                return
            found = measured(asked, processes, star)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    verdict(found)
    if asked.write:
        asked.write.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
