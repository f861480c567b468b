"""8-bit products of a CUDA device against the same 8-bit values in float64."""

from __future__ import annotations

import pytest
import torch

from meshwright.run.precision.matmul import has_float8, linear

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not has_float8(torch.device("cuda")), reason="no device with 8-bit products"
)


@pytest.mark.parametrize("shape", [(4, 32, 64), (3, 5, 72)])  # multiples of 16, and not
def test_the_same_as_on_a_cpu(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(*shape).bfloat16(), torch.randn(48, shape[-1]).bfloat16()
    found = []
    for device, kind in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        a, b = (one.to(device, kind).requires_grad_() for one in (x, weight))
        y = linear(a, b, None, "fp8")
        y.backward(torch.ones_like(y) / 3)
        found.append([one.detach().cpu().double() for one in (y, a.grad, b.grad)])
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm() / other.norm()) < 8e-3  # bfloat16 rounds at 2^-9
