"""Two processes train a small model under ZeRO-1, once with gradients as they are and once in four bits each."""

import meshwright as mw

job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("2xcpu"), global_batch=8, seq_len=64, precision="fp32")
rules = [{"layers": "embed..head", "algorithm": "int4", "options": {"block": 64}}]
for name, compression in (("as they are", []), ("in four bits", rules)):
    plan = mw.Plan.of({"dp": 2, "zero": 1, "compression": compression}, job)
    events = mw.train(plan, steps=20, lr=3e-3, decay="constant")
    losses = [event["loss"] for event in events if event["event"] == "step"]
    print(f"{plan.devices} devices, gradients {name}: loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
