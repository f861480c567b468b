"""Constants of the cost model that no datasheet prints, with their meaning and source.

- *Measured*: from `benchmarks/results/h200.json`, which `benchmarks/device_profile.py` writes on one H200.
- *Published*: printed by the source beside it.
- *Fitted*: the names in `benchmarks/fitting.py`, adjusted together on every published run by `benchmarks/accuracy.py
  --fit`. There is one value for all models and all sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from meshwright.clusters import Cluster, Device


@dataclass(frozen=True)
class Architecture:
    """Sustained rates of one generation of chips, as parts of its dense peak."""

    products: tuple[float, float, float]  # large matrix products of 16, 8 and 4 bits
    flash: tuple[float, float]  # FlashAttention-2, forward and backward, head size 128, long sequences
    native: tuple[float, float]  # the architecture's best attention kernel (FlashAttention-3, cuDNN), same case
    triton: tuple[float, float]  # FlashAttention in Triton with ALiBi, as of 2023, same case
    wants_rows: bool = True  # attention kernels need thousands of threads; CPUs do not
    watts_per_tflop: float = 0.0  # of the measured board, dense 16-bit peak; 0: unknown


# Hopper: measured on an H200 (benchmarks/results/h200.json). Blackwell: B200 figures of SimuMax v1.2
# (configs/system/b200_bf16_ceperm.json: products 0.45-0.51, attention 0.50-0.58 and 0.41-0.48 of peak, causal FLOPs);
# 8 bits from the same power per operation. Others: the best 16-bit product of S. Bekman's comparison table ("Machine
# Learning Engineering", 2025: A100 0.869, H100 0.803, MI300X 0.60, MI250X 0.767), times 0.88, the H200's ratio of
# sustained to best. FlashAttention-2: Dao, 2023 (A100 0.60 and 0.50; H100 0.37 and 0.30).
ARCHITECTURES = {
    "volta": Architecture((0.70, 0.70, 0.70), (0.35, 0.25), (0.35, 0.25), (0.35, 0.25), watts_per_tflop=2.4),
    "ampere": Architecture((0.815, 0.815, 0.815), (0.62, 0.55), (0.62, 0.55), (0.41, 0.34), watts_per_tflop=1.282),
    "ada": Architecture((0.77, 0.70, 0.70), (0.60, 0.50), (0.60, 0.50), (0.60, 0.50), watts_per_tflop=0.967),
    "hopper": Architecture((0.695, 0.70, 0.70), (0.38, 0.33), (0.60, 0.55), (0.21, 0.17), watts_per_tflop=0.7075),
    "blackwell": Architecture((0.457, 0.56, 0.475), (0.25, 0.20), (0.58, 0.48), (0.12, 0.10), watts_per_tflop=0.4444),
    "cdna2": Architecture((0.67, 0.60, 0.60), (0.30, 0.22), (0.40, 0.30), (0.30, 0.22)),
    "cdna3": Architecture((0.53, 0.50, 0.50), (0.28, 0.20), (0.40, 0.30), (0.28, 0.20), watts_per_tflop=0.574),
    "cdna4": Architecture((0.55, 0.52, 0.45), (0.28, 0.20), (0.40, 0.30), (0.28, 0.20), watts_per_tflop=0.56),
    "davinci": Architecture((0.66, 0.60, 0.60), (0.40, 0.30), (0.40, 0.30), (0.40, 0.30)),
    "cpu": Architecture((0.70, 0.70, 0.70), (0.30, 0.30), (0.30, 0.30), (0.30, 0.30), wants_rows=False),
    "": Architecture((0.66, 0.60, 0.60), (0.35, 0.28), (0.35, 0.28), (0.35, 0.28)),
}


@dataclass(frozen=True)
class Constants:
    """Constants that turn bytes and FLOPs into seconds. Times in seconds, rates as parts of a datasheet's peak."""

    architectures: Mapping[str, Architecture] = field(default_factory=lambda: ARCHITECTURES)
    # --- matrix products
    # A product with few rows, columns or inner steps does not fill its tiles: these sizes halve the rate.
    product_k: float = 50.0  # measured 0 (16 bits) to 100 (8 bits) on the H200
    product_n: float = 16.0
    product_floor: float = 6e-6  # seconds of the smallest product on the device (measured 8-9, launch included)
    most: float = 0.95  # largest part of its peak that any board reaches
    # Power limits sustained rates: a board with more watts per FLOP of its peak sustains more of it.
    power: float = 0.77
    vector: float = 0.80  # part of the float32 peak that products reach without matrix units
    # --- attention kernels
    attention_keys: tuple[float, float] = (250.0, 1000.0)  # keys at which a kernel reaches half its rate (measured)
    head_size: float = 0.36  # heads smaller than 128 reach (size / 128) to this power (measured: 64 reaches 0.78)
    # Queries x heads on the device that halve the rate, per FLOP/s of the kernel: SimuMax's B200 needs 52-83 thousand
    # in the forward pass and about 8 thousand in the backward; the H200's eight heads fit the same rule.
    attention_rows: tuple[float, float] = (60e3 / 1.3e15, 8e3 / 1.3e15)
    # --- memory-bound kernels
    memory: float = 0.60  # part of the peak that copies, additions and activation functions reach (measured 0.63-0.90,
    # SimuMax on a B200: 0.67)
    norm: float = 0.50  # part that a norm reaches (measured 0.49-0.55)
    memory_floor: float = 2.5e-6  # seconds of the smallest such kernel on the device
    # --- links
    nvlink: float = 0.69  # part of a link's rate that large collectives inside a node reach (SimuMax's B200: 0.67-0.74)
    network: float = 0.94  # as above, between nodes
    collective: float = 20e-6  # seconds to start a collective (SimuMax's B200: 22-26 microseconds)
    host_copy: float = 0.95  # part of the host link's rate that large copies reach (measured 55 of 55 GB/s)
    host_memory: float = 200e9  # bytes/s at which a node's CPUs update offloaded states (DeepSpeed's CPU Adam)
    hop: float = 4.0  # latency of one ring step, as a multiple of the catalogue's latency
    # --- the host: kernels are issued while earlier ones run; the two times add in this power (3: nearly the larger)
    host_overlap: float = 3.0
    # --- overlap: seconds that computation loses per second of overlapped communication
    contention: float = 0.155
    dual_pipe: float = 0.9  # part of the experts' all-to-alls DualPipe overlaps (DeepSeek-AI, 2024: all but the ends)
    # --- the whole job: waiting for the slowest of many devices, per doubling of the nodes
    straggler: float = 0.0045

    def architecture(self, name: str) -> Architecture:
        """Return the constants of an architecture, or the usual ones if it is unknown."""
        return self.architectures.get(name, self.architectures[""])


DEFAULT = Constants()


def seen_on(device: Device, constants: Constants) -> Constants:
    """Return the constants with the measured values of a device in place of the usual ones."""
    found = device.measured
    if found is None:
        return constants
    floor = constants.memory_floor if found.kernel is None else found.kernel
    overlap = 1.0 if found.issues_alone else constants.host_overlap  # without asynchronous issue the two times add up
    return replace(constants, memory_floor=floor, host_overlap=overlap)


def seen_in(cluster: Cluster, constants: Constants) -> Constants:
    """Return the constants with the largest measured values that concern all devices of a job."""
    found = [group.device.measured for group in cluster.groups if group.device.measured]
    slower = [seen.contention for seen in found if seen.contention is not None]
    return replace(constants, contention=max(slower)) if slower else constants
