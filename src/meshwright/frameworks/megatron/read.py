"""Read a script of Megatron arguments as a plan and its job; contradictions are refused with both values."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Any

from meshwright.errors import InputError
from meshwright.frameworks.contract import Beside, Imported
from meshwright.frameworks.megatron.arguments import READ, Given, collect
from meshwright.frameworks.megatron.pipeline_layout import blocks_of
from meshwright.frameworks.megatron.read_model import model_of
from meshwright.frameworks.megatron.recompute import recompute_of
from meshwright.frameworks.megatron.shell.find_arguments import find_words
from meshwright.frameworks.megatron.stages import meant
from meshwright.frameworks.shared.uniform_plan import Uniform
from meshwright.models import Model
from meshwright.plans import Job
from meshwright.plans.document import Overlap
from meshwright.plans.schedule import Schedule
from meshwright.plans.strategy import Offload, Strategy

# Arguments that each framework lists itself, with source and commit (`published.json`).


@cache
def published(name: str) -> frozenset[str]:
    """Return names without their dashes.

    >>> "tensor-model-parallel-size" in published("megatron")
    True
    """
    return frozenset(_lists()[name]["names"])


def source(name: str) -> str:
    """Return the source of a list.

    >>> source("megatron").split(",")[0]
    'NVIDIA/Megatron-LM'
    """
    return str(_lists()[name]["source"])


@cache
def _lists() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("published.json").read_text("utf-8")
    return dict(json.loads(text))


# Arguments that Megatron-LM still lists in order to refuse them.
_GONE = {
    "batch-size": "--micro-batch-size",
    "model-parallel-size": "--tensor-model-parallel-size",
    "checkpoint-activations": "--recompute-granularity, --recompute-method and --recompute-num-layers",
    "warmup": "--lr-warmup-fraction",
}
# Arguments that change a step's time but are no part of a plan: reported beside a prediction.
_PRICED_OTHERWISE = {
    "grad-reduce-in-bf16": "gradients: priced in 32 bits; the script sends 16 (--grad-reduce-in-bf16)",
    "tp-comm-overlap": "tensor parallelism: priced as not hidden (--tp-comm-overlap); --runtime nemo hides most of it",
    "overlap-moe-expert-parallel-comm": "experts: priced as not hidden (--overlap-moe-expert-parallel-comm); --runtime nemo",
}
_SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8}
_ADAM = {32: "adamw", 16: "adamw-16bit", 8: "adamw-8bit"}


def read(text: str, file: str, beside: Beside) -> Imported:
    """Return the job and the plan of a script."""
    found = find_words(text, file)
    given = Given(file, collect(found.words, file))
    for name, instead in _GONE.items():
        if name in given:
            raise given.refused(name, "is no longer taken by Megatron-LM", instead)
    assumed = list(found.notes)
    known = published("megatron") | published("megatron-generated")
    return imported(given, beside, known, assumed, found.launcher)


def imported(given: Given, beside: Beside, known: frozenset[str], assumed: list[str], launcher: list[str]) -> Imported:
    """Return the plan of Megatron's arguments from any source."""
    model = model_of(given, beside.model, assumed)
    job = _job(given, beside, model, assumed)
    _count_processes(launcher, beside, assumed)
    strategy, overlap = _strategy(given, job, assumed), _overlap(given)
    uniform = _uniform(given, job, strategy, overlap, assumed)
    assumed += [line for name, line in _PRICED_OTHERWISE.items() if name in given]
    try:
        plan = meant(job, uniform, recompute_of(given, model, assumed), mapped=given.on("use-tp-pp-dp-mapping"))
    except InputError as error:
        raise InputError(f"makes no plan: {error}", file=given.file) from None
    unknown = tuple(f"--{name}" for name in given.arguments if name not in known)
    meant_ = READ | set(_PRICED_OTHERWISE)
    unused = tuple(f"--{name}" for name in given.arguments if name in known and name not in meant_)
    return Imported(job, plan, unknown, unused, tuple(assumed))


