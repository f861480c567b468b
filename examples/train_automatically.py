"""Plan a small model for two processes of this machine, train it under that plan, and go on under another one."""

import tempfile
from pathlib import Path

import meshwright as mw

model = mw.Model.preset("tiny-llama")
job = mw.Job(model, mw.Cluster.load("local:2"), global_batch=8, seq_len=64, precision="fp32")
plan = mw.plan(job, forbid=["partial", "compression"])
promised = mw.estimate(job, plan)
span = plan.pipelines[0].stages[0].spans[0]
print(f"{model.name} on {plan.devices} devices: dp={span.dp}, tp={span.tp}, zero={span.zero}, "
      f"{len(plan.pipelines[0].stages)} stage(s), {promised.step_seconds * 1e3:.0f} ms a step expected")  # fmt: skip

with tempfile.TemporaryDirectory() as folder:
    run = str(Path(folder) / "run")

    def show(event: dict) -> None:
        if event["event"] == "step" and event["step"] % 5 == 0:
            print(f"step {event['step']:>3}: loss {event['loss']:.3f}, {event['step_time_s'] * 1e3:.0f} ms")

    mw.train(plan, steps=20, lr=3e-3, decay="constant", output=run, tell=show)
    other = mw.Plan.of({"pp": 2, "schedule": "zero-bubble", "micro_batches": 4}, job)
    print("the same run goes on as a pipeline of two stages")
    mw.train(other, steps=30, lr=3e-3, decay="constant", output=run, resume=True, tell=show)
