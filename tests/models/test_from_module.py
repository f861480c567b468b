"""Any module becomes a chain: boundaries, counts, polynomials; no memory is taken."""

from __future__ import annotations

import resource

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from meshwright.errors import InputError
from meshwright.models import Model, Slice, presets


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
    [("tiny-gpt2", 4 + 3), ("tiny-llama", 4 + 3), ("t5-small", 6 + 6 + 3), ("bert-base", 12 + 3)],
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


class Caches(nn.Module):
    """Builds a table on its first call and keeps it, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Residual(8) for _ in range(2)))
        self.table: torch.Tensor | None = None
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.ones(x.shape[-1])
        self.calls = self.calls + 1
        return self.blocks(x * self.table)


def test_nothing_of_the_trace_stays_behind() -> None:
    module = Caches().eval()
    expected = module(torch.ones(2, 8))
    module.table = None
    Model.from_module(module, torch.zeros(2, 8))
    assert module.table is None
    assert not module.training
    assert type(module.calls) is torch.Tensor
    after = module(torch.ones(2, 8))
    assert type(after) is torch.Tensor
    assert torch.equal(after, expected)


def test_a_module_under_two_names_survives() -> None:
    shared = nn.Linear(8, 8)
    module = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(8, 8, bias=False))
    with pytest.warns(UserWarning, match="one layer"):
        chain = Model.from_module(module, torch.zeros(2, 8))
    assert type(shared.weight) is nn.Parameter
    assert chain.parameters == 72 + 64


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.blocks = nn.ModuleList(Residual(16) for _ in range(3))
        self.head = nn.Linear(16, 100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_tied_head_is_a_copy_on_another_stage() -> None:
    from meshwright.cost import plan_memory
    from meshwright.plans import Plan

    chain = Model.from_module(Tied(), torch.zeros(2, 16, dtype=torch.long), seq_dim=1)
    assert [layer.name for layer in chain.layers] == ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert (chain.layers[-1].tied_to, chain.layers[-1].parameters) == ("embed", 0)
    table = {"model": dict(chain.reference), "cluster": "2xh100", "global_batch": 2, "seq_len": 16}  # type: ignore[arg-type]
    groups = plan_memory(Plan.of({**table, "pp": 2, "zero": 0}))
    assert sum(g.parameters for g in groups) == 2 * (chain.parameters + 1600)


def test_what_crosses_is_what_the_next_block_takes() -> None:
    """transformers' Llama computes rotary tables between embedding and blocks: they are not the layer's output."""
    chain = Model.from_module(from_preset("tiny-llama"), torch.zeros(1, 128, dtype=torch.long), seq_dim=1)
    embed = chain.layers[0]
    assert embed.width_out >= 128
    assert chain.layers[1].width_in == embed.width_out
    assert chain.layers[2].width_out >= 128


def test_an_encoder_travels_along_a_decoder() -> None:
    module = nn.Transformer(16, 2, 2, 3, 32, batch_first=True, norm_first=True)
    chain = Model.from_module(module, torch.zeros(2, 32, 16), torch.zeros(2, 32, 16), seq_dim=1)
    between = next(layer for layer in chain.layers if layer.name == "decoder.layers.0")
    assert between.width_out == 32  # its own output and the encoder's


def test_recurrent_layers_are_counted() -> None:
    """LSTM: four gates of (input + hidden) x hidden, two FLOPs each."""
    with pytest.warns(UserWarning, match="one layer"):
        chain = Model.from_module(nn.LSTM(8, 16, batch_first=True), torch.zeros(1, 32, 8), seq_dim=1)
    assert chain.forward_flops(Slice(1, 32)) == 32 * 2 * 4 * 16 * (8 + 16)


def test_training_mode_is_what_is_traced() -> None:
    module = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 3, enable_nested_tensor=False
    )
    train = Model.from_module(module.train(), torch.zeros(2, 32, 32), seq_dim=1)
    assert Model.from_module(module.eval(), torch.zeros(2, 32, 32), seq_dim=1).layers == train.layers


def test_short_examples_do_not_bend_the_polynomial() -> None:
    """Attention kernels pad their row statistics: a trace at 128 tokens must still know 4096."""
    module = from_preset("tiny-gpt2", n_positions=8192)
    short = Model.from_module(module, torch.zeros(1, 128, dtype=torch.long), seq_dim=1)
    long = Model.from_module(module, torch.zeros(1, 4096, dtype=torch.long), seq_dim=1)
    cut = Slice(1, 4096)
    assert short.kept_bytes(cut) == pytest.approx(long.kept_bytes(cut), rel=0.02)
    assert short.forward_flops(cut) == pytest.approx(long.forward_flops(cut), rel=1e-9)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_square_mask_is_cut_on_both_sides(dtype: torch.dtype) -> None:
    chain = Model.from_module(Masked(), torch.zeros(2, 64, 8), torch.zeros(64, 64, dtype=dtype), seq_dim=1)
    assert [layer.name for layer in chain.layers] == ["blocks.0", "blocks.1"]


def test_whatever_a_forward_raises_is_said() -> None:
    with pytest.raises(InputError, match="cannot be traced: RuntimeError"):
        Model.from_module(nn.Sequential(nn.Linear(8, 8), nn.Linear(9, 9)), torch.zeros(2, 8))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t["layers"][0].update(kind=-1),
        lambda t: t["layers"][0].update(kind=99),
        lambda t: t["layers"][1].update(name=t["layers"][0]["name"]),
        lambda t: t["kinds"][0].update(flops=1),
        lambda t: t["kinds"][0]["ops"][0].update(flops_per_tokn=1),
        lambda t: t["kinds"][0]["ops"][0].update(k=-1),
        lambda t: t["kinds"][0]["ops"][0].update(flops_per_token=float("inf")),
        lambda t: t["kinds"][0]["ops"][0]["weights"][0].update(units=0),
        lambda t: t["kinds"][0]["ops"][0]["weights"][0].update(split="expert"),
        lambda t: t["kinds"][0]["ops"][0]["weights"][0].update(count="many"),
        lambda t: t["kinds"][0].update(ops=3),
        lambda t: t.update(layers=[]),
    ],
)
def test_a_written_model_that_cannot_be_is_refused(change) -> None:  # type: ignore[no-untyped-def]
    import copy

    table = copy.deepcopy(dict(Model.from_module(Tied(), torch.zeros(2, 16, dtype=torch.long), seq_dim=1).reference))
    change(table)
    with pytest.raises(InputError):
        Model.load(table)


def test_experts_in_one_grouped_product_are_counted() -> None:
    """transformers runs experts through a product PyTorch's counter does not know: top-2 of 8, gate, up and down."""
    chain = Model.from_module(from_preset("tiny-moe").bfloat16(), torch.zeros(1, 64, dtype=torch.long), seq_dim=1)
    written = Model.preset("tiny-moe")
    cut = Slice(1, 64)
    masked = sum(op.forward_flops(cut, 64) for layer in written.layers for op in layer.ops if op.kind == "attention")
    every_pair = masked * 64 / 65 * 2  # PyTorch counts what the mask hides, too
    assert chain.forward_flops(cut) == pytest.approx(written.forward_flops(cut) - masked + every_pair, rel=1e-3)


