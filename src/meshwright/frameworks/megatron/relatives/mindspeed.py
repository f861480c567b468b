"""Write a plan for MindSpeed-LLM (Ascend): Megatron's arguments, and its own where they differ.

Limits and names are those of mindspeed_llm/training/arguments.py (Ascend/MindSpeed-LLM, commit 015ce048f5) and of
docs/features/dualpipev.md (Ascend/MindSpeed, commit 1cd5d396eb).
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace as changed

from meshwright.frameworks.contract import Exported, Format, Inexpressible
from meshwright.frameworks.megatron import script
from meshwright.frameworks.megatron.arguments import Arguments
from meshwright.frameworks.megatron.nearest_plan import schedule
from meshwright.frameworks.megatron.recompute import Repeated, operators_of
from meshwright.frameworks.megatron.stages import is_mapped, joined, meant
from meshwright.frameworks.megatron.write_model import config_of, shape_arguments
from meshwright.frameworks.megatron.write_plan import batch_arguments
from meshwright.frameworks.shared.nearest_plan import Draft
from meshwright.frameworks.shared.uniform_plan import Uniform, settle
from meshwright.models import Model
from meshwright.models.attention import LatentAttention
from meshwright.models.feed_forward import Moe
from meshwright.plans import Job, Offload, Plan

FILE = "pretrain_mindspeed.sh"
_REPEATS = {"recompute-norm": frozenset({"norm"}), "recompute-activation-function": frozenset({"activation"})}
_OPTIMIZERS: dict[str, Arguments] = {
    "adamw": {"optimizer": ("adam",)},
    "adamw-16bit": {"optimizer": ("adam",), "o2-optimizer": ()},
    "sgd-momentum": {"optimizer": ("sgd",), "sgd-momentum": ("0.9",)},
    "sgd": {"optimizer": ("sgd",), "sgd-momentum": ("0.0",)},
}


def write(job: Job, plan: Plan) -> Exported:
    """Return the script, and the parts it cannot express."""
    config_of(job.model)
    if job.precision not in {"bf16", "fp16", "fp32"}:
        raise Inexpressible(f"MindSpeed-LLM trains in bf16, fp16 or fp32, not in {job.precision}")
    if job.optimizer not in _OPTIMIZERS:
        raise Inexpressible(f"MindSpeed-LLM has {', '.join(_OPTIMIZERS)}, not {job.optimizer}")
    whole, blocks = joined(job, plan)
    uniform, lost = settle(job, whole)
    missing, to_fill = list(lost), list[str]()
    uniform = _fit(job, uniform, missing)
    if uniform.groups > 1 and is_mapped(plan, uniform, missing):
        missing.append("devices: replicas lie inside stages, not pipelines inside replicas")
    what: Any = uniform.strategy.recompute
    repeat, repeated = _recompute(job.model, Repeated(what, blocks if what == "full" else None), missing)
    groups: dict[str, Arguments] = {
        "MODEL_ARGS": _shape(job, missing, to_fill),
        "PARALLEL_ARGS": _parallel(job, uniform),
        "MEMORY_ARGS": repeat | ({"swap-optimizer": ()} if uniform.strategy.offload.optimizer else {}),
        "BATCH_ARGS": batch_arguments(job, uniform),
        "PRECISION_ARGS": {job.precision: ()} if job.precision != "fp32" else {},
        "OPTIMIZER_ARGS": _OPTIMIZERS[job.optimizer],
        "DATA_ARGS": _data(job),
        "LOG_ARGS": {"train-iters": ("${TRAIN_ITERS:-50}",), "lr": ("${LR:-3e-4}",), "log-interval": ("1",)},
    }
    stands_for = meant(job, uniform, repeated, mapped=False)
    nodes = script.nodes_of(job, stands_for)
    start = f"MINDSPEED=~/MindSpeed-LLM DATA_PATH=... TOKENIZER=... NODE_RANK=0 MASTER_ADDR=node0 bash {FILE}"
    lines = script.head(
        job, "Arguments of MindSpeed-LLM", ["Start it on every node, with its own NODE_RANK:", f"  {start}"]
    )
    lines += [
        "MINDSPEED=${MINDSPEED:-MindSpeed-LLM}  # a checkout of Ascend/MindSpeed-LLM",
        *script.launch_variables(nodes),
    ]
    lines += ["export CUDA_DEVICE_MAX_CONNECTIONS=1", "", *script.arrays(groups), ""]
    lines += script.torchrun("$MINDSPEED/pretrain_gpt.py", [name for name, group in groups.items() if group])
    files = {FILE: "\n".join(lines) + "\n", "plan.json": (stands_for if missing else plan).to_json()}
    to_fill.append("data and tokenizer: DATA_PATH and TOKENIZER, a folder of Hugging Face's")
    return Exported(files, start, stands_for if missing else plan, tuple(missing), tuple(to_fill))


def _fit(job: Job, uniform: Uniform, missing: list[str]) -> Uniform:
    """The nearest plan that MindSpeed-LLM runs."""
    draft = Draft(job, uniform, missing)
    if uniform.schedule.name != "dualpipev" or not _dual_pipe_runs(job, uniform):
        schedule(draft)
    uniform = draft.uniform
    if uniform.schedule.virtual > 1 and len(set(uniform.blocks)) > 1:
        missing.append("stages: with several stages per device group all have as many blocks; even stages, 1f1b")
        draft.dealt_evenly()
    strategy = uniform.strategy
    if strategy.zero >= 2:
        draft.say(f"zero: {strategy.zero} is not there; 1 instead", zero=1)
    if strategy.zero_group and strategy.zero_group != strategy.replicas:
        draft.say("zero_group: states are cut over all replicas", zero_group=0)
    kept = strategy.offload
    if kept.parameters or kept.activations or kept.optimizer not in {0.0, 1.0}:
        missing.append("offload: optimizer states as a whole (--swap-optimizer), nothing else")
        draft.set(offload=Offload(optimizer=float(kept.optimizer > 0.5)))
    line = "overlap: products of tensor parallelism are not cut into chunks"
    draft.only_overlap(changed(uniform.overlap, tensor_chunks=1), line)
    return draft.uniform


def _dual_pipe_runs(job: Job, uniform: Uniform) -> bool:
    """Return True if DualPipeV can run.

    It needs experts, even stages, two micro-batches per device group, and no context parallelism.
    """
    strategy = uniform.strategy
    experts = any(layer.experts for layer in job.model.layers)
    alone = strategy.ulysses * strategy.ring == 1 and len(set(uniform.blocks)) == 1
    return experts and alone and uniform.micro_batches >= 2 * uniform.groups


def _parallel(job: Job, uniform: Uniform) -> Arguments:
    strategy, groups, virtual = uniform.strategy, uniform.groups, uniform.schedule.virtual
    said: Arguments = {
        "tensor-model-parallel-size": (str(strategy.tp),),
        "pipeline-model-parallel-size": (str(groups),),
        "context-parallel-size": (str(strategy.ulysses * strategy.ring),),
    }
    said |= {"sequence-parallel": ()} if strategy.sp else {}
    if uniform.schedule.name == "dualpipev":
        said |= {"schedules-method": ("dualpipev",), "moe-fb-overlap": ()}
    elif virtual > 1:
        said["num-layers-per-virtual-pipeline-stage"] = (str(uniform.blocks[0]),)
    elif len(set(uniform.blocks)) > 1:
        said["num-layer-list"] = (",".join(map(str, uniform.blocks)),)
    if strategy.ulysses > 1 and strategy.ring > 1:
        said |= {"context-parallel-algo": ("hybrid_cp_algo",), "ulysses-degree-in-cp": (str(strategy.ulysses),)}
    elif strategy.ulysses * strategy.ring > 1:
        algorithm = "ulysses_cp_algo" if strategy.ulysses > 1 else "megatron_cp_algo"
        said["context-parallel-algo"] = (algorithm,)
    said |= {"use-cp-send-recv-overlap": ()} if strategy.ring > 1 else {}
    if any(layer.experts for layer in job.model.layers):
        said["expert-model-parallel-size"] = (str(strategy.ep),)
        said["expert-tensor-parallel-size"] = (str(strategy.etp),)
    said |= {"use-distributed-optimizer": ()} if strategy.zero else {}
    said |= {"overlap-grad-reduce": ()} if uniform.overlap.gradients else {}
    gathers = strategy.zero and uniform.overlap.parameters and uniform.overlap.gradients
    said |= {"overlap-param-gather": ()} if gathers else {}
    return said | ({"no-overlap-p2p-communication": ()} if groups > 1 and not uniform.overlap.pipeline else {})


def _recompute(model: Model, repeated: Repeated, missing: list[str]) -> tuple[Arguments, Repeated]:
    """Return recompute arguments: whole blocks as in Megatron, norms and activation functions by its own switches."""
    if repeated.what == "none":
        return {}, repeated
    if repeated.what == "full":
        method = ("uniform", "1") if repeated.blocks is None else ("block", str(repeated.blocks))
        said: Arguments = {"recompute-granularity": ("full",)}
        said |= {"recompute-method": method[:1], "recompute-num-layers": method[1:]}
        return said, repeated
    wanted = operators_of(model, repeated.what)
    switches = {name: operators for name, operators in _REPEATS.items() if operators <= wanted}
    covered = frozenset(name for operators in switches.values() for name in operators)
    if left := sorted(wanted - covered):
        missing.append(f"recompute: {'+'.join(left)} is kept; {'+'.join(sorted(covered)) or 'nothing'} is repeated")
        return dict.fromkeys(switches, ()), Repeated(tuple(sorted(covered)) or "none")
    return dict.fromkeys(switches, ()), repeated


def _shape(job: Job, missing: list[str], to_fill: list[str]) -> Arguments:
    """Return Megatron's shape arguments, with its own for latent attention, experts and windows."""
    said = shape_arguments(job.model, job.seq_len, missing, to_fill)
    for name in ("moe-ffn-hidden-size", "moe-layer-freq", "moe-shared-expert-intermediate-size", "moe-permute-fusion"):
        said.pop(name, None)
    shapes = [layer.shape for layer in job.model.layers]
    moe = next((shape for shape in shapes if isinstance(shape, Moe)), None)
    if moe is not None:
        said |= _experts(shapes, moe)
    latent = next((shape for shape in shapes if isinstance(shape, LatentAttention)), None)
    if latent is not None:
        for name in ("multi-latent-attention", "qk-head-dim", "qk-pos-emb-head-dim", "rope-type"):
            said.pop(name, None)
        said |= {"multi-head-latent-attention": (), "qk-nope-head-dim": (str(latent.nope_dim),)}
        said |= {"qk-rope-head-dim": (str(latent.rope_dim),)}
        for theirs, ours in (("rotary-scaling-factor", "rope-scaling-factor"), ("mscale", "rope-scaling-mscale"),
                             ("mscale-all-dim", "rope-scaling-mscale-all-dim")):  # fmt: skip
            if theirs in said:
                said[ours] = said.pop(theirs)
    if "window-size" in said:
        said["sliding-window"] = (str(int(said.pop("window-size")[0].split(",")[0]) + 1),)
    fused = {"use-fused-rmsnorm": ()} if said["normalization"] == ("RMSNorm",) else {}
    fused |= {"use-fused-swiglu": ()} if "swiglu" in said else {}
    fused |= {"use-fused-rotary-pos-emb": ()} if said["position-embedding-type"] == ("rope",) else {}
    return {"use-mcore-models": (), **said, "use-flash-attn": (), **fused}