def _job(given: Given, beside: Beside, model: Model, assumed: list[str]) -> Job:
    """Return the job, with batch and sequence from the script or the user; two that differ are a contradiction."""
    seq = _either(given, "seq-length", "--seq", beside.seq)
    if not seq:
        raise given.refused("seq-length", "is not there", "it in the script, or --seq beside it")
    batch = _either(given, "global-batch-size", "--batch", beside.batch)
    if not batch:
        replicas = max(beside.cluster.devices // _model_parallel(given), 1)
        batch = given.integer("micro-batch-size", 1) * replicas
        assumed.append(
            f"batch: {batch} samples, one micro-batch for each of {replicas} replicas (no --global-batch-size)"
        )
    if "rampup-batch-size" in given:
        assumed.append(f"batch: {batch} samples, what the ramp ends at")
    try:
        return Job(model, beside.cluster, batch, seq, _precision(given), _optimizer(given, assumed))
    except InputError as error:
        raise error.at(file=given.file) from None


def _either(given: Given, name: str, option: str, beside: int | None) -> int:
    said = given.integer(name, 0)
    if said and beside and said != beside:
        raise given.refused(name, f"is {said}, but {option} is {beside}", "one of the two")
    return said or beside or 0


def _precision(given: Given) -> str:
    if given.on("fp16") and given.on("bf16"):
        raise given.refused("fp16", "contradicts --bf16", "one of the two")
    eight, four = given.choice("fp8-format", "", ("e4m3", "hybrid")), given.choice("fp4-format", "", ("e2m1",))
    if eight and four:
        raise given.refused("fp8-format", f"{eight} contradicts --fp4-format {four}", "one of the two")
    if four:
        return "nvfp4"
    if eight:
        return "mxfp8" if given.text("fp8-recipe", "delayed") == "mxfp8" else "fp8"
    return "fp16" if given.on("fp16") else "bf16" if given.on("bf16") else "fp32"


def _optimizer(given: Given, assumed: list[str]) -> str:
    name = given.choice("optimizer", "adam", ("adam", "sgd", "muon", "dist_muon"))
    if name == "sgd":
        return "sgd-momentum" if given.number("sgd-momentum", 0.9) else "sgd"
    if name != "adam":
        return "muon"
    words = [given.choice(n, "fp32", _BITS) for n in ("exp-avg-dtype", "exp-avg-sq-dtype")]
    bits = [_BITS[word] for word in words]
    if min(bits) < 32 and not given.on("use-precision-aware-optimizer"):
        least = min(words, key=lambda word: _BITS[word])
        problem = f"is {least} without --use-precision-aware-optimizer"
        raise given.refused("exp-avg-dtype", problem, "fp32, or the switch")
    if bits[0] != bits[1]:
        assumed.append(f"optimizer: both moments in {max(bits)} bits; the script has {bits[0]} and {bits[1]}")
    return _ADAM[max(bits)]


def _count_processes(launcher: list[str], beside: Beside, assumed: list[str]) -> None:
    """Check the number of processes given to torchrun, if it is a number."""
    words = [part for word in launcher for part in word.split("=", 1)]
    counts = {}
    for name, value in pairwise(words):
        key = name.replace("_", "-")
        if key in {"--nproc-per-node", "--nnodes"} and re.fullmatch(r"[0-9]{1,6}", value):
            counts[key] = int(value)
    if len(counts) == 2 and (total := counts["--nproc-per-node"] * counts["--nnodes"]) != beside.cluster.devices:
        taken = f"{beside.cluster.devices} of {beside.cluster.name}"
        assumed.append(
            f"devices: {taken}; the script starts {counts['--nnodes']} x {counts['--nproc-per-node']} = {total}"
        )


def _model_parallel(given: Given) -> int:
    names = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
    product = 1
    for name in names:
        product *= given.integer(name, 1)
    return product


def _strategy(given: Given, job: Job, assumed: list[str]) -> Strategy:
    devices, product = job.cluster.devices, _model_parallel(given)
    tp, groups = given.integer("tensor-model-parallel-size", 1), given.integer("pipeline-model-parallel-size", 1)
    if product > devices or devices % product:
        problem = f"tp {tp} x pp {groups} x cp {product // tp // groups} = {product} does not divide {devices} devices"
        raise given.refused(
            "tensor-model-parallel-size", problem, f"a product that divides {devices}, or another --cluster"
        )
    dp = devices // product
    ulysses, ring = _context(given, product // tp // groups, assumed)
    if given.on("sequence-parallel") and tp == 1:
        assumed.append("sp: off, as Megatron switches it off without tensor parallelism")
    zero = _zero(given, job)
    replicas = dp * ulysses * ring
    ep, etp = _experts(given, job.model, tp, assumed)
    return Strategy(
        dp=dp, zero=zero, zero_group=_zero_group(given, zero, replicas), tp=tp,
        sp=given.on("sequence-parallel") and tp > 1, ulysses=ulysses, ring=ring, ep=ep, etp=etp,
        offload=_offload(given, job.model),
    )  # fmt: skip


def _context(given: Given, size: int, assumed: list[str]) -> tuple[int, int]:
    """Return (ulysses, ring) of context parallelism."""
    if size == 1:
        return 1, 1
    kinds = Counter(given.words("cp-comm-type") or ("p2p",))
    kind = kinds.most_common(1)[0][0]
    if len(kinds) > 1:
        assumed.append(f"context parallelism: {kind} in all layers; the script has {', '.join(kinds)}")
    if kind == "a2a+p2p":
        return _hierarchy(given, size)
    if kind == "allgather":
        assumed.append("context parallelism: keys and values are gathered; priced as a ring")
    elif kind not in {"p2p", "a2a"}:
        raise given.refused("cp-comm-type", f"is {kind}", "p2p, a2a, a2a+p2p, allgather")
    return (size, 1) if kind == "a2a" else (1, size)


def _hierarchy(given: Given, size: int) -> tuple[int, int]:
    name = "hierarchical-context-parallel-sizes"
    words = given.words(name)
    if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words):
        raise given.refused(
            name, f"is {' '.join(words) or 'not there'}, beside --cp-comm-type a2a+p2p", "two sizes, as 2 4"
        )
    if int(words[0]) * int(words[1]) != size:
        raise given.refused(name, f"{' x '.join(words)} is not --context-parallel-size {size}", f"a product of {size}")
    return int(words[0]), int(words[1])


def _zero(given: Given, job: Job) -> Any:
    if given.on("use-megatron-fsdp"):
        return _SHARDED[given.choice("data-parallel-sharding-strategy", "no_shard", _SHARDED)]
    if given.on("use-torch-fsdp2"):
        if given.on("use-distributed-optimizer"):
            raise given.refused("use-torch-fsdp2", "contradicts --use-distributed-optimizer", "one of the two")
        return 2 if given.on("torch-fsdp2-no-reshard-after-forward") else 3
    if job.optimizer == "muon":
        return 1 if given.text("optimizer") == "dist_muon" else 0
    return 1 if given.on("use-distributed-optimizer") else 0


def _zero_group(given: Given, zero: int, replicas: int) -> int:
    name = "num-distributed-optimizer-instances"
    instances = given.integer(name, 1)
    if instances == 1:
        return 0
    if not zero:
        raise given.refused(name, f"is {instances} without --use-distributed-optimizer", "1, or the switch")
    if replicas % instances:
        raise given.refused(name, f"{instances} does not divide {replicas} replicas", f"a divisor of {replicas}")
    return replicas // instances


def _experts(given: Given, model: Model, tp: int, assumed: list[str]) -> tuple[int, int]:
    """Return (ep, etp)."""
    has = any(layer.experts for layer in model.layers)
    ep = given.integer("expert-model-parallel-size", 1)
    if not has:
        if ep > 1:
            raise given.refused("expert-model-parallel-size", f"is {ep}; {model.name} has no experts", "1")
        return 1, 1
    etp = given.integer("expert-tensor-parallel-size", tp)
    if "expert-tensor-parallel-size" not in given and tp > 1:
        assumed.append(f"etp: {tp}, which is tp (no --expert-tensor-parallel-size)")
    return ep, etp


def _offload(given: Given, model: Model) -> Offload:
    blocks = len(model.blocks)
    layers = 0
    if given.text("cpu-offloading-num-layers", "0") != "0":
        layers = given.integer("cpu-offloading-num-layers", 0)
        if layers >= blocks:
            raise given.refused("cpu-offloading-num-layers", f"is {layers} of {blocks}", f"less than {blocks}")
    states = given.number("optimizer-offload-fraction", 1.0) if given.on("optimizer-cpu-offload") else 0.0
    if not 0 <= states <= 1:
        raise given.refused("optimizer-offload-fraction", f"is {states:g}", "from 0 to 1")
    return Offload(activations=layers / blocks, optimizer=states)


def _overlap(given: Given) -> Overlap:
    gradients, parameters = given.on("overlap-grad-reduce"), given.on("overlap-param-gather")
    if parameters and not gradients:
        raise given.refused(
            "overlap-param-gather", "needs --overlap-grad-reduce, which is not there", "both, or neither"
        )
    sharded = given.on("use-distributed-optimizer") or given.on("use-megatron-fsdp")
    tp = given.integer("tensor-model-parallel-size", 1)
    chunked = given.on("tp-comm-overlap") and given.on("sequence-parallel")
    return Overlap(
        gradients=gradients,
        parameters=parameters or not sharded,  # nothing to gather: plans leave the default
        pipeline=not given.on("no-overlap-p2p-communication"),
        tensor_chunks=min(tp, 64) if chunked else 1,
    )


def _uniform(given: Given, job: Job, strategy: Strategy, overlap: Overlap, assumed: list[str]) -> Uniform:
    groups = given.integer("pipeline-model-parallel-size", 1)
    if "micro-batch-size" not in given:
        assumed.append("micro-batches: of one sample (no --micro-batch-size)")
    micro = given.integer("micro-batch-size", 1)
    if job.global_batch % (micro * strategy.dp):
        problem = f"{job.global_batch} is not a multiple of --micro-batch-size {micro} x {strategy.dp} replicas"
        raise given.refused("global-batch-size", problem, f"a multiple of {micro * strategy.dp}")
    blocks = blocks_of(given, len(job.model.blocks), groups)
    virtual = len(blocks) // groups
    if virtual > 1 and groups == 1:
        raise given.refused("pipeline-model-parallel-size", f"is 1, but {virtual} stages interleave", "2 or more")
    schedule = Schedule(name="interleaved", virtual=virtual) if virtual > 1 else Schedule()
    count = job.global_batch // micro // strategy.dp
    if virtual > 1 and count < groups:
        problem = f"makes {count} micro-batches; {groups} device groups that interleave need as many"
        raise given.refused("global-batch-size", problem, f"at least {groups * micro * strategy.dp}")
    return Uniform(strategy, schedule, count, blocks, overlap)
