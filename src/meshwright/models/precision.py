"""Bytes per element for each numeric format a job can train in."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.errors import UnknownName


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per element of every tensor a training step keeps.

    `parameter`, `gradient` and `master` follow mixed-precision training as in Micikevicius et al. (2018) and
    Megatron-LM: 16-bit weights, gradients accumulated in float32, a float32 master copy. `activation` is the output of
    a layer. `matmul` is the saved input of a matrix product, which 8-bit training keeps in 8 bits for the weight
    gradient.
    """

    name: str
    activation: float
    matmul: float
    parameter: float
    gradient: float
    master: float


PRECISIONS = {
    p.name: p
    for p in (
        Precision("fp32", activation=4, matmul=4, parameter=4, gradient=4, master=0),
        Precision("tf32", activation=4, matmul=4, parameter=4, gradient=4, master=0),
        Precision("bf16", activation=2, matmul=2, parameter=2, gradient=4, master=4),
        Precision("fp16", activation=2, matmul=2, parameter=2, gradient=4, master=4),
        Precision("fp8", activation=2, matmul=1, parameter=2, gradient=4, master=4),
        # One 8-bit scale per 32 elements (OCP MX specification v1.0).
        Precision("mxfp8", activation=2, matmul=1 + 1 / 32, parameter=2, gradient=4, master=4),
        # One 8-bit scale per 16 four-bit elements (NVIDIA NVFP4).
        Precision("nvfp4", activation=2, matmul=0.5 + 1 / 16, parameter=2, gradient=4, master=4),
    )
}


def precision(name: str) -> Precision:
    """Return a precision by name.

    >>> precision("bf16").activation
    2
    """
    try:
        return PRECISIONS[name]
    except KeyError:
        raise UnknownName("precision", name, PRECISIONS, see=", ".join(PRECISIONS)) from None
