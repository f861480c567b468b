"""Write a plan as a script for Megatron-LM's `pretrain_gpt.py`."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import msgspec

from meshwright.frameworks.contract import Exported
from meshwright.frameworks.megatron import script
from meshwright.frameworks.megatron.arguments import Arguments
from meshwright.frameworks.megatron.nearest_plan import fit
from meshwright.frameworks.megatron.recompute import Repeated, recompute_arguments
from meshwright.frameworks.megatron.stages import is_mapped, joined, meant
from meshwright.frameworks.megatron.write_model import config_of, shape_arguments
from meshwright.frameworks.megatron.write_plan import (
    batch_arguments,
    offload_arguments,
    optimizer_arguments,
    parallel_arguments,
    precision_arguments,
    replica_arguments,
)
from meshwright.frameworks.shared.uniform_plan import Uniform, settle
from meshwright.plans import Job, Plan
from meshwright.plans.spans import layer_range

FILE = "pretrain_megatron.sh"
_PADDING = 128  # rows of the vocabulary that Megatron rounds up to, on each device


@dataclass(frozen=True)
class Said:
    """A plan in Megatron's arguments, before they are written to any file."""

    groups: dict[str, Arguments]
    uniform: Uniform
    plan: Plan  # their meaning
    missing: tuple[str, ...]
    to_fill: tuple[str, ...]


def write(job: Job, plan: Plan) -> Exported:
    """Return the script, and the parts it cannot express."""
    said = say(job, plan)
    nodes = script.nodes_of(job, said.plan)
    start = f"MEGATRON=~/Megatron-LM NODE_RANK=0 MASTER_ADDR=node0 bash {FILE}"
    lines = script.head(
        job, "Arguments of Megatron-LM", ["Start it on every node, with its own NODE_RANK:", f"  {start}"]
    )
    lines += ["MEGATRON=${MEGATRON:-Megatron-LM}  # a checkout of NVIDIA/Megatron-LM", *script.launch_variables(nodes)]
    lines += [environment(said.uniform), ""]
    lines += script.arrays(said.groups | {"DATA_ARGS": data_arguments(job, said.uniform), "LOG_ARGS": log_arguments()})
    names = [*(name for name, group in said.groups.items() if group), "DATA_ARGS", "LOG_ARGS"]
    lines += ["", *script.torchrun("$MEGATRON/pretrain_gpt.py", names)]
    files = {FILE: "\n".join(lines) + "\n", "plan.json": said.plan.to_json()}
    return Exported(files, start, said.plan, said.missing, (*said.to_fill, *_to_fill()))


def say(job: Job, plan: Plan) -> Said:
    """Translate a plan; frameworks with Megatron inside (slime, Megatron-Bridge) write the same arguments elsewhere."""
    config_of(job.model)
    whole, blocks = joined(job, plan)
    uniform, lost = settle(job, whole)
    missing, to_fill = list(lost), list[str]()
    uniform = fit(job, uniform, missing)
    mapped = uniform.groups > 1 and is_mapped(plan, uniform, missing)
    what: Any = uniform.strategy.recompute
    repeat, repeated = recompute_arguments(job.model, Repeated(what, blocks if what == "full" else None), missing)
    groups = {
        "MODEL_ARGS": shape_arguments(job.model, job.seq_len, missing, to_fill),
        "PARALLEL_ARGS": parallel_arguments(job, uniform, mapped=mapped) | replica_arguments(job, uniform),
        "MEMORY_ARGS": repeat | offload_arguments(job, uniform),
        "BATCH_ARGS": batch_arguments(job, uniform),
        "PRECISION_ARGS": precision_arguments(job),
        "OPTIMIZER_ARGS": optimizer_arguments(job, uniform),
    }
    if job.precision == "fp16":
        groups["MODEL_ARGS"].pop("moe-grouped-gemm", None)  # grouped products are bf16 only
    stands_for = meant(job, uniform, repeated, mapped=mapped)
    if not missing and _blocks(job, plan) != _blocks(job, stands_for):
        missing.append("stages: blocks lie in other stages than the plan's")
    said = plan if not missing and plan.pipelines == stands_for.pipelines else stands_for
    return Said(groups, uniform, said, tuple(missing), tuple(to_fill))


def _blocks(job: Job, plan: Plan) -> list[tuple[Any, ...]]:
    """Return devices, strategy and blocks of each stage.

    The position of the last norm, with the head or before it, does not change a step.
    """
    whole, count = joined(job, plan)
    found: list[tuple[Any, ...]] = []
    for stage in whole.pipelines[0].stages:
        layers = [job.model.layers[i] for span in stage.spans for i in layer_range(job.model, span.layers)]
        ways = {msgspec.structs.replace(span, layers="") for span in stage.spans}
        found.append((stage.devices, ways, {layer.block for layer in layers} - {""}, count))
    return found


def environment(uniform: Uniform) -> str:
    """Return the environment: FSDP needs several connections, tensor and context parallelism one (`validate_args`)."""
    return f"export CUDA_DEVICE_MAX_CONNECTIONS={8 if uniform.strategy.zero >= 2 else 1}"


def data_arguments(job: Job, uniform: Uniform) -> Arguments:
    """Return arguments for synthetic data until a user names tokens; NullTokenizer adds one token to its size."""
    vocabulary = int(config_of(job.model)["vocab_size"])
    return {
        "tokenizer-type": ("${TOKENIZER_TYPE:-NullTokenizer}",),
        "vocab-size": (str(vocabulary - 1),),
        "make-vocab-size-divisible-by": (str(padding(vocabulary, uniform.strategy.tp)),),
        "mock-data": (),
    }


def padding(vocabulary: int, tp: int) -> int:
    """Return the multiple to round the vocabulary to: nothing if it divides anyway, else as Megatron does it.

    >>> padding(128256, 8), padding(50257, 8)
    (32, 128)
    """
    share, rest = divmod(vocabulary, tp)
    return _PADDING if rest else gcd(share, _PADDING)


def log_arguments() -> Arguments:
    return {
        "train-iters": ("${TRAIN_ITERS:-50}",),
        "lr": ("${LR:-3e-4}",),
        "lr-decay-style": ("${LR_DECAY_STYLE:-cosine}",),
        "log-interval": ("1",),
        "log-throughput": (),
        "eval-iters": ("0",),
    }


def _to_fill() -> tuple[str, ...]:
    return (
        "data: --mock-data in DATA_ARGS stands for --data-path, --split and your tokenizer's arguments",
        "learning rate, warm-up and number of steps: LR, TRAIN_ITERS, or further arguments behind the script",
        "checkpoints: --save, --save-interval and --load behind the script",
    )
