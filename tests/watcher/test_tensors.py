"""Tensors: changes in place, what wrappers say about them, and that torch stays out where nobody asked for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.watcher.events.events import read
from tests.watcher.seen import look_in, short


class Holder:
    def __init__(self) -> None:
        self.weight = torch.zeros(3)
        self.parts = [torch.ones(2), torch.ones(2)]

    def in_place(self) -> None:
        self.weight.add_(1)

    def by_index(self) -> None:
        self.weight[1] = 5

    def of_a_part(self) -> None:
        self.parts[1].mul_(2)

    def other_type(self) -> None:
        self.weight = self.weight.half()

    def look(self) -> float:
        return float(self.weight.sum())


class Net(torch.nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.layer(x)


def double(x: Any) -> Any:
    return 2 * x


def test_changes_in_place_are_seen(tmp_path: Path) -> None:
    """Fault 2: the tensor stays the same object, and its version counts up."""

    def work() -> None:
        holder = Holder()
        for step in (holder.in_place, holder.by_index, holder.look, holder.of_a_part, holder.other_type):
            step()

    events = look_in(tmp_path)(work, Holder, attributes=True)
    inside: dict[str, list[str]] = {}
    call = ""
    for one in events:
        call = one.name if one.event == "run" else call
        if one.event == "set":
            inside.setdefault(call, []).append(f"{one.name} {one.old} -> {one.new}")
    assert {name: len(lines) for name, lines in inside.items()} == {
        "Holder.__init__": 2, "Holder.in_place": 1, "Holder.by_index": 1, "Holder.of_a_part": 1, "Holder.other_type": 1,
    }  # fmt: skip
    assert inside["Holder.in_place"] == ["Holder.weight Tensor[3] float32 cpu v0 -> Tensor[3] float32 cpu v1"]
    assert inside["Holder.of_a_part"] == ["Holder.parts list of 2 -> list of 2, [1] = Tensor[2] float32 cpu v1"]
    assert "float16" in inside["Holder.other_type"][0]


class Arrays:
    def __init__(self) -> None:
        self.small, self.large = np.zeros(4), np.zeros(10_000)

    def in_place(self) -> None:
        self.small[2] = 1
        self.large *= 1  # nothing is different
        self.large[3] = 1
        self.large[5_000] = 1  # beyond what is looked at


def test_arrays_that_change_in_place(tmp_path: Path) -> None:
    events = look_in(tmp_path)(Arrays().in_place, Arrays, attributes=True)
    assert [one.name for one in events if one.event == "set"] == ["Arrays.small", "Arrays.large"]


def test_parameters_that_an_optimizer_changes(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def work() -> None:
        for _ in range(2):
            net(torch.ones(1, 4)).sum().backward()
            optimizer.step()

    target = "torch.nn.modules.linear:Linear"
    found = [line for line in short(look_in(tmp_path)(work, target, attributes=["_parameters"])) if "set" in line]
    assert len(found) == 1  # said at the second call: the first change came after the first call
    assert f"['weight'] = Parameter[2, 4] float32 cpu v{net.layer.weight._version - 1}" in found[0]
    assert "before this call" in found[0]


def test_the_tensor_wrapper_shows_numbers(tmp_path: Path) -> None:
    numbers = np.array([[-3.5, 2.0], [0.25, 8.0]])
    events = look_in(tmp_path)(lambda: double(torch.tensor(numbers)), double, wrapper="tensor")
    for event, array in zip(events, (numbers, 2 * numbers), strict=True):
        words = event.text.split()
        assert "Tensor[2," in event.text
        assert "float64 cpu" in event.text
        said = {key: float(words[words.index(key) + 1]) for key in ("min", "max", "norm")}
        wanted = {"min": array.min(), "max": array.max(), "norm": np.sqrt((array**2).sum())}
        assert said == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0), torch.empty(2, device="meta"), torch.ones(2, dtype=torch.complex64), torch.tensor([True, False]),
        torch.ones(3, requires_grad=True), torch.eye(2).to_sparse(),
    ],
    ids=["empty", "meta", "complex", "bool", "grad", "sparse"],
)  # fmt: skip
def test_any_tensor_can_be_looked_at(tmp_path: Path, tensor: Any) -> None:
    answer = []
    events = look_in(tmp_path)(lambda: answer.append(double(tensor)), double, wrapper="tensor", locals=True)
    assert [one.event for one in events] == ["run", "end"]
    assert answer[0].requires_grad == tensor.requires_grad
    assert "Tensor[" in events[0].text


def test_inference_tensors(tmp_path: Path) -> None:
    class Keeps:
        def keep(self) -> None:
            with torch.inference_mode():
                self.x = torch.ones(2)

    assert "set Keeps.x" in "\n".join(short(look_in(tmp_path)(lambda: Keeps().keep(), Keeps, attributes=True)))


def test_sharding_is_shown(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        events = look_in(tmp_path)(lambda: double(sharded), double, wrapper="tensor")
    finally:
        dist.destroy_process_group()
    assert "DTensor[4] float32 cpu S(0)" in events[0].text.replace("Shard(dim=0)", "S(0)")
    assert "max 3 " in events[0].text


def test_the_memory_wrapper_shows_bytes(tmp_path: Path) -> None:
    """Fault 11: bytes, not numbers of allocations; in a process of its own, where nobody else frees memory meanwhile."""
    code = (
        "import meshwright\n"
        "def grow(n):\n"
        "    return bytearray(b'x') * n\n"
        f"with meshwright.watch(grow, wrapper='memory', output={str(tmp_path / 'run')!r}):\n"
        "    kept = grow(200 << 20)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    events = read(str(tmp_path / "run.rank0.jsonl"))[1:-1]
    more = events[1].text.partition("(+")[2].split()
    assert more[1].startswith("MiB")
    assert float(more[0].replace(",", "")) == pytest.approx(200, rel=0.1)


@pytest.mark.parametrize("error", [RuntimeError("oops"), SystemExit("oops")])
def test_a_wrapper_of_five_lines_and_its_mistakes(tmp_path: Path, error: BaseException) -> None:
    class Shapes:
        def call(self, name: str, frame: Any) -> str:
            return str(tuple(frame.f_locals["x"].shape))

        def returned(self, name: str, value: Any) -> str:
            raise error

    events = look_in(tmp_path)(lambda: double(torch.ones(2, 5)), double, wrapper=Shapes)
    assert [one.text for one in events] == ["x=(2, 5)"[2:], f"(Shapes.returned raises {type(error).__name__}: oops)"]


def test_torch_is_never_imported_by_us(tmp_path: Path) -> None:
    code = (
        "import sys, json, meshwright\n"
        f"with meshwright.watch('json', attributes=True, locals=True, wrapper='tensor', output={str(tmp_path / 'run')!r}):\n"
        "    json.dumps({'a': [1]}, indent=1)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