def _experts(shapes: list[object], moe: Moe) -> Arguments:
    feeds = [isinstance(shape, Moe) for shape in shapes if type(shape).__name__ in {"Mlp", "Moe"}]
    dense = feeds.index(True)
    if not all(feeds[dense:]):
        raise Inexpressible("MindSpeed-LLM has dense layers before the experts, not between them")
    said: Arguments = {"moe-intermediate-size": (str(moe.width),)}
    said |= {"n-shared-experts": (str(moe.shared_width // moe.width),)} if moe.shared_width else {}
    said |= {"shared-expert-gate": ()} if moe.shared_gate else {}
    return said | {"first-k-dense-replace": (str(dense),), "moe-layer-freq": ("1",)}


def _data(job: Job) -> Arguments:
    vocabulary = str(int(config_of(job.model)["vocab_size"]))
    return {
        "data-path": ("${DATA_PATH:?}",),
        "split": ("100,0,0",),
        "tokenizer-type": ("PretrainedFromHF",),
        "tokenizer-name-or-path": ("${TOKENIZER:?}",),
        "vocab-size": (vocabulary,),
        "make-vocab-size-divisible-by": ("1",),
    }


FORMAT = Format("mindspeed", "MindSpeed-LLM (Ascend)", "mindspeed", write)
