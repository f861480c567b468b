"""Modules of PyTorch under a watch: their parameters by name, and what is compiled."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from tests.conftest import Run
from tests.watcher.seen import Look, short


class Net(nn.Module):
    """Parameters, buffers and submodules, which nn.Module keeps in dicts of its own."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("total", torch.zeros(2))
        self.steps = 0
        self.other = 1

    def step(self) -> None:
        self.total += 1
        with torch.no_grad():
            self.weight.mul_(2)
        self.steps = 5
        self.other = 3
        self.weight.data = torch.zeros(3)
        del self.total
        self.inner = nn.Identity()


def test_parameters_and_buffers_are_followed_by_name(look: Look, either: None) -> None:
    net = Net()
    assert short(look(net.step, Net.step, attributes=["weight", "total", "steps", "inner"])) == [
        "run Net.step",
        "  set Net.total Tensor[2] float32 cpu v0 -> Tensor[2] float32 cpu v1",
        "  set Net.weight Parameter[3] float32 cpu v0 -> Parameter[3] float32 cpu v1",
        "  set Net.steps 0 -> 5",
        "  set Net.weight Parameter[3] float32 cpu v1 -> Parameter[3] float32 cpu v1, other data",
        "  del Net.total",
        "  set Net.inner None -> <Identity>",
        "end Net.step",
    ]


class Ema(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.weight.grad = torch.ones(3)
        self.total, self.all = torch.ones(3), [torch.ones(2)]
        self.optimizer = torch.optim.AdamW([self.weight], fused=True)

    def update(self) -> None:
        self.optimizer.step()
        self.weight.data.mul_(0.9)
        self.total.numpy()[:] = 5
        self.all[0].data.zero_()
        self.weight.data.mul_(1)


def test_changes_that_count_no_version_are_seen(look: Look, either: None) -> None:
    """Fused optimizers, `.data`, and what writes into the memory, as collectives do."""
    ema = Ema()
    assert short(look(ema.update, Ema.update, attributes=["weight", "total", "all"])) == [
        "run Ema.update",
        "  set Ema.weight Parameter[3] float32 cpu v0 -> Parameter[3] float32 cpu v0, other data",
        "  set Ema.weight Parameter[3] float32 cpu v0 -> Parameter[3] float32 cpu v0, other data",
        "  set Ema.total Tensor[3] float32 cpu v0 -> Tensor[3] float32 cpu v0, other data",
        "  set Ema.all list of 1 -> list of 1, [0] = Tensor[2] float32 cpu v0",
        "end Ema.update",
    ]


COMPILED = """
import torch
from torch._dynamo.testing import CompileCounter

counted = CompileCounter()

@torch.compile(backend=counted)
def watched(x):
    return x * 3

def inner(x):
    return x + 1

@torch.compile(backend=counted)
def around(x):
    return inner(x) * 2

@torch.compile(backend=counted)
def untouched(x):
    return x - 1

one = torch.ones(2)
print(watched(one).tolist(), around(one).tolist(), untouched(one).tolist(), counted.frame_count)
"""


def test_what_is_watched_is_not_compiled_and_all_else_is(meshwright: Run, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(COMPILED)
    targets = ["--target", "program:watched", "--target", "program:inner"]
    done = meshwright("watch", "program.py", *targets, "-o", "run", timeout=240)
    # with `sys.monitoring` nothing is put into the code: all three are compiled
    graphs = 1 if sys.version_info < (3, 12) else 3
    assert done.stdout == f"[3.0, 3.0] [4.0, 4.0] [0.0, 0.0] {graphs}\n", done.stderr[-3000:]
    if sys.version_info < (3, 12):
        shown = meshwright("watch", "--show", "run").stdout
        assert [line.split()[2:4] for line in shown.splitlines() if " run " in line] == [
            ["run", "watched"],
            ["run", "inner"],
        ]