def test_a_plan_of_a_traced_model_survives() -> None:
    """Convolutions without padding make polynomials that dip below zero for tiny inputs."""
    from meshwright.clusters import Cluster
    from meshwright.plans import Job, Plan

    chain = Model.from_module(nn.Sequential(*(nn.Conv1d(8, 8, 3) for _ in range(4))), torch.zeros(1, 8, 64), seq_dim=2)
    plan = Plan.of({"pp": 2}, Job(chain, Cluster.preset("2xh100"), 2, 64))
    assert Plan.parse(plan.to_json()) == plan
    assert all(layer.forward_flops(Slice(1, 1)) >= 0 for layer in chain.layers)


class KeepsInDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, torch.Tensor] = {}
        self.seen: list[torch.Tensor] = []
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x)
        return self.b(self.cache.setdefault("a", self.a(x)))


def test_containers_are_emptied_again() -> None:
    module = KeepsInDict()
    with pytest.warns(UserWarning, match="one layer"):
        Model.from_module(module, torch.zeros(2, 8))
    assert module.cache == {}
    assert module.seen == []
    assert type(module(torch.zeros(2, 8))) is torch.Tensor


class AddedPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(100, 16), nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(Residual(16) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x


def test_the_first_block_is_a_block() -> None:
    chain = Model.from_module(AddedPositions(), torch.zeros(2, 32, dtype=torch.long), seq_dim=1)
    assert [layer.name for layer in chain.layers] == ["words", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]


def test_a_frozen_tied_weight_is_not_trained_anywhere() -> None:
    from meshwright.clusters import Cluster
    from meshwright.cost import plan_memory
    from meshwright.plans import Job, Plan

    module = Tied()
    module.embed.weight.requires_grad_(False)
    chain = Model.from_module(module, torch.zeros(2, 16, dtype=torch.long), seq_dim=1)
    job = Job(chain, Cluster.preset("2xh100"), 2, 16)
    groups = plan_memory(Plan.of({"pp": 2, "zero": 0}, job), job)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert sum(g.gradients for g in groups) == 4 * trained
    assert sum(g.parameters for g in groups) == 2 * (trained + 2 * 1600)
