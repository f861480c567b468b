"""Scripts that people have: what they mean, what is missing in them, what contradicts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright.errors import InputError, MeshwrightError
from meshwright.frameworks.contract import Beside, Imported
from meshwright.frameworks.registry import read

# Llama 3 70B, in the words of a script; the parallel part is Megatron-Bridge's llama3_70b_pretrain_config (0.3.1).
SCRIPT = """
#!/bin/bash
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-8}
MODEL_ARGS=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
    --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
    --tokenizer-type NullTokenizer --vocab-size 128255
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4
    --num-layers-per-virtual-pipeline-stage 4 --context-parallel-size 2
    --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py ${MODEL_ARGS[@]} ${PARALLEL_ARGS[@]} \\
    --micro-batch-size 1 --global-batch-size 512 --bf16 --lr 3e-4 --train-iters 100 --mock-data MORE
"""


def imported(more: str = "", *, script: str = SCRIPT, cluster: str = "8x8xh100", **beside: Any) -> Imported:
    text = script.replace("MORE", more)
    return read(text, "megatron", "run.sh", Beside(mw.Cluster.preset(cluster), **beside))


def test_a_published_configuration() -> None:
    found = imported()
    job = mw.Job(mw.Model.preset("llama3-70b"), mw.Cluster.preset("8x8xh100"), 512, 8192)
    assert found.job == job
    expected = {"tp": 4, "pp": 4, "virtual": 5, "ring": 2, "dp": 2, "zero": 1, "sp": True, "micro_batches": 256}
    assert found.plan == mw.Plan.of(expected, job)
    assert found.unknown == ()
    assert "--lr" in found.unused


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", {"recompute": "full"}),
        ("--recompute-granularity selective", {"recompute": ["core"]}),
        ("--recompute-activations --recompute-modules layernorm", {"recompute": ["norm"]}),
        ("--cp-comm-type a2a", {"ring": 1, "ulysses": 2}),
        ("--num-distributed-optimizer-instances 2", {"zero_group": 2}),
        ("--no-overlap-p2p-communication", {"overlap": {"pipeline": False}}),
        ("--tp-comm-overlap", {"overlap": {"tensor_chunks": 4}}),
    ],
)
def test_more_of_it(more: str, expected: dict[str, Any]) -> None:
    found = imported(more)
    usual = {"tp": 4, "pp": 4, "virtual": 5, "ring": 2, "dp": 2, "zero": 1, "sp": True, "micro_batches": 256}
    assert found.plan == mw.Plan.of(usual | expected, found.job)


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        ("--decoder-first-pipeline-num-layers 18 --decoder-last-pipeline-num-layers 20", [18, 21, 21, 20]),
        ("--decoder-last-pipeline-num-layers 17", [21, 21, 21, 17]),
        ("--pipeline-model-parallel-layout 'Et*19|(t*20|)*2t*21L'", [19, 20, 20, 21]),
        ("--pipeline-model-parallel-layout 'E|t*40|t*40|L'", [0, 40, 40, 0]),
        ("--pipeline-model-parallel-layout 'Et*9|(t*10|)*6,t*11L'", [9, *[10] * 6, 11]),
        ("--decoder-first-pipeline-num-layers 16 --decoder-last-pipeline-num-layers 16 "
         "--num-virtual-stages-per-pipeline-rank 2", [8, 12, 12, 8, 8, 12, 12, 8]),
    ],
)  # fmt: skip
def test_stages_however_they_are_said(arguments: str, counts: list[int]) -> None:
    script = SCRIPT.replace("--num-layers-per-virtual-pipeline-stage 4", arguments)
    found = imported(script=script).plan.pipelines[0]
    blocks = []
    for stage in found.stages:
        names = stage.spans[0].layers.split("..")
        first, last = (
            0 if n == "embed" else 79 if n in {"head", "norm"} else int(n.split(".")[1]) for n in (names[0], names[-1])
        )
        blocks.append(0 if stage.spans[0].layers in {"embed", "norm..head"} else last - first + 1)
    assert blocks == counts
    assert found.schedule.virtual == len(counts) // 4


def test_the_embedding_and_the_loss_take_places() -> None:
    script = SCRIPT.replace("--num-layers 80", "--num-layers 78").replace(
        "--num-layers-per-virtual-pipeline-stage 4",
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
    )
    layers = [stage.spans[0].layers for stage in imported(script=script).plan.pipelines[0].stages]
    assert layers == ["embed..block.18", "block.19..block.38", "block.39..block.58", "block.59..head"]


def test_only_some_blocks_repeat() -> None:
    found = imported("--recompute-granularity full --recompute-method block --recompute-num-layers 1")
    stage = found.plan.pipelines[0].stages[1]
    assert [(span.layers, span.recompute) for span in stage.spans] == [
        ("block.4", "full"),
        ("block.5..block.7", "none"),
    ]


def test_pipelines_inside_replicas() -> None:
    stages = imported("--use-tp-pp-dp-mapping").plan.pipelines[0].stages
    assert [stage.devices for stage in stages[:2]] == ["0-7,32-39", "8-15,40-47"]


REFUSED = {
    "--tensor-model-parallel-size 8": ["--tensor-model-parallel-size", "4 and 8"],
    "--pipeline-model-parallel-layout 'Et*40|t*40L'": ["contradicts", "Et*40|t*40L", "-stage 4"],
    "--num-virtual-stages-per-pipeline-rank 2": ["contradicts", "-stage 4", "-rank 2"],
    "--decoder-first-pipeline-num-layers 17": ["4", "17"],
    "--fp16": ["fp16", "--bf16"],
    "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2": ["2 x 2", "--context-parallel-size 2"],
    "--cp-comm-type a2a+p2p": ["hierarchical-context-parallel-sizes", "not there"],
    "--num-distributed-optimizer-instances 3": ["3 does not divide 4"],
    "--expert-model-parallel-size 8": ["no experts"],
    "--exp-avg-dtype bf16": ["--use-precision-aware-optimizer"],
    "--sequence-parallel true": ["no value and true"],
    "--qk-layernorm yes": ["switch", "yes"],
    "--recompute-granularity full": ["--recompute-method"],
    "--recompute-modules flash --recompute-granularity selective": ["flash", "core_attn"],
    "--batch-size 4": ["no longer", "--micro-batch-size"],
    "--checkpoint-activations": ["no longer"],
    "--optimizer lion": ["lion", "adam"],
    "--norm-epsilon much": ["much", "a number"],
}  # fmt: skip


@pytest.mark.parametrize("more", REFUSED)
def test_contradictions_name_both(more: str) -> None:
    with pytest.raises(InputError) as caught:
        imported(more)
    assert all(word in str(caught.value) for word in ["run.sh", *REFUSED[more]]), caught.value


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("--micro-batch-size 1", "--micro-batch-size 3", ["512", "--micro-batch-size 3 x 2 replicas"]),
        ("--pipeline-model-parallel-size 4", "--pipeline-model-parallel-size 3", ["tp 4 x pp 3 x cp 2 = 24", "64"]),
        ("--num-layers 80", "--num-layers eighty", ["--num-layers", "eighty"]),
        ("--num-layers-per-virtual-pipeline-stage 4", "--num-layers-per-virtual-pipeline-stage 3", ["3", "20 blocks"]),
        ("--num-layers-per-virtual-pipeline-stage 4", "--pipeline-model-parallel-layout 'Et*8|t*72L'", ["2 stages", "is 4"]),
        ("--num-layers-per-virtual-pipeline-stage 4", "--pipeline-model-parallel-layout 'Et*8|t*7L'", ["15 blocks", "80"]),
        ("--num-layers-per-virtual-pipeline-stage 4", "--pipeline-model-parallel-layout 'Etx|t*7L'", ["'x'"]),
        ("--tensor-model-parallel-size 4", "--tensor-model-parallel-size $TP", ["${TP}", "does not set"]),
        ("NullTokenizer --vocab-size 128255", "HuggingFaceTokenizer --tokenizer-model mine", ["--vocab-size", "--model"]),
        ("--global-batch-size 512", "--global-batch-size 2", ["1 micro-batches"]),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(old: str, new: str, words: list[str]) -> None:
    script = SCRIPT.replace(old, new)
    with pytest.raises(InputError) as caught:
        imported(script=script)
    assert all(word in str(caught.value) for word in words), caught.value


def test_beside_the_script() -> None:
    with pytest.raises(InputError, match=r"512.*256"):
        imported(batch=256)
    with pytest.raises(InputError, match="is 80, but --model llama3-8b has 32"):
        imported(model=mw.Model.preset("llama3-8b"))
    bare = "torchrun pretrain_gpt.py --tensor-model-parallel-size 8 --bf16 --unheard-of 3 --micro_batch_size 2"
    found = imported(script=bare, model=mw.Model.preset("llama3-8b"), batch=64, seq=4096, cluster="8xh100")
    assert found.plan.pipelines[0].micro_batches == 32
    assert found.unknown == ("--unheard-of",)
    assert found.plan.pipelines[0].stages[0].spans[0].zero == 0
    assert not found.plan.overlap.gradients


def test_what_is_assumed_is_said() -> None:
    def line(more: str, word: str, **changes: Any) -> bool:
        return any(word in text for text in imported(more, **changes).assumed)

    assert line("", "llama3-70b")
    assert line("", "starts 8 x 8 = 64", cluster="16x8xh100")
    assert line("--recompute-granularity full --recompute-method uniform --recompute-num-layers 4", "units of 4")
    assert line("--cp-comm-type p2p p2p a2a", "p2p in all layers")
    assert line("--mtp-num-layers 1", "further tokens")
    bare = SCRIPT.replace("--tokenizer-type NullTokenizer --vocab-size 128255", "")
    assert line("", "GPT2BPETokenizer", script=bare)
    assert line("--grad-reduce-in-bf16", "priced in 32 bits")
    assert line("--rampup-batch-size 16 8 300000", "ramp")
    moe = SCRIPT.replace("--swiglu", "--swiglu --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 4")
    assert line("", "etp: 4, which is tp", script=moe)


@pytest.mark.parametrize(
    ("old", "new", "family"),
    [
        ("--swiglu", "--swiglu --qk-layernorm", "qwen3"),
        ("--disable-bias-linear", "--disable-bias-linear --add-qkv-bias", "qwen2"),
        ("--swiglu", "--swiglu --window-size 4095,0", "mistral"),
        ("--swiglu", "--swiglu --num-experts 8", "mixtral"),
        ("--swiglu", "--swiglu --num-experts 8 --qk-layernorm --moe-layer-freq '([0]*1+[1]*79)'", "qwen3_moe"),
    ],
)
def test_shapes_belong_to_families(old: str, new: str, family: str) -> None:
    model = imported(script=SCRIPT.replace(old, new)).job.model
    assert model.family == family


def test_parameters_are_those_of_the_model_it_is() -> None:
    """124,439,808 parameters of GPT-2 (Radford et al., 2019), from Megatron's arguments for it."""
    script = (
        "torchrun pretrain_gpt.py --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 "
        "--max-position-embeddings 1024 --tokenizer-type GPT2BPETokenizer --micro-batch-size 4 --global-batch-size 64"
    )
    found = imported(script=script, cluster="8xh100")
    assert found.job.model.parameters == 124_439_808
    assert found.job.precision == "fp32"


PARTS = st.sampled_from([
    "torchrun", "pretrain_gpt.py", "--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--bf16",
    "--vocab-size", "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size",
    "--cp-comm-type", "--pipeline-model-parallel-layout", "--num-experts", "--moe-layer-freq", "--window-size",
    "--recompute-granularity", "--swiglu", "--multi-latent-attention", "4", "8", "0", "-1", "1e9", "full", "a2a",
    "Et*4|t*4L", "([0]*2+[1]*2)", "$X", "${X:-4}", "$((1+", "'", '"', "\\", "\n", ";", "X=(", ")", "if [", "]; then", "fi",
    "&&", "#", "${",
])  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(PARTS | st.text(max_size=5), max_size=30))
def test_nothing_but_an_error_of_the_users_comes_out(parts: list[str]) -> None:
    base = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 64 "
    for text in (" ".join(parts), base + " ".join(parts)):
        try:
            imported(script=text, cluster="8xh100")
        except MeshwrightError:
            continue
