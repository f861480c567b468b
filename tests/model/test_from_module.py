"""Any module becomes a chain: boundaries, counts, polynomials; no memory is taken."""

from __future__ import annotations

import resource

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from meshwright.errors import InputError
from meshwright.model import Model, Slice, presets


def from_preset(name: str, **changes: object) -> nn.Module:
    preset = presets()[name]
    with torch.device("meta"):
        return getattr(transformers, preset.architecture)(
            transformers.AutoConfig.for_model(**(preset.config | changes))
        )


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = (
            nn.LayerNorm(width),
            nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


class Mixture(nn.Module):
    """A list of modules that do not feed one another: no place to cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(expert(x) for expert in self.experts)


def test_boundaries_are_the_blocks() -> None:
    model = nn.Sequential(nn.Linear(8, 16), *(Residual(16) for _ in range(5)), nn.Linear(16, 3))
    chain = Model.from_module(model, torch.zeros(2, 8))
    assert [layer.name for layer in chain.layers] == ["0", "1", "2", "3", "4", "5", "6"]
    assert chain.layers[1].width_out == 16
    assert chain.layers[-1].width_out == 3


def test_experts_are_not_a_chain() -> None:
    chain = Model.from_module(nn.Sequential(*(Mixture(16) for _ in range(3))), torch.zeros(2, 16))
    assert [layer.name for layer in chain.layers] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("name", "links"),
    [("tiny-gpt2", 4 + 3), ("tiny-llama", 4 + 3), ("t5-small", 6 + 6 + 3), ("bert-base", 12 + 2)],
)
def test_transformers_models_are_cut_at_their_blocks(name: str, links: int) -> None:
    ids = torch.zeros(2, 32, dtype=torch.long)
    keywords = {"decoder_input_ids": ids} if name.startswith("t5") else {}
    chain = Model.from_module(from_preset(name), ids, seq_dim=1, **keywords)
    assert len(chain.layers) == links, [layer.name for layer in chain.layers]
    assert chain.parameters == Model.preset(name).parameters


@pytest.mark.parametrize("name", ["vit-base", "swin-base"])
def test_vision_flops_equal_the_written_out_model(name: str) -> None:
    """Two independent countings of one model: PyTorch's, and the formulas of the family."""
    written = Model.preset(name)
    chain = Model.from_module(from_preset(name), torch.zeros(1, 3, 224, 224))
    assert chain.forward_flops(Slice(1, 1)) == written.forward_flops(Slice(1, written.tokens))
    assert chain.parameters == written.parameters


def test_stages_of_swin_are_opened_up() -> None:
    chain = Model.from_module(from_preset("swin-base"), torch.zeros(1, 3, 224, 224))
    names = [layer.name for layer in chain.layers]
    assert "swin.encoder.layers.2.blocks.17" in names
    assert "swin.encoder.layers.0.downsample" in names


@pytest.mark.parametrize("length", [16, 40, 96, 128])
def test_flops_follow_the_sequence(length: int) -> None:
    """Traced once with 64 tokens; other lengths must equal PyTorch's own count at that length."""
    module = from_preset("tiny-gpt2", attn_implementation="eager").eval()
    chain = Model.from_module(module, torch.zeros(1, 64, dtype=torch.long), seq_dim=1)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(torch.zeros(1, length, dtype=torch.long, device="meta"))
    assert chain.forward_flops(Slice(3, length)) == pytest.approx(3 * counter.get_total_flops(), rel=1e-9)


def test_saved_bytes_equal_a_real_run() -> None:
    model = nn.Sequential(nn.Linear(8, 16), *(Residual(16) for _ in range(3)), nn.Linear(16, 3))
    chain = Model.from_module(model, torch.zeros(4, 8))
    held = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in held:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(torch.zeros(4, 8))
    real = sum(tensor.untyped_storage().nbytes() for tensor in found.values())
    assert chain.kept_bytes(Slice(4, 1, "fp32")) == real


def test_fused_attention_keeps_no_score_matrix() -> None:
    chain = Model.from_module(from_preset("vit-base"), torch.zeros(1, 3, 224, 224))
    written = Model.preset("vit-base")
    # 197^2 scores in 12 heads and 12 layers would add 22 MB to 118 MB.
    assert chain.kept_bytes(Slice(1, 1, "fp32")) == pytest.approx(written.kept_bytes(Slice(1, 197, "fp32")), rel=1e-3)


def test_nothing_is_allocated() -> None:
    """70 billion parameters on the meta device are 280 GB that must not be there."""
    module = from_preset("llama3-70b")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    chain = Model.from_module(module, torch.zeros(1, 64, dtype=torch.long), seq_dim=1)
    assert chain.parameters == 70_553_706_496
    assert len(chain.blocks) == 80
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB


def test_the_module_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Model.from_module(model, torch.zeros(2, 8))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model[0]._forward_hooks
    assert model[0].weight.device.type == "cpu"


def test_a_traced_model_survives_being_written_down() -> None:
    chain = Model.from_module(from_preset("tiny-llama"), torch.zeros(1, 32, dtype=torch.long), seq_dim=1)
    assert Model.load(chain.reference) == chain


class LooksAtData(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if float(x.sum()) > 0 else x


def test_a_module_that_needs_its_data_is_refused() -> None:
    with pytest.raises(InputError, match="LooksAtData cannot be traced"):
        Model.from_module(LooksAtData(), torch.zeros(2, 8))


@pytest.mark.parametrize(
    ("inputs", "seq_dim", "message"),
    [
        ((), None, "example input"),
        ((torch.zeros(2, 4),), 1, "8 or more"),
        ((torch.zeros(2, 8),), 3, "no input has a dimension"),
    ],
)
def test_bad_examples_are_refused(inputs: tuple[torch.Tensor, ...], seq_dim: int | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Model.from_module(nn.Linear(8, 8), *inputs, seq_dim=seq_dim)
