"""Scripts as bash reads them: bash itself is the reference."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from meshwright.frameworks.megatron.shell.find_arguments import find_words

SCRIPTS = {
    "a list in a string, continued": """
GPUS=4; NODES=2
OPTIONS=" \\
    --num-layers 32 \\
    --hidden-size 4096 \\
    --data-path 'a  b' \\
"
torchrun --nproc_per_node $GPUS train.py $OPTIONS --world $(($GPUS*NODES)) 2>&1 | cat
""",
    "arrays, comments, defaults": """
#!/bin/bash
TP=${TP:-8}   # tensor parallel
PP=${2:-$((TP / 2))}
NAME="run-${TP}-x"
ARGS=(
    --tensor-model-parallel-size $TP
    # --commented-out 3
    --pipeline-model-parallel-size "${PP}"  # trailing
    --save "/tmp/my dir/$NAME"
)
ARGS+=(--bf16 --layout 'Et*3|(t*4|)*2L')
MORE=${UNSET:-"--seq-length 4096"}
torchrun train.py "${ARGS[@]}" $MORE --lr=1e-4 --empty ""
""",
    "assignments before the command": """
export CUDA_DEVICE_MAX_CONNECTIONS=1
A=1 B="2 3" torchrun train.py --a ${A:-9} --b \\
   --c '--d' --e \\"quoted\\" && echo done >/dev/null
""",
    "a branch": """
MOE=yes
if [ "$MOE" = yes ]; then
    EXTRA="--num-experts 8"
fi
torchrun train.py --bf16 $EXTRA
""",
    "branches that can be told": """
DTYPE="fp8"; TOKENS=${3:-"MOCK"}; N=4; MOE=false
ARGS=()
if [[ "$DTYPE" == "fp8" ]]; then
    ARGS+=(
        "--fp8-format hybrid"
        "--fp8-amax-history-len 1024"
    )
fi
if [[ "$TOKENS" == "MOCK" ]] || [[ -z "$TOKENS" ]]; then
    ARGS+=("--mock-data" "--tokenizer-type NullTokenizer")
else
    ARGS+=("--data-path $TOKENS" "--tokenizer-type HuggingFaceTokenizer")
fi
if [ -n "${WANDB_API_KEY}" ]; then ARGS+=(--wandb-project x); fi
if [ $N -gt 8 ]; then ARGS+=(--huge); elif [ $N -ge 4 ] && [ ! -z "$N" ]; then ARGS+=(--large); else ARGS+=(--small); fi
if $MOE; then ARGS+=(--num-experts 8); fi
[ "$N" -eq 4 ] && ARGS+=(--four)
[ "$N" = 5 ] && ARGS+=(--five)
[ "$N" = 4 ] || ARGS+=(--not-four)
torchrun train.py ${ARGS[@]}
""",
    "a function": """
run() {
    torchrun train.py --x 1 "$@"
}
run
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_bash(name: str, tmp_path: Path) -> None:
    text = SCRIPTS[name].lstrip("\n")
    (tmp_path / "run.sh").write_text(text)
    stub = tmp_path / "torchrun"
    stub.write_text("#!/bin/sh\nfor word do printf '%s\\n' \"$word\"; done\n")
    stub.chmod(0o755)
    done = subprocess.run(
        ["bash", "run.sh"], capture_output=True, text=True, check=True, cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )  # fmt: skip
    theirs = done.stdout.split("\n")[:-1]
    found = find_words(text, "run.sh")
    assert [word for word in [*found.launcher[1:], *found.words] if word] == [
        word for word in theirs if word != "done" and word
    ]


def test_what_a_script_does_not_set_is_said() -> None:
    found = find_words("source models/x.sh\ntorchrun train.py ${MODEL_ARGS[@]} --bf16 --tp $TP", "run.sh")
    assert found.words == ["--bf16", "--tp", "${TP}"]
    assert any("MODEL_ARGS" in note for note in found.notes)


def test_a_program_in_a_variable_still_ends_the_launcher() -> None:
    found = find_words("torchrun --nnodes 2 --standalone --nproc_per_node=8 $PROGRAM --bf16 --tp 4", "run.sh")
    assert found.words == ["--bf16", "--tp", "4"]
    assert found.launcher[-1] == "${PROGRAM}"


def test_a_value_under_a_condition_is_said() -> None:
    found = find_words("if [ -f x ]; then\nTP=4\nelse\nTP=8\nfi\ntorchrun train.py --tp $TP", "run.sh")
    assert found.words == ["--tp", "4"]
    assert any(note.startswith("TP:") and "condition" in note for note in found.notes)


@pytest.mark.parametrize(
    ("text", "file"),
    [
        ("--num-layers 4\n--bf16\n--cp-comm-type p2p a2a\n", "args.txt"),
        ("MODEL_ARGS:\n  --num-layers: 4\n  --bf16: true\n  --cp-comm-type: [p2p, a2a]\nENV_VARS:\n  X: 1\n", "a.yaml"),
        ("A:\n  --num-layers: 4\n  --bf16: true\n  --cp-comm-type: [p2p, a2a]\nKIND: ci\nMETRICS:\n  - time\n", "ci.yaml"),
        ("env:\n  X: 1\na:\n  num_layers: 4  # it\n  bf16: true\n  fp16: no\n  cp_comm_type:\n  - p2p\n  - a2a\n", "a.yml"),
        ("- --num-layers 4\n- --bf16\n- --cp-comm-type p2p a2a\n", "list.yaml"),
        ('{"num-layers": 4, "bf16": true, "cp-comm-type": ["p2p", "a2a"], "save": null}', "a.json"),
        ("ARGS=(--num-layers 4 --bf16)\nMORE='--cp-comm-type p2p a2a'\n", "arrays.sh"),
    ],
)  # fmt: skip
def test_one_list_in_many_forms(text: str, file: str) -> None:
    assert find_words(text, file).words == ["--num-layers", "4", "--bf16", "--cp-comm-type", "p2p", "a2a"]
