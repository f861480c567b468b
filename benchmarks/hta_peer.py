"""HolisticTraceAnalysis over a folder of traces: everything it says of all ranks, as JSON. Runs in a venv of its own.

python benchmarks/hta_peer.py FOLDER
"""

from __future__ import annotations

import json
import sys
from typing import Any


def answers(folder: str) -> dict[str, Any]:
    from hta.trace_analysis import TraceAnalysis

    analysis = TraceAnalysis(trace_dir=folder)
    temporal = analysis.get_temporal_breakdown(visualize=False)
    overlap = analysis.get_comm_comp_overlap(visualize=False)
    _, kernels = analysis.get_gpu_kernel_breakdown(visualize=False, num_kernels=1000, duration_ratio=1.0)
    idle, _ = analysis.get_idle_time_breakdown(ranks=sorted(temporal["rank"]), visualize=False)
    copies = analysis.get_memory_bw_summary()
    found = {
        "temporal": temporal.to_dict("records"),
        "overlap": overlap.to_dict("records"),
        "kernels": kernels.to_dict("records"),
        "idle": len(idle),
        "copies": len(copies) if copies is not None else 0,
    }
    try:
        found["stragglers"] = [int(rank) for rank in analysis.get_potential_stragglers()]
    except Exception as error:  # it needs several ranks
        found["stragglers"] = f"{type(error).__name__}: {error}"
    return found


if __name__ == "__main__" and len(sys.argv) > 1:
    told = json.dumps(answers(sys.argv[1]), default=float)
    print("\n" + told)  # on the last line: it prints, too
