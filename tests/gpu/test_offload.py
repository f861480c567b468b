"""Activations and optimizer states in host memory, on a CUDA device."""

from __future__ import annotations

import pytest
import torch

import meshwright as mw
from meshwright.run.memory.offload_share import keep_on_host
from meshwright.run.optimizers import AdamW8bit
from meshwright.run.optimizers.adamw import AdamW
from meshwright.run.parallel.apply import apply
from meshwright.run.parallel.parallel_model import Parallel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CONFIG = {
    "model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 8,
    "intermediate_size": 1536, "vocab_size": 1024, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
}  # fmt: skip


def built(**strategy: object) -> tuple[Parallel, torch.Tensor]:
    model = mw.Model.from_config(CONFIG)
    job = mw.Job(model, mw.Cluster.preset("1xh200"), global_batch=4, seq_len=2048)
    part = apply(model, mw.Plan.of({"micro_batches": 2, **strategy}, job), device="cuda", dtype=torch.bfloat16)
    stream = torch.Generator().manual_seed(1)
    return part, torch.randint(0, 1024, (4, 2048), generator=stream).cuda()


def gradients(part: Parallel, tokens: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """Of the second step, and the most memory that it took."""
    for _ in range(2):
        for weight in part.parameters():
            weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        part.step(part.micro_batches(tokens), tokens.numel())
        peak = torch.cuda.max_memory_allocated() - before
    return [weight.grad for weight in part.parameters()], peak


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_are_the_same_and_memory_falls(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's attention adds gradients up in any order: what it makes of equal inputs differs in the last bits."""
    monkeypatch.setattr("meshwright.run.memory.offload._UNDER_WAY", 2**23)
    expected, most = gradients(*built(recompute=recompute))
    for fraction in (0.5, 1.0):
        found, peak = gradients(*built(recompute=recompute, offload={"activations": fraction}))
        for one, other in zip(found, expected, strict=True):
            assert (one.float() - other.float()).norm() < 2e-2 * other.float().norm()
        if recompute != "full":
            assert peak < (1 - 0.25 * fraction) * most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_on_the_host_are_updated_alike(dtype: torch.dtype) -> None:
    found = []
    for fraction in (0.0, 0.5):
        stream = torch.Generator("cuda").manual_seed(0)
        weights = [
            torch.nn.Parameter(torch.randn(300, 500, generator=stream, device="cuda").to(dtype)) for _ in range(6)
        ]
        keep_on_host(weights, fraction)
        optimizer = AdamW(weights, lr=1e-2)
        for _ in range(5):
            for weight in weights:
                weight.grad = torch.randn(300, 500, generator=stream, device="cuda").to(dtype)
            optimizer.step()
        found.append([weight.detach().float() for weight in weights])
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)


def test_moments_in_8_bits_survive_a_checkpoint() -> None:
    one, other = (torch.nn.Parameter(torch.randn(77, 300, device="cuda")) for _ in range(2))
    saved, loaded = AdamW8bit([one]), AdamW8bit([other])
    for _ in range(5):
        one.grad = torch.randn_like(one) * 10 ** (2 * torch.rand_like(one) - 4)
        saved.step()
    loaded.restore(other, saved.states(one), step=5)
    for expected, found in zip(saved.state[one]["moments"], loaded.state[other]["moments"], strict=True):
        assert torch.equal(expected, found)
