"""`meshwright train` as users meet it, and what it computes beside a plain loop."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import meshwright as mw
from meshwright.errors import InputError
from meshwright.run.data import open_data
from meshwright.run.folder.checkpoint.checkpoint import latest
from meshwright.run.models import build
from meshwright.run.options import Training
from meshwright.run.processes.launch import Work
from meshwright.run.processes.worker import described
from meshwright.run.supervision.stop_signals import AT_ONCE
from tests.run.families import CONFIGS
from tests.run.plans import pipeline, span, stage

TINY = ["tiny-llama", "--seq", "32", "--batch", "4", "--data", "synthetic"]


@pytest.fixture(autouse=True)
def without_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of the CPU wherever this runs: one accelerator cannot be several of NCCL's."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def started(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "meshwright", "train", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def ended(*arguments: str, seconds: float = 90, **options: Any) -> tuple[int, str, str]:
    process = started(*arguments, **options)
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def plan(**short: Any) -> mw.Plan:
    job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("1xcpu"), 4, seq_len=32, precision="fp32")
    return mw.Plan.of({"micro_batches": 2, **short}, job)


def steps_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "step"]


def by_hand(steps: int, run: Training) -> tuple[list[float], list[float]]:
    """Losses and norms of a loop with PyTorch's own optimizer, clipping and loss."""
    decoder = build(mw.Model.preset("tiny-llama"), seed=run.seed)
    matrices = [weight for weight in decoder.parameters() if weight.dim() > 1]
    rest = [weight for weight in decoder.parameters() if weight.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    data = open_data("synthetic", vocab=512, seq_len=32, global_batch=4, seed=run.seed)
    losses, norms = [], []
    for step in range(steps):
        rate = (
            run.lr * (step + 1) / 3
            if step < 2
            else run.lr * (0.55 + 0.45 * math.cos(math.pi * (step - 2) / (steps - 2)))
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        tokens = torch.from_numpy(data.samples(step, range(4)).tokens)
        loss = functional.cross_entropy(decoder(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(decoder.parameters(), run.clip)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms


def test_a_plain_loop_finds_the_same_losses_and_norms() -> None:
    events = steps_of(mw.train(plan(), steps=6, seed=3, lr=1e-2))
    losses, norms = by_hand(6, Training(steps=6, seed=3, lr=1e-2))
    assert [event["loss"] for event in events] == pytest.approx(losses, rel=1e-4)
    assert [event["grad_norm"] for event in events] == pytest.approx(norms, rel=1e-3)
    assert losses[-1] < losses[0] - 0.1  # and it learns


def test_processes_print_json_of_every_step(tmp_path: Path) -> None:
    code, out, err = ended(
        *TINY, "--plan", "pp=2,tp=2", "--steps", "4", "--seed", "3", "--lr", "1e-2", "--json", cwd=tmp_path
    )
    assert code == 0, err
    events = [json.loads(line) for line in out.splitlines()]
    names = {"step", "loss", "grad_norm", "step_time_s", "predicted_step_time_s", "peak_memory_bytes", "mfu"}
    assert all(names <= set(event) for event in events)
    losses, norms = by_hand(4, Training(steps=4, seed=3, lr=1e-2))
    assert [event["loss"] for event in events] == pytest.approx(losses, rel=1e-4)
    assert [event["grad_norm"] for event in events] == pytest.approx(norms, rel=1e-3)


def test_stop_resume_under_another_plan_and_export(tmp_path: Path) -> None:
    run = tmp_path / "run"
    common = [*TINY, "--steps", "400", "--decay", "constant", "--output", str(run)]
    process = started(*common, "--plan", "dp=2", "--json", cwd=tmp_path)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    process.send_signal(signal.SIGTERM)
    more, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    done = len(lines) + len(more.splitlines())
    found, problems = latest(run / "checkpoints")
    assert found is not None
    assert (found.step, problems) == (done, [])
    again = [*TINY, "--steps", str(done + 2), "--decay", "constant", "--output", str(run), "--json", "--resume"]
    code, out, err = ended(*again, "--export", str(tmp_path / "model"), cwd=tmp_path)
    assert code == 0, err
    whole = steps_of(mw.train(plan(), steps=done + 2, decay="constant"))
    assert [json.loads(line)["loss"] for line in out.splitlines()] == pytest.approx(
        [e["loss"] for e in whole[-2:]], rel=1e-4
    )
    events = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert {"start", "step", "checkpoint", "stopped", "resumed", "end"} <= set(events)
    code, _, err = ended(*again, cwd=tmp_path)
    assert code == 2
    assert err.splitlines()[-1].endswith(f"the run is at step {done + 2} already (valid: more than {done + 2})")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = torch.from_numpy(
        open_data("synthetic", vocab=512, seq_len=32, global_batch=4).samples(done + 2, range(4)).tokens
    )
    assert float(model(tokens, labels=tokens).loss.detach()) < whole[0]["loss"]


def test_ctrl_c_reaches_all_processes_and_a_checkpoint_is_kept(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = [*TINY, "--steps", "100000", "--plan", "dp=2", "--json", "--output", str(run)]
    process = started(*arguments, cwd=tmp_path, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    assert latest(run / "checkpoints")[0] is not None


def test_adapters_in_a_stage_with_nothing_to_train_and_an_export(tmp_path: Path) -> None:
    """A stage of the embedding alone, sharded in float32; the tied head in bfloat16, as the export is."""
    model = mw.Model.from_config(CONFIGS["llama-tied"])
    job = mw.Job(model, mw.Cluster.preset("3xcpu"), 4, seq_len=32, precision="bf16")
    stages = stage("0-1", span("embed", dp=2, zero=1)), stage("2", span("block.0..head"))
    losses = []
    for lora in (4, 0):
        table = {
            "format": "meshwright-plan",
            "version": 1,
            "job": job.written(),
            "pipelines": [pipeline(*stages, batch=4)],
        }
        events = mw.train(mw.Plan.of(table, job), steps=2, lora=lora, export=str(tmp_path / f"model-{lora}"))
        losses.append([event["loss"] for event in steps_of(events)])
    assert losses[0][0] == losses[1][0]  # a fresh adapter adds nothing
    assert losses[0][1] != losses[1][1]
    from transformers import AutoModelForCausalLM

    for lora in (4, 0):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / f"model-{lora}").dtype == torch.bfloat16


def test_killed_while_it_saves_the_checkpoint_before_stays(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = started(*TINY, "--steps", "100000", "--save-every", "1", "--output", str(run), cwd=tmp_path)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list(run.glob("checkpoints/step-0000000[3-9].*.part")):
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    found, problems = latest(run / "checkpoints")
    assert found is not None
    assert problems == []
    assert found.step >= 2


@pytest.mark.parametrize("zero", [None, 0, 1], ids=["as they are", "compressed", "compressed shards"])
def test_a_lost_process_ends_the_run_with_one_message(zero: int | None, tmp_path: Path) -> None:
    rules = {} if zero is None else {"zero": zero, "compression": [{"layers": "embed..head", "algorithm": "int8"}]}
    job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("2xcpu"), 4, seq_len=32, precision="fp32")
    mw.Plan.of({"dp": 2, **rules}, job).save(tmp_path / "plan.json")
    process = started("--plan", "plan.json", "--data", "synthetic", "--steps", "100000", "--json", cwd=tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    worker = next(pid for pid, parent, _ in listed() if parent == server_of(process.pid))
    begun = time.monotonic()
    os.kill(int(worker), signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - begun < 30
    assert process.returncode == 1
    assert len(err.splitlines()) == 1, err
    assert re.fullmatch(rf"error: rank \d \(\S+, process {worker}\) was ended in .*: was ended by SIGKILL: .*\n", err)


def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    process = started(*TINY, "--plan", "dp=2", "--steps", "100000", "--json", cwd=tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    workers = [int(pid) for pid, parent, _ in listed() if parent == server_of(process.pid)]
    assert len(workers) == 2
    process.kill()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(str(pid) in {row[0] for row in listed()} for pid in workers):
        time.sleep(0.2)
    assert not {str(pid) for pid in workers} & {row[0] for row in listed()}
    process.communicate()


def listed() -> list[list[str]]:
    """pid, pid of the parent and command of every process."""
    found = subprocess.run(["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    return [line.split(None, 2) for line in found.splitlines()[1:]]


def server_of(pid: int) -> str:
    return next(own for own, parent, command in listed() if parent == str(pid) and "forkserver" in command)


def test_evaluation_is_over_what_is_held_out() -> None:
    events = mw.train(plan(), steps=4, evaluate_every=2, evaluate_batches=2, lr=1e-9)
    found = [event["loss"] for event in events if event["event"] == "evaluation"]
    decoder = build(mw.Model.preset("tiny-llama"))
    data = open_data("synthetic", vocab=512, seq_len=32, global_batch=4, held_out=8, split="evaluation")
    tokens = torch.cat([torch.from_numpy(data.samples(step, range(4)).tokens) for step in range(2)])
    with torch.no_grad():
        expected = functional.cross_entropy(decoder(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert found == pytest.approx([float(expected)] * 2, rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (["--plan", "tp=3"], "does not divide the 8 heads", 2),
        (["--plan", "dp=2,tp"], "'tp' is not NAME=VALUE", 2),
        (["--plan", "nowhere.json"], "nowhere.json", 2),
        (["--data", "nowhere"], "nowhere: data: no such file or folder", 2),
        (["--data", "small.txt"], "small.txt: --batch: holds 0 samples", 2),
        (["--batch", "3", "--plan", "dp=2"], "global_batch 3 is not a multiple", 2),
        (["--init-from", "nowhere"], "nowhere: --init-from: no such folder", 2),
        (["--resume"], "--resume: needs the run's folder", 2),
        (["--output", "empty", "--resume"], "holds no whole checkpoint", 2),
        (["--lr", "1e30", "--steps", "60", "--clip", "0"], "no finite numbers", 1),
        (["--output", "small.txt"], "small.txt", 2),
        (["--lr", "inf"], "--lr: expected a number < 1e+38", 2),
        (["--weight-decay", "inf"], "--weight-decay: expected", 2),
        (["--lora", "1000"], "--lora: is 1000 (valid: 1 to the model's width, 128", 2),
        (["--save-every", "2"], "--save-every: needs the run's folder", 2),
        (["--plan", ""], "--plan: is empty", 2),
        (["--seq", "1"], "--seq: a sample of one token", 2),
        (["--export", "small.txt"], "small.txt: --export: is a file", 2),
        (["--export", "small.txt/model"], "small.txt/model: --export: cannot be written", 2),
        (["--output", "small.txt/run"], "small.txt/run: --output: cannot be written", 2),
    ],
)
def test_mistakes_are_named(
    arguments: list[str], said: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.testing import CliRunner

    from meshwright.cli.running.train import command

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Path("small.txt").write_text("too little")
    found = CliRunner().invoke(command, [*TINY, "--steps", "2", *arguments])
    error = found.exception
    assert isinstance(error, mw.MeshwrightError), (error, found.output)
    assert said in str(error)
    assert error.exit_code == code


def test_data_of_more_tokens_than_the_model_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = tmp_path / "some.txt"
    text.write_text("word " * 500)
    job = mw.Job(mw.Model.from_config(CONFIGS["llama"]), mw.Cluster.preset("1xcpu"), 4, seq_len=32, precision="fp32")
    with pytest.raises(InputError, match="its vocabulary is 257, larger than the model's 64"):
        mw.train(mw.Plan.of({"micro_batches": 2}, job), str(text), steps=1)


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    run = tmp_path / "run"
    run.mkdir()
    (run / "events.jsonl").symlink_to(full)
    code, _, err = ended(*TINY, "--steps", "2", "--output", str(run), cwd=tmp_path)
    assert code == 1
    assert "the disk is full" in err
    assert "Traceback" not in err


def test_arguments_are_checked() -> None:
    for arguments, said in (({"steps": "a"}, "steps"), ({"steps": 0}, "steps"), ({"steps": 1, "lrr": 1.0}, "lrr")):
        with pytest.raises(InputError, match=said):
            mw.train(plan(), **arguments)
    with pytest.raises(InputError, match="expected a Plan"):
        mw.train("plan.json", steps=1)  # type: ignore[arg-type]


def test_a_second_signal_ends_a_run_at_once(tmp_path: Path) -> None:
    process = started(*TINY, "--plan", "dp=2", "--steps", "100000", "--json", cwd=tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    worker = next(int(pid) for pid, parent, _ in listed() if parent == server_of(process.pid))
    os.kill(worker, signal.SIGSTOP)  # a step that does not end
    process.send_signal(signal.SIGTERM)
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert err.splitlines() == ["SIGTERM: stopping after this step; again: at once", f"error: {AT_ONCE}"]


PROGRAM = """
import sys
import meshwright as mw
job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("1xcpu"), 4, seq_len=32, precision="fp32")
plan = mw.Plan.of({"micro_batches": 2}, job)
try:
    mw.train(plan, steps=100000, output="run", tell=lambda event: print(event["event"], flush=True))
except KeyboardInterrupt:
    sys.exit(77)
print("went on")
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 77)])
def test_a_program_gets_the_signal_after_the_run_has_saved(number: int, code: int, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while process.stdout.readline() != "step\n":
        pass
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == code
    assert out.splitlines()[-1] == "stopped"
    assert latest(tmp_path / "run/checkpoints")[0] is not None


def test_what_a_run_is_of_cannot_change(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    mw.train(plan(), steps=1, output=run)
    with pytest.raises(InputError, match=r"--lora: is of a run of tiny-llama with lora 0, not 4"):
        mw.train(plan(), steps=2, output=run, resume=True, lora=4)
    job = mw.Job(mw.Model.preset("tiny-gpt2"), mw.Cluster.preset("1xcpu"), 4, seq_len=32, precision="fp32")
    with pytest.raises(InputError, match=r"MODEL: is of a run of tiny-llama"):
        mw.train(mw.Plan.of({"micro_batches": 2}, job), steps=2, output=run, resume=True)


def test_memory_that_runs_out_is_said() -> None:
    work = Work({}, Training(steps=1), 0.0, 0.0, 1)
    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried"),
        RuntimeError("DefaultCPUAllocator: can't allocate"),
    ):
        wrapped = RuntimeError("stage 0 failed")
        wrapped.__cause__ = error
        assert "rank 0: out of memory" in str(described(wrapped, work))
        assert "recompute=full" in str(described(wrapped, work))


def test_json_tells_evaluations_too(tmp_path: Path) -> None:
    code, out, err = ended(*TINY, "--steps", "2", "--eval-every", "2", "--json", cwd=tmp_path)
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert [sorted(row)[0] for row in rows] == ["grad_norm", "grad_norm", "evaluation_loss"]


def test_options_that_contradict() -> None:
    with pytest.raises(InputError, match="has its own weights"):
        Training(steps=1, output="x", resume=True, init_from="y").check()


def test_more_processes_than_accelerators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("2xcpu"), 4, seq_len=32, precision="fp32")
    two = mw.Plan.of({"dp": 2}, job)
    with pytest.raises(InputError, match=r"runs on 2 devices, this machine shows 1 of CUDA's.*CUDA_VISIBLE_DEVICES="):
        mw.train(two, steps=1)
