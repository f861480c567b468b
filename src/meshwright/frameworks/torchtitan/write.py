"""Write a plan as a Python module for torchtitan, and its schedule as a table if it has no name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msgspec.structs import replace as changed

from meshwright.frameworks.contract import Exported, Inexpressible
from meshwright.frameworks.shared.fsdp import Grid, grid_of
from meshwright.frameworks.shared.launch_command import torchrun
from meshwright.frameworks.shared.nearest_plan import Draft
from meshwright.frameworks.torchtitan.known import CONVERTERS, LONGEST, SCHEDULES
from meshwright.frameworks.torchtitan.model import flavor_of, llama_text
from meshwright.plans import Job, Plan
from meshwright.plans.action_table import action_table
from meshwright.plans.document import Overlap, Pipeline
from meshwright.plans.schedule import Schedule

_CHECKPOINTING = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}
_TO_FILL = (
    "hf_assets_path: a folder with the model's tokenizer",
    "dataloader: the data (c4 is streamed, as torchtitan's own configurations do), and training.steps",
    "optimizer: 3e-4 is written, for want of a learning rate in the plan",
)


def write(job: Job, plan: Plan) -> Exported:
    """Return a plan as torchtitan's configuration."""
    draft = Draft.of(job, plan)
    grid = _narrow(draft)
    unnamed = _unnamed(plan.pipelines[0], draft)
    files = {"plan_config.py": _module(draft, grid, unnamed is not None)}
    meant = draft.plan()
    if unnamed:
        table = action_table(unnamed, draft.uniform.groups, draft.uniform.micro_batches)
        rows = [",".join(f"{stage}{kind}{m}" for stage, kind, m in row) for row in table]
        files["schedule.csv"] = "\n".join(rows) + "\n"
        meant = changed(meant, pipelines=(changed(meant.pipelines[0], schedule=unnamed),))
    command = f"{torchrun(job, plan)} -m torchtitan.train --module plan_config --config plan"
    fill = (*_TO_FILL, *(("torchao must be installed",) if draft.job.precision in CONVERTERS else ()))
    return Exported(files, command, meant, tuple(draft.missing), fill)


def _unnamed(given: Pipeline, draft: Draft) -> Schedule | None:
    """Return a schedule without a name in torchtitan, which runs its action table unchanged."""
    uniform = draft.uniform
    if uniform.groups == 1:
        return None
    if (uniform.schedule.name, uniform.schedule.virtual) == ("zero-bubble", 1):
        return uniform.schedule
    unchanged = (len(uniform.blocks), uniform.micro_batches) == (len(given.stages), given.micro_batches)
    if given.schedule.name != "custom" or not unchanged:
        return None
    draft.missing = [line for line in draft.missing if not line.startswith("schedule:")]
    return given.schedule


def _narrow(draft: Draft) -> Grid:
    draft.without("ulysses")
    draft.whole_heads()
    if any(layer.tied_to for layer in draft.job.model.layers):  # models/common/decoder.py: not with a pipeline
        draft.without("pp", where="with tied embeddings")
    if draft.uniform.groups == 1 and draft.uniform.schedule.name != "1f1b":
        draft.only_schedules("1f1b")
    draft.only_recompute(tuple(_CHECKPOINTING))
    strategy = draft.uniform.strategy
    if strategy.etp > 1:
        draft.say(f"etp={strategy.etp}: experts are whole", etp=1)
    grid = grid_of(draft)
    inside = grid.shard * strategy.ring * strategy.tp  # devices that experts may fold over (config/configs.py)
    if inside % strategy.ep:
        draft.say(f"experts fold over one FSDP group: ZeRO-2 over all replicas, so that ep={strategy.ep} fits",
                  zero=max(draft.uniform.strategy.zero, 2), zero_group=0)  # fmt: skip
        grid = grid_of(draft)
    _offload(draft)
    _overlap(draft)
    flavor = flavor_of(draft.job.model)
    draft.only_precision("bf16", "fp32", *(CONVERTERS if flavor else ()))  # only a registry applies converters
    draft.only_optimizer("adamw", "adamw-16bit")
    return grid


def _offload(draft: Draft) -> None:
    """Set the one switch: parameters, gradients and optimizer states are offloaded."""
    offload = draft.uniform.strategy.offload
    if offload.optimizer and offload.parameters:
        draft.only_offload("optimizer", "parameters")
    else:
        draft.only_offload()


def _overlap(draft: Draft) -> None:
    tp, chunks = draft.uniform.strategy.tp, draft.uniform.overlap.tensor_chunks
    usual = Overlap(tensor_chunks=tp if chunks > 1 and tp > 1 else 1)
    if draft.uniform.overlap != usual:
        said = f"products in {tp} chunks (async TP)" if usual.tensor_chunks > 1 else "products whole"
        draft.missing.append(f"overlap: torchtitan hides what it can; {said}")
        draft.uniform = replace(draft.uniform, overlap=usual)


