"""Write a fitted plan and its job, argument by argument."""

from __future__ import annotations

from meshwright.frameworks.megatron.arguments import Arguments
from meshwright.frameworks.megatron.pipeline_layout import stage_arguments
from meshwright.frameworks.shared.uniform_plan import Uniform
from meshwright.plans import Job
from meshwright.plans.strategy import Strategy

_FSDP = {2: "optim_grads", 3: "optim_grads_params"}
_MOMENTS = {"adamw-16bit": "bf16", "adamw-8bit": "fp8"}
# 8-bit training as NVIDIA's recipes do it: a scale per tensor or block of 32 (Megatron-Bridge, mixed_precision.py).
_PRECISIONS: dict[str, Arguments] = {
    "fp32": {},
    "tf32": {},
    "bf16": {"bf16": ()},
    "fp16": {"fp16": ()},
    "fp8": {"bf16": (), "fp8-format": ("hybrid",), "fp8-recipe": ("tensorwise",)},
    "mxfp8": {"bf16": (), "fp8-format": ("e4m3",), "fp8-recipe": ("mxfp8",)},
    "nvfp4": {"bf16": (), "fp4-format": ("e2m1",), "fp4-recipe": ("nvfp4",)},
}


def parallel_arguments(job: Job, uniform: Uniform, *, mapped: bool) -> Arguments:
    """Return degrees, and the blocks of each stage."""
    strategy, groups = uniform.strategy, uniform.groups
    said: Arguments = {
        "tensor-model-parallel-size": (str(strategy.tp),),
        "pipeline-model-parallel-size": (str(groups),),
        "context-parallel-size": (str(strategy.ulysses * strategy.ring),),
    }
    if strategy.sp:
        said["sequence-parallel"] = ()
    said |= stage_arguments(uniform.blocks, groups) if groups > 1 else {}
    if uniform.schedule.virtual > 1 and uniform.micro_batches % groups:
        rounds = uniform.micro_batches // groups
        said["microbatch-group-size-per-virtual-pipeline-stage"] = (str(uniform.micro_batches // rounds),)
    said |= context_arguments(strategy)
    if any(layer.experts for layer in job.model.layers):
        said["expert-model-parallel-size"] = (str(strategy.ep),)
        said["expert-tensor-parallel-size"] = (str(strategy.etp),)  # else tp
    return said | ({"use-tp-pp-dp-mapping": ()} if mapped else {})


def context_arguments(strategy: Strategy) -> Arguments:
    """Return the arguments of context parallelism.

    The first of the hierarchical sizes is that of the all-to-all, over adjacent devices.
    """
    if strategy.ulysses > 1 and strategy.ring > 1:
        sizes = (str(strategy.ulysses), str(strategy.ring))
        return {"cp-comm-type": ("a2a+p2p",), "hierarchical-context-parallel-sizes": sizes}
    if strategy.ulysses * strategy.ring > 1:
        return {"cp-comm-type": ("a2a" if strategy.ulysses > 1 else "p2p",)}
    return {}


def replica_arguments(job: Job, uniform: Uniform) -> Arguments:
    """Return the sharding of replicas, and the communication that overlaps with computation."""
    strategy, overlap = uniform.strategy, uniform.overlap
    said: Arguments = {}
    if strategy.zero and job.optimizer != "muon":
        said["use-distributed-optimizer"] = ()
    if strategy.zero >= 2:
        said |= {"use-megatron-fsdp": (), "data-parallel-sharding-strategy": (_FSDP[strategy.zero],)}
        said |= {"ckpt-format": ("fsdp_dtensor",), "no-gradient-accumulation-fusion": ()}
    if strategy.zero_group and strategy.zero_group < strategy.replicas:
        said["num-distributed-optimizer-instances"] = (str(strategy.replicas // strategy.zero_group),)
    if overlap.gradients:
        said["overlap-grad-reduce"] = ()
    if overlap.parameters and strategy.zero and job.optimizer != "muon":
        said["overlap-param-gather"] = ()
    if not overlap.pipeline and uniform.groups > 1:
        said["no-overlap-p2p-communication"] = ()
    if overlap.tensor_chunks > 1:
        said["tp-comm-overlap"] = ()
    return said


def batch_arguments(job: Job, uniform: Uniform) -> Arguments:
    return {
        "micro-batch-size": (str(uniform.micro_batch(job)),),
        "global-batch-size": (str(job.global_batch),),
        "seq-length": (str(job.seq_len),),
    }


def precision_arguments(job: Job) -> Arguments:
    said = dict(_PRECISIONS[job.precision])
    if job.precision == "mxfp8" and any(layer.experts for layer in job.model.layers):
        said["moe-router-padding-for-fp8"] = ()
    return said


def optimizer_arguments(job: Job, uniform: Uniform) -> Arguments:
    """Return the optimizer; smaller moments and offloaded states need the precision-aware optimizer."""
    strategy = uniform.strategy
    if job.optimizer.startswith("sgd"):
        return {"optimizer": ("sgd",), "sgd-momentum": ("0.9" if job.optimizer == "sgd-momentum" else "0.0",)}
    if job.optimizer == "muon":
        return {"optimizer": ("dist_muon" if strategy.zero else "muon",), "ckpt-format": ("torch",)}
    said: Arguments = {"optimizer": ("adam",)}
    if job.optimizer in _MOMENTS or strategy.offload.optimizer:
        said["use-precision-aware-optimizer"] = ()
    if job.optimizer in _MOMENTS:
        bits = (_MOMENTS[job.optimizer],)
        said |= {"exp-avg-dtype": bits, "exp-avg-sq-dtype": bits}
    if strategy.offload.optimizer:
        fraction = (f"{strategy.offload.optimizer:g}",)
        said |= {
            "optimizer-cpu-offload": (),
            "optimizer-offload-fraction": fraction,
            "overlap-cpu-optimizer-d2h-h2d": (),
        }
    return said


def offload_arguments(job: Job, uniform: Uniform) -> Arguments:
    layers = round(uniform.strategy.offload.activations * len(job.model.blocks))
    return {"cpu-offloading-num-layers": (str(layers),)} if layers else {}
