"""Format facts as short text."""

from __future__ import annotations

import re
from collections.abc import Iterable


def seconds(nanoseconds: float) -> str:
    """Format a duration.

    >>> seconds(1_234_567_890), seconds(12_300_000), seconds(4_560), seconds(12)
    ('1.23 s', '12.3 ms', '4.56 us', '12 ns')
    """
    for limit, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "us")):
        if abs(nanoseconds) >= limit:
            return f"{_three(nanoseconds / limit)} {unit}"
    return f"{nanoseconds:.0f} ns"


def _three(value: float) -> str:
    return f"{value:,.{max(2 - (len(str(int(abs(value)))) - 1), 0)}f}"


def percent(share: float) -> str:
    """Format a share as a percentage.

    >>> percent(0.384), percent(0.0123), percent(0)
    ('38 %', '1.2 %', '0 %')
    """
    return f"{100 * share:.0f} %" if abs(share) >= 0.1 or not share else f"{100 * share:.1f} %"


def span_of(numbers: Iterable[int]) -> str:
    """Format numbers as spans.

    >>> span_of([0, 1, 2, 3, 8, 10, 11])
    '0-3, 8, 10-11'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def ranks_text(numbers: Iterable[int]) -> str:
    """Format a list of ranks.

    >>> ranks_text([3]), ranks_text([3, 4])
    ('rank 3', 'ranks 3-4')
    """
    every = list(numbers)
    return f"rank{'s' * (len(every) != 1)} {span_of(every)}"


def printable(text: str) -> str:
    """Return text from a file without control characters, which a terminal would obey.

    >>> printable("gemm\x1b[31m")
    'gemm?[31m'
    """
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def short_name(kernel: str, width: int = 60) -> str:
    """Return a kernel's name without templates and arguments, but with the functor that tells what it does.

    >>> short_name("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, ...>(int, float)")
    'at::native::vectorized_elementwise_kernel FillFunctor'
    """
    name = printable(kernel).removeprefix("void ")
    depth, kept = 0, []
    for sign in name:
        depth += (sign in "<(") - (sign in ">)")
        if depth <= 0 and sign not in ">)":
            kept.append(sign)
    text = "".join(kept).strip() or name
    if found := re.search(r"(\w*(?:[fF]unctor|Ops)\w*|(?!gpu_kernel)\w+_kernel_cuda)", name[len(text) :]):
        text += f" {found[1]}"
    return text if len(text) <= width else text[: width - 3] + "..."