def _module(draft: Draft, grid: Grid, table: bool) -> str:
    """Return the text of the module."""
    flavor = flavor_of(draft.job.model)
    spec = ""
    if flavor and draft.job.seq_len > LONGEST[flavor[0]]:
        limit = f"{LONGEST[flavor[0]]:,} tokens"
        raise Inexpressible(f"torchtitan's {flavor[0]} takes {limit} at most, the job has {draft.job.seq_len:,}")
    if flavor is None:
        spec = llama_text(draft.job.model, draft.job.seq_len) + "\n\n"
    checkpointing = _CHECKPOINTING[str(draft.uniform.strategy.recompute)]
    imports = [
        "from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss",
        "from torchtitan.components.optimizer import default_adamw",
        "from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig",
        "from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader",
        "from torchtitan.models.common.config_utils import decoder_vocab_size",
        "from torchtitan.trainer import Trainer",
    ]
    if checkpointing != "None":
        name = checkpointing.partition(".")[0]
        imports.append(f"from torchtitan.distributed.activation_checkpoint import {name}")
    if flavor is None:
        imports += ["from torchtitan.models import llama3", "from torchtitan.protocols.model_spec import ModelSpec"]
    else:
        imports.append(f"from torchtitan.models.{flavor[0]} import model_registry")
    if converter := CONVERTERS.get(draft.job.precision):
        imports.append(f"from torchtitan.components.quantization import {converter}")
    head = f'"""{draft.job.model.name} on {draft.job.cluster.name}, for torchtitan 0.3.0."""\n\n'
    first = "import dataclasses\n\n" if flavor is None else ""
    return head + first + "\n".join(sorted(imports)) + "\n\n\n" + spec + _function(draft, grid, flavor, table)


def _function(draft: Draft, grid: Grid, flavor: tuple[str, str] | None, table: bool) -> str:
    job, uniform = draft.job, draft.uniform
    converter = CONVERTERS.get(job.precision)
    more = f", converters=[{converter}.Config({_quantised(job.precision)})]" if converter else ""
    spec = f'model_registry("{flavor[1]}"{more})' if flavor else "model_spec()"
    lines = [
        "def plan() -> Trainer.Config:",
        f"    spec = {spec}",
        "    config = Trainer.Config(",
        "        model_spec=spec,",
        '        hf_assets_path="./assets/tokenizer",',
        "        loss=ChunkedLossWrapper.Config(",
        "            loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),",
        "        ),",
        "        optimizer=default_adamw(lr=3e-4),",
        '        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),',
        *_call("training=TrainingConfig", _training(job, draft)),
        *_call("parallelism=ParallelismConfig", _parallelism(draft, grid, table)),
        f"        activation_checkpoint={_CHECKPOINTING[str(uniform.strategy.recompute)]},",
        *_call("compile=CompileConfig", _compile(uniform.overlap)),
        "    )",
    ]
    if job.optimizer == "adamw-16bit":
        lines.append('    config.optimizer.implementation = "fused_opt_states_bf16"')
    return "\n".join([*lines, "    return config", ""])


def _quantised(precision: str) -> str:
    return 'fqns=["layers"], model_compile_enabled=True' if precision == "nvfp4" else "model_compile_enabled=True"


def _call(name: str, arguments: dict[str, Any]) -> list[str]:
    """Return a call, one argument per line, and a list of lists one list per line."""
    lines = [f"        {name}("]
    for key, value in arguments.items():
        if isinstance(value, list):
            rows = [f"                [{', '.join(_quoted(item) for item in row)}]," for row in value]
            lines += [f"            {key}=[", *rows, "            ],"]
        else:
            lines.append(f"            {key}={_quoted(value)},")
    return [*lines, "        ),"]


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _training(job: Job, draft: Draft) -> dict[str, Any]:
    uniform = draft.uniform
    own = job.global_batch // uniform.strategy.dp
    arguments: dict[str, Any] = {
        # A pipeline takes the whole batch of a replica at once and cuts it into micro-batches itself.
        "local_batch_size": own if uniform.groups > 1 else uniform.micro_batch(job),
        "global_batch_size": job.global_batch,
        "seq_len": job.seq_len,
        "steps": 1000,
    }
    if job.precision == "fp32":
        arguments["mixed_precision_param"] = "float32"
    if uniform.strategy.offload.parameters:
        arguments["enable_cpu_offload"] = True
    if uniform.groups > 1 or uniform.strategy.ep > 1:  # neither can be captured (trainer.py, _validate_cuda_graphs)
        arguments["disable_cuda_graphs"] = True
    return arguments


def _parallelism(draft: Draft, grid: Grid, table: bool) -> dict[str, Any]:
    uniform, strategy = draft.uniform, draft.uniform.strategy
    policy = {None: "default", False: "never", True: "always"}[grid.reshard]
    arguments: dict[str, Any] = {
        "data_parallel_replicate_degree": grid.replicate,
        "data_parallel_shard_degree": grid.shard,
        "fsdp_reshard_after_forward": policy,
        "tensor_parallel_degree": strategy.tp,
        "enable_sequence_parallel": strategy.sp,
        "context_parallel_degree": strategy.ring,
        "expert_parallel_degree": strategy.ep,
        "pipeline_parallel_degree": uniform.groups,
    }
    if uniform.groups == 1:
        return arguments
    name = "PipelineScheduleMulti" if table else SCHEDULES[uniform.schedule.name]
    arguments |= {
        "pipeline_parallel_schedule": name,
        "pipeline_parallel_microbatch_size": uniform.micro_batch(draft.job),
        "module_fqns_per_model_part": _modules(uniform.blocks),
    }
    return arguments | ({"pipeline_parallel_schedule_csv": "schedule.csv"} if table else {})


def _modules(blocks: tuple[int, ...]) -> list[list[str]]:
    """Return the names of torchtitan's modules, stage by stage."""
    parts, taken = [], 0
    for count in blocks:
        parts.append([f"layers.{i}" for i in range(taken, taken + count)])
        taken += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return parts


def _compile(overlap: Overlap) -> dict[str, Any]:
    return {"enable": True} | ({"enable_async_tensor_parallel": True} if overlap.tensor_chunks > 1 else {})
