"""Train on two processes with PyTorch's profiler, then ask where the time went: `python examples/analyze_job.py`.

The same works for any traces of torch.profiler: `meshwright analyze FOLDER`.
"""

import os
import tempfile

import meshwright as mw
from meshwright.traces.page.diagnosis import diagnose, shares_of
from meshwright.traces.page.html import page
from meshwright.traces.page.sql import ask


def main() -> None:
    job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("2xcpu"), 8, seq_len=64, precision="fp32")
    plan = mw.Plan.of({"dp": 2}, job)
    with tempfile.TemporaryDirectory() as folder:
        mw.train(plan, steps=6, profile=folder)  # ranks write rank0.json and rank1.json
        found = mw.analyze(folder, plan=plan)
        shares = shares_of(found)
        print(f"a step on {plan.devices} devices takes {shares.step / 1e6:.1f} ms:")
        for part, share in shares.parts.items():
            print(f"  {part:12}{share:7.1%}")
        for finding in diagnose(found):
            print("-", finding.what)
        query = "select kind, count(*) calls, sum(bytes) bytes from calls group by kind order by bytes desc"
        print(ask(found, query))
        with open(os.path.join(folder, "report.html"), "w", encoding="utf-8") as file:
            print(file.write(page(found)), "characters of report")


if __name__ == "__main__":
    main()
