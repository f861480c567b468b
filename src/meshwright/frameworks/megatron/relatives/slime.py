"""Write a plan for slime: Megatron's arguments in the arrays of its scripts, for the actor that it trains.

slime parses Megatron's own arguments, always shards optimizer states and always computes in 16 bits
(slime/backends/megatron_utils/arguments.py, commit 1cddc5d32e). The user chooses its engine for samples.
"""

from __future__ import annotations

from meshwright.frameworks.contract import Exported, Format, Inexpressible
from meshwright.frameworks.megatron import script
from meshwright.frameworks.megatron.arguments import Arguments
from meshwright.frameworks.megatron.write import padding, say
from meshwright.frameworks.megatron.write_model import config_of
from meshwright.plans import Job, Plan

FILE = "train_slime.sh"


def write(job: Job, plan: Plan) -> Exported:
    """Return the script, with places for checkpoints, prompts and rewards."""
    if job.precision not in {"bf16", "fp16"}:
        raise Inexpressible(f"slime trains in bf16 or fp16, not in {job.precision}")
    said = say(job, plan)
    missing = list(said.missing)
    strategy = said.uniform.strategy
    if not strategy.zero and strategy.replicas > 1:
        missing.append("zero: 0 is not there; slime always takes the distributed optimizer")
    if strategy.zero >= 2:
        raise Inexpressible(f"slime shards optimizer states (ZeRO-1), not ZeRO-{strategy.zero}")
    nodes = script.nodes_of(job, said.plan)
    vocabulary = int(config_of(job.model)["vocab_size"])
    divisor = str(padding(vocabulary, strategy.tp))
    rows: Arguments = {"vocab-size": (str(vocabulary),), "make-vocab-size-divisible-by": (divisor,)}
    model = {k: v for k, v in said.groups["MODEL_ARGS"].items() if k != "max-position-embeddings"} | rows
    perf = said.groups["PARALLEL_ARGS"] | said.groups["MEMORY_ARGS"] | said.groups["BATCH_ARGS"]
    perf.pop("use-distributed-optimizer", None)
    groups: dict[str, Arguments] = {
        "MODEL_ARGS": model,
        "CKPT_ARGS": {"hf-checkpoint": ("${HF_CHECKPOINT:?}",), "ref-load": ("${REF_LOAD:?}",)},
        "ROLLOUT_ARGS": {
            "prompt-data": ("${PROMPT_DATA:?}",),
            "num-rollout": ("${NUM_ROLLOUT:-100}",),
            "rollout-batch-size": ("${ROLLOUT_BATCH_SIZE:?}",),
            "n-samples-per-prompt": ("${SAMPLES_PER_PROMPT:-8}",),
        },
        "PERF_ARGS": perf,
        "OPTIMIZER_ARGS": said.groups["OPTIMIZER_ARGS"] | ({"fp16": ()} if job.precision == "fp16" else {}),
        "ACTOR_ARGS": {"actor-num-nodes": (str(nodes.count),), "actor-num-gpus-per-node": (str(nodes.processes),)},
    }
    start = f"HF_CHECKPOINT=... REF_LOAD=... PROMPT_DATA=... ROLLOUT_BATCH_SIZE=... bash {FILE}"
    lines = script.head(job, "Arguments of slime", ["Start it where a Ray cluster of all nodes listens:", f"  {start}"])
    lines += ["RAY_ADDRESS=${RAY_ADDRESS:-http://127.0.0.1:8265}", *script.arrays(groups), ""]
    names = " ".join(f'"${{{name}[@]}}"' for name, arguments in groups.items() if arguments)
    lines += [
        'ray job submit --address="$RAY_ADDRESS" \\',
        """    --runtime-env-json='{"env_vars": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}' \\""",
        f'    -- python3 train.py {names} "$@"',
    ]
    files = {FILE: "\n".join(lines) + "\n", "plan.json": said.plan.to_json()}
    return Exported(files, start, said.plan, tuple(missing), (*said.to_fill, *_TO_FILL))


_TO_FILL = (
    "checkpoints, prompts and rewards: HF_CHECKPOINT, REF_LOAD, PROMPT_DATA, and slime's arguments behind the script",
    "engines that generate: --rollout-num-gpus, or --colocate on the same devices",
)
FORMAT = Format("slime", "slime (Megatron actor)", "megatron", write)
