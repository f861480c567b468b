"""A Megatron-LM script that is there already: what does it mean, what does it cost, what would be faster?

Needs only the light install; runs in seconds. docs/improve_megatron.md tells the same on the command line.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import meshwright as mw
from meshwright.frameworks.contract import Beside
from meshwright.frameworks.registry import read
from meshwright.search.explanation.explain import explain
from meshwright.search.space.targets import limits_for, target

RUNTIME = target("megatron").runtime  # Megatron-Core as the arguments below run it
script = Path(__file__).with_name("megatron_llama3_70b.sh")
theirs = read(script.read_text(), "megatron", script.name, Beside(mw.Cluster.preset("8x8xh100")))
print(f"{script.name} on {theirs.job.cluster.devices} devices")
for line in theirs.assumed:
    print(f"assumed: {line}")
before = mw.estimate(theirs.job, theirs.plan, RUNTIME)
print(f"theirs: {before}")
explanation = explain(theirs.job, theirs.plan, RUNTIME)
print(f"limited by {explanation.limit.text}")
for help_ in explanation.helps[:3]:
    print(f"  {help_.text}")

# The best plan among those that Megatron can run: its export is exact.
limits = limits_for("megatron", {}, [])
ours = mw.plan(theirs.job, RUNTIME, fix=limits.fixed, forbid=limits.forbidden)
after = mw.estimate(theirs.job, ours, RUNTIME)
print(f"\nours:   {after}\n        {before.step_seconds / after.step_seconds - 1:+.1%} tokens per second")

exported = mw.export(ours, "megatron")
assert exported.missing == ()
folder = Path(tempfile.mkdtemp(prefix="meshwright-"))
for name, text in exported.files.items():
    (folder / name).write_text(text)
print(f"\n{exported.command}   # in {folder}")
words = exported.files["pretrain_megatron.sh"].splitlines()
print("\n".join(words[words.index("PARALLEL_ARGS=(") : words.index("PRECISION_ARGS=(")]))
