"""Speed of every codec, relative to a copy on the same device in the same run.

- Bytes are those that the algorithm's passes read and write. Every pass over the numbers reads them once, the last one
  writes the message; decoding reads the message and writes the numbers.
- A sample for a threshold counts once: all rounds but the first find it in a cache.
- On a CUDA device all kernels of one call are captured in a graph, so that Python is not measured. PowerSGD of ranks
  that involve the host is timed from outside.
- On a CPU one thread copies and encodes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from meshwright.compression.codec import codec, codecs
from meshwright.compression.language import REDUCTIONS
from meshwright.compression.preflight import Tell
from meshwright.compression.program import ROUNDS, Program, sampling, walk
from meshwright.compression.threads import one_thread
from meshwright.errors import InputError

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


@dataclass(frozen=True)
class Speed:
    """Speed of one codec: seconds of a call, and bytes that it reads and writes.

    >>> Speed("half", 2.0, 0.5, 0.25, 6_000_000_000, 6_000_000_000).encode_rate
    12000000000.0
    """

    codec: str
    ratio: float  # bytes of gradients per byte of message
    encode: float
    decode: float
    encode_bytes: int
    decode_bytes: int

    @property
    def encode_rate(self) -> float:
        """Encoding rate in bytes per second."""
        return self.encode_bytes / self.encode

    @property
    def decode_rate(self) -> float:
        return self.decode_bytes / self.decode


class Bench:
    """Gradients of `size` bytes on this device, and the speed of copying them.

    >>> bench = Bench(1 << 16)
    >>> bench.speed("fp16").encode_bytes  # 64 KiB are read, half as many written, and 16 bytes before them
    98320
    """

    def __init__(self, size: int, *, feedback: bool = False) -> None:
        self.size, numbers = size, size // 4
        self._flat, self._other = torch.randn(numbers, device=DEVICE), torch.empty(numbers, device=DEVICE)
        self._residual = torch.zeros(numbers, device=DEVICE) if feedback else None

    def copy(self) -> float:
        """Return bytes per second, read and written: the fastest of some tries, as a busy machine slows them down."""
        # A driver's copy of 1 GiB reaches two thirds of a kernel's rate (H200): the faster of the two counts.
        copies = (lambda: self._other.copy_(self._flat), lambda: torch.mul(self._flat, 1.0, out=self._other))
        with one_thread():
            return 2 * self.size / min(seconds(one) for one in 3 * copies)

    def speed(self, name: str, **shape: int) -> Speed:
        """Return the speed of a codec with its default options; `shape` are those of `made`."""
        with one_thread():
            return self._low_rank(name) if codec(name).rounds > 1 else self._one_round(name, **shape)

    def _one_round(self, name: str, **shape: int) -> Speed:
        batch = made(name, [self._flat.numel()], **shape)
        message = batch.new_message()
        encode = seconds(lambda: batch.encode(self._flat, message, residual=self._residual))
        decode = seconds(lambda: batch.decode(message, self._other))
        looked = read_by_encoding(batch.program, self._flat.numel())
        moved = looked + batch.bytes + (0 if self._residual is None else looked + self.size)
        return Speed(name, self.size / batch.bytes, encode, decode, moved, self.size + batch.bytes)

    def _low_rank(self, name: str) -> Speed:
        """Return the speed of PowerSGD on a square matrix: both products read it, the last pass writes it."""
        from meshwright.compression.powersgd.low_rank import LowRank

        used = codec(name)
        side = int(self._flat.numel() ** 0.5)
        low = LowRank([(side, side)], used.options["rank"], DEVICE)
        size, numbers = 4 * side * side, self._flat[: side * side].clone()
        residual = None if self._residual is None else self._residual[: side * side]
        factors = codec(used.options["factors"]) if used.options["factors"] else None
        counts = [sum(low.firsts), sum(low.seconds)]
        sent = factors.bytes(counts) if factors else 4 * sum(counts)
        timed = wall if low.asks_host else seconds
        encode = timed(lambda: low.second(low.first(numbers, residual)), 9)
        factor = low.second(low.first(numbers, residual)).clone()
        decode = timed(lambda: low.finish(factor), 9)
        looked = 2 * size + (0 if residual is None else 2 * size)  # the residual is read, the sum written
        return Speed(name, size / sent, encode, decode, looked + 4 * sum(counts), size + 4 * sum(counts))


def measured(names: Sequence[str], mib: int | None, tell: Tell) -> dict[str, Any]:
    """Return the speed of every codec, or of the named ones, and of a copy; unknown names are refused before timing."""
    known = codecs()
    for name in names:
        if name not in known:
            raise InputError(f"unknown codec '{name}'", field="--codecs", valid=", ".join(sorted(known)))
    asked = list(dict.fromkeys(names)) or list(known)
    size = (mib or (256 if CUDA else 16)) << 20
    tell("copying", 0, len(asked) + 1)
    bench = Bench(size)
    copy, rows = bench.copy(), []
    for done, name in enumerate(asked):
        tell(name, done + 1, len(asked) + 1)
        rows.append(bench.speed(name))
    return {"device": device_name(), "bytes": size, "copy_bytes_per_second": copy, "codecs": [_facts(r) for r in rows]}


def _facts(speed: Speed) -> dict[str, Any]:
    rates = {"encode_bytes_per_second": speed.encode_rate, "decode_bytes_per_second": speed.decode_rate}
    return asdict(speed) | rates


def device_name() -> str:
    """Return the name of the measured device."""
    return str(torch.cuda.get_device_name()) if CUDA else "CPU, one thread"


def read_by_encoding(program: Program, numbers: int) -> int:
    """Return the bytes of float32 numbers that the passes of an encoding read."""
    looked = 0
    for one in program.encoding[:-1]:
        looked += numbers * any(node.op in REDUCTIONS and _reads(node) for node in one.reductions)
        for node in one.reductions:
            if node.op == "threshold" and _reads(node):
                looked += _looked_at(numbers, node.every)
    return 4 * (looked + numbers)


def _looked_at(numbers: int, every: int) -> int:
    """Return the numbers that the search of a threshold reads.

    On a CUDA device that is a sample, then all if all are needed; otherwise every round reads them.
    """
    if CUDA:
        from meshwright.compression.backends.triton.threshold_search import GUESS

        return sampling(numbers, GUESS if every == 1 else every)[1] + (numbers if every == 1 else 0)
    step, seen = sampling(numbers, every)
    return seen if step > 1 else (1 + ROUNDS) * seen


def _reads(node: Any) -> bool:
    return any(one.op == "gradient" for one in walk(node))


def seconds(call: Callable[[], Any], repeats: int = 9) -> float:
    """Return the seconds of one call: the median of some groups, after warm-up calls."""
    if not CUDA:
        return wall(call, repeats)
    call()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            call()
    return _on_device(graph.replay, repeats) / 5


def _on_device(call: Callable[[], Any], repeats: int) -> float:
    call()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def made(name: str, counts: list[int], **shape: int) -> Any:
    """Return a batch of a codec; `tile` and `warps` override those of a kernel."""
    if not (CUDA and shape):
        return codec(name).batch(counts, DEVICE)
    from meshwright.compression.backends.triton.batch import TritonBatch

    return TritonBatch(codec(name).program, counts, torch.device("cuda"), **shape)


def wall(call: Callable[[], Any], repeats: int) -> float:
    """Return the wall time, launches included: a graph saves these."""
    call()
    if CUDA:
        torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        if CUDA:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
