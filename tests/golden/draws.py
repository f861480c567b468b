"""Draw questions to the command line by seed: which verb, on which job, under which limits and plans.

They use only names that users type, so that the same questions can be asked of any release.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

COUNT = 300
MODELS = (
    "gpt2-xl", "gpt3-13b", "llama2-13b", "llama3-8b", "llama3-70b", "qwen3-14b", "mistral-7b", "bloom-7b1", "mixtral-8x7b",
    "qwen3-30b-a3b", "deepseek-v2-lite", "t5-large", "vit-huge", "swin-huge", "bert-huge", "llama3.2-1b",
)  # fmt: skip
CLUSTERS = (
    "8xh100", "4x8xh100", "8xa100-40gb", "2x8xa100-80gb", "8xv100-32gb", "2x8xmi300x", "8xascend-910b", "8xb200",
    "1x8xa100-40gb+1x8xv100-32gb", "2x4xrtx4090", "8xh20",
)  # fmt: skip
LENGTHS = {
    "gpt2-xl": (512, 1024), "gpt3-13b": (512, 2048), "bloom-7b1": (512, 2048), "t5-large": (512,), "vit-huge": (257,),
    "swin-huge": (3136,), "bert-huge": (512,), "llama2-13b": (2048, 4096),
}  # fmt: skip
MIXTURES = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite")
RUNTIMES = ("meshwright", "megatron", "nemo", "torchtitan", "fsdp", "deepspeed", "megatron-2021", "maxtext")
FORMATS = (
    "megatron", "nemo", "mindspeed", "slime", "torchtitan", "deepspeed", "accelerate", "galvatron", "verl", "areal",
    "openrlhf",
)  # fmt: skip
DEGREES = (
    "tp=8", "tp=4,dp=2", "tp=2,pp=4", "tp=2,pp=2,dp=2", "pp=4,dp=2,schedule=zbv", "pp=2,virtual=2,dp=4", "zero=3", "zero=2",
    "tp=2,ulysses=2,zero=3", "ring=4,dp=2,zero=1", "tp=4,sp=true,pp=2", "pp=8", "dp=8,zero=1", "ep=4,zero=1", "ep=8,tp=1",
    "tp=2,ep=2,pp=2,zero=1",
)  # fmt: skip
MEMORY = (
    "",
    ",recompute=selective",
    ",recompute=full",
    ",recompute=norm+activation",
    ",micro_batch=1",
    ",micro_batches=8",
)
TRACES = (
    "hta/a100_ddp_resnet_2rank_rank0.json.gz", "hta/amd_mi250_minitoy.json.gz", "hta/cpu_only_gloo_rank34_of_300.json.gz",
    "hta/event_sync_multi_stream.json.gz", "hta/triton_example.json.gz", "hta/alexnet_cuda_sync.json.gz", "hta",
    "param/dlrm_8rank", "kineto", "straggler/trace-ST.parquet", "tracelens/h100_bert_small.json.gz",
    "tracelens/mi300_bert_small.json.gz", "tracelens/h100_qwen1.5_0.5b.json.gz",
    "tracelens/b200_8rank_rank0_tp_inference.json.gz", "tracelens/torch_compile_triton.json.gz",
    "tracelens/vllm_full_cudagraph.json.gz",
)  # fmt: skip
RUNS = (
    (1, "micro_batches=2"), (1, "recompute=full"), (1, "recompute=selective"), (2, "dp=2,zero=0"), (2, "dp=2,zero=1"),
    (2, "dp=2,zero=3"), (2, "tp=2"), (2, "tp=2,sp=true"), (2, "pp=2,micro_batches=4"), (2, "ring=2"), (2, "ulysses=2"),
    (2, "pp=2,micro_batches=4,schedule=gpipe"), (2, "pp=2,virtual=2,micro_batches=4,schedule=interleaved"),
    (2, "pp=2,virtual=2,micro_batches=4,schedule=zbv"), (2, "pp=2,micro_batches=4,schedule=zero-bubble"),
)  # fmt: skip


@dataclass(frozen=True)
class Question:
    """A command, and how its answer is read: 'json', 'text', 'files' of a folder, or a 'run' with its checkpoint."""

    command: tuple[str, ...]
    answer: str


def question(number: int) -> Question:
    """Return one of the questions; the same one for the same number."""
    random = Random(f"golden {number}")
    kinds = (
        (_plan, 60), (_estimate, 60), (_export, 48), (_explain, 30), (_compare, 24), (_analyze, 36), (_sweep, 12),
        (_run, 30),
    )  # fmt: skip
    at = number
    for kind, count in kinds:
        if at < count:
            return kind(random, at)
        at -= count
    raise IndexError(number)


def _job(random: Random, few: bool = False) -> list[str]:
    clusters = CLUSTERS[:1] + CLUSTERS[2:3] + CLUSTERS[4:5] if few else CLUSTERS
    model, cluster = random.choice(MODELS), random.choice(clusters)
    return [model, cluster, *_batch(random, model, cluster)]


def _batch(random: Random, model: str, cluster: str) -> list[str]:
    precision = random.choice(
        ["fp16", "fp16", "fp32"] if "v100" in cluster else ["bf16", "bf16", "bf16", "fp16", "fp32"]
    )
    optimizer = random.choice(["adamw", "adamw", "adamw", "adamw-16bit", "adamw-8bit", "muon", "sgd-momentum"])
    length = random.choice(["512", "2048", "4096"])
    return [
        "--batch",
        random.choice(["32", "64", "256"]),
        "--seq",
        length,
        "--precision",
        precision,
        "--optimizer",
        optimizer,
    ]


def _shown(random: Random, *command: str) -> Question:
    wanted = random.choice(["json", "text"])
    return Question((*command, "--json") if wanted == "json" else command, wanted)


def _plan(random: Random, _: int) -> Question:
    limits: list[str] = []
    if random.random() < 0.3:
        limits += ["--for", random.choice(["megatron", "torchtitan", "deepspeed", "fsdp", "mindspeed"])]
    elif random.random() < 0.5:
        limits += ["--fix", random.choice(["tp=2", "pp=2", "zero=3", "recompute=full", "pp=4,schedule=1f1b", "dp=8"])]
    if random.random() < 0.4:
        limits += ["--forbid", random.choice(["offload", "zero3", "recompute", "offload,swap", "tp"])]
    if random.random() < 0.3:
        limits += ["--headroom", "0.1"]
    return _shown(random, "plan", *_job(random), *limits, "--no-why")


def _degrees(random: Random, model: str, count: int = 1) -> list[str]:
    """Plans by hand; experts only where the model has some."""
    return random.sample([one for one in DEGREES if "ep=" not in one or model in MIXTURES], count)


def _memory(random: Random, model: str) -> str:
    return random.choice([one for one in MEMORY if "+" not in one or model not in MIXTURES])


def _estimate(random: Random, _: int) -> Question:
    job = _job(random, few=True)
    (plan,) = _degrees(random, job[0])
    words = ["--plan", plan + _memory(random, job[0]), "--runtime", random.choice(RUNTIMES)]
    return _shown(random, "estimate", *job, *words)


def _by_hand(job: list[str]) -> list[str]:
    model, cluster, *batch = job
    return ["--model", model, "--cluster", cluster, *batch]


def _export(random: Random, at: int) -> Question:
    job = _job(random, few=True)
    (plan,) = _degrees(random, job[0])
    words = (plan + _memory(random, job[0]), *_by_hand(job), "--to", FORMATS[at % len(FORMATS)])
    return Question(("export", *words), "files")


def _explain(random: Random, _: int) -> Question:
    job = _job(random, few=True)
    return _shown(random, "explain", *_degrees(random, job[0]), *_by_hand(job), "--seconds", "0")


def _compare(random: Random, _: int) -> Question:
    job = _job(random, few=True)
    return _shown(random, "compare", *_degrees(random, job[0], 2), *_by_hand(job))


def _analyze(random: Random, at: int) -> Question:
    return _shown(random, "analyze", f"TRACES/{TRACES[at % len(TRACES)]}", "--no-cache", "--workers", "1")


def _sweep(random: Random, _: int) -> Question:
    model, cluster = random.choice(MODELS[1:9]), random.choice(CLUSTERS[:3])
    job = [model, cluster, "--batch", "32,64", "--seq", "512,2048", "--time-limit", "120"]
    return _shown(random, "sweep", *job, *random.choice([[], ["--for", "megatron"], ["--forbid", "offload"]]))


def _run(random: Random, at: int) -> Question:
    processes, plan = RUNS[at % len(RUNS)]
    model = random.choice(["tiny-llama", "tiny-gpt2", "tiny-moe"])
    optimizer = random.choice(["adamw", "adamw", "muon", "sgd-momentum", "adamw-8bit"])
    job = ["--cluster", f"local:{processes}", "--batch", "8", "--seq", "64", "--optimizer", optimizer]
    return Question(("train", model, "--plan", plan, *job, "--steps", "3", "--seed", str(at)), "run")
