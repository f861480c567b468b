"""Times that are known because the trace was made from them, counted nanosecond by nanosecond."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.traces.rank.communication_kernels import communicates
from meshwright.traces.rank.intervals import length, union
from meshwright.traces.rank.kernels import kernel_table
from meshwright.traces.rank.timeline.breakdown import breakdown
from meshwright.traces.reading import Category, Trace
from tests.traces.traces_as_text import SCANNERS, read_text

LONG = 300  # ns: the timeline of generated traces
KINDS = {
    "compute": ("kernel", "gemm"),
    "communication": ("kernel", "ncclDevKernel_AllReduce"),
    "copies": ("gpu_memcpy", "Memcpy HtoD"),
    "sync": ("cuda_sync", "Stream Sync"),
}
works = st.lists(
    st.tuples(
        st.sampled_from(sorted(KINDS)),
        st.integers(0, LONG - 1),
        st.integers(0, 80),
        st.integers(0, 1),
        st.integers(7, 9),
    ),
    max_size=12,
)
OLD = {"kernel": "Kernel", "gpu_memcpy": "Memcpy"}


def trace_of(events: list[dict[str, Any]], **header: Any) -> Trace:
    return read_text(json.dumps({"traceEvents": events, **header}), SCANNERS[-1]())


def event(
    category: str, name: str, start: float, dur: float, pid: Any = 0, tid: Any = 7, **args: Any
) -> dict[str, Any]:
    """Times in nanoseconds."""
    times = {"ts": start / 1000, "dur": dur / 1000}
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times, "args": args}


@settings(deadline=None)
@given(works, st.booleans())
def test_times_of_generated_work(made: list[tuple[str, int, int, int, int]], in_old_words: bool) -> None:
    events = []
    for kind, start, dur, device, stream in made:
        word, name = KINDS[kind]
        events.append(event(OLD.get(word, word) if in_old_words else word, name, start, dur, device, stream))
    found = {device.pid: device for device in breakdown(trace_of(events)).devices}
    real = [work for work in made if work[0] != "sync"]
    assert found.keys() == {device for _, _, _, device, _ in real}
    for pid, device in found.items():
        mine = [work for work in real if work[3] == pid]
        busy = {kind: np.zeros(2 * LONG, bool) for kind in KINDS}
        for kind, start, dur, _, _ in mine:
            busy[kind][start : start + dur] = True
        compute, comm, copies = (busy[kind] for kind in ("compute", "communication", "copies"))
        shares = device.shares
        assert shares.span == max(start + dur for _, start, dur, _, _ in mine) - min(
            start for _, start, _, _, _ in mine
        )
        assert shares.busy == (compute | comm | copies).sum()
        assert shares.compute == compute.sum()
        assert shares.communication == comm.sum()
        assert shares.overlap == (compute & comm).sum()
        assert shares.exposed == (comm & ~compute).sum()
        assert shares.copies == copies.sum()
        assert shares.exposed_copies == (copies & ~compute & ~comm).sum()
        assert shares.compute + shares.exposed + shares.exposed_copies + shares.idle == shares.span
        assert device.kernel_time == sum(dur for kind, _, dur, _, _ in mine if kind != "copies")
        assert device.events == len(mine)
        assert device.streams == len({stream for _, _, _, _, stream in mine})


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 20)), max_size=20))
def test_unions(made: list[tuple[int, int]]) -> None:
    starts = np.array([start for start, _ in made], np.int64)
    ends = starts + np.array([long for _, long in made], np.int64)
    covered = {point for start, long in made for point in range(start, start + long)}
    assert length(starts, ends) == len(covered)
    first, last = union(starts, ends)
    assert (first[1:] > last[:-1]).all()


def step(number: int, start: int, dur: int) -> dict[str, Any]:
    return event("user_annotation", f"ProfilerStep#{number}", start, dur, 100, 100)


def test_work_belongs_to_the_step_that_launched_it() -> None:
    """The device runs behind: work of step 1 runs during step 2, in whatever order the file lists it."""
    events = [
        event("kernel", "late", 2100, 100, correlation=1),
        event("kernel", "graph part", 2300, 50, correlation=2),
        event("kernel", "graph part", 2350, 50, correlation=2),
        event("cuda_driver", "cuLaunchKernelEx", 2900, 10, 100, 101, correlation=3),
        event("kernel", "after the steps", 3500, 10, correlation=3),
        event("kernel", "nobody launched this", 1500, 10, correlation=77),
        event("kernel", "nor this", 500, 10),
        step(2, 2000, 900),
        step(1, 1000, 1000),
        event("cuda_runtime", "cudaLaunchKernel", 1900, 10, 100, 101, correlation=1),
        event("cuda_runtime", "cudaGraphLaunch", 2050, 10, 100, 101, correlation=2),
        event("gpu_user_annotation", "ProfilerStep#1", 2100, 100),
    ]
    (device,) = breakdown(trace_of(events)).devices
    one, two = device.steps
    assert (one.host.number, two.host.number) == (1, 2)
    assert (one.events, two.events) == (2, 3)
    assert one.shares is not None
    assert (one.shares.start, one.shares.end, one.shares.busy) == (1500, 2200, 110)
    assert two.shares is not None
    assert (two.shares.start, two.shares.end, two.shares.busy) == (2300, 3510, 110)
    assert (device.without_launch, device.outside_steps) == (2, 1)


def test_traces_without_steps_or_devices() -> None:
    (device,) = breakdown(trace_of([event("kernel", "k", 0, 5)])).devices
    assert (device.steps, device.outside_steps, device.shares.busy) == ((), 1, 5)
    assert breakdown(trace_of([event("cpu_op", "aten::add", 0, 5, 1, 1)])).devices == ()
    assert breakdown(trace_of([])).devices == ()


def test_times_since_the_epoch_keep_their_nanoseconds() -> None:
    """Doubles of this size step by 250 ns."""
    text = ",".join(
        f'{{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":1712195495520870.{100 + 2 * i:03d},"dur":0.001}}'
        for i in range(100)
    )
    (device,) = breakdown(read_text(f"[{text}]", SCANNERS[-1]())).devices
    assert (device.shares.busy, device.shares.span) == (100, 199)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1000)), min_size=1, max_size=40))
def test_kernel_table(made: list[tuple[str, int]]) -> None:
    table = kernel_table(trace_of([event("kernel", name, i, dur) for i, (name, dur) in enumerate(made)]))
    assert sorted(kernel.name for kernel in table) == sorted({name for name, _ in made})
    assert [kernel.total for kernel in table] == sorted((kernel.total for kernel in table), reverse=True)
    for kernel in table:
        runs = np.array([dur for name, dur in made if name == kernel.name])
        assert (kernel.count, kernel.total) == (len(runs), runs.sum())
        assert (kernel.shortest, kernel.longest) == (runs.min(), runs.max())
        assert kernel.mean == pytest.approx(runs.mean())
        assert [kernel.median, kernel.p90, kernel.p99] == pytest.approx(np.percentile(runs, [50, 90, 99]))


def test_tables_of_other_events() -> None:
    trace = trace_of([event("cpu_op", "aten::mm", 0, 5), event("kernel", "gemm", 0, 3)])
    assert [row.name for row in kernel_table(trace, Category.OPERATOR)] == ["aten::mm"]
    assert kernel_table(trace_of([])) == ()


@pytest.mark.parametrize(
    ("name", "yes"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", True),
        ("rccl_main_kernel(ncclDevComm*, unsigned long, ncclWork*)", True),
        ("void multimem_all_reduce_kernel<c10::BFloat16, 8>(c10::BFloat16*, unsigned long)", True),
        ("void two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 8>", True),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)", True),
        ("void sglang::cross_device_reduce_2stage<half, 4>", True),
        ("flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<3, 8>", True),
        ("void quickreduce::allreduce_prototype_twoshot", True),
        ("void deep_ep::internode_ll::dispatch<true, false, 7168>(void*)", True),
        ("void deep_ep::intranode::combine<__nv_bfloat16, 8, 768, 8192>", True),
        ("nvshmemi_transfer_rma_nbi", True),
        ("EpDispatchIntraNodeKernel_bf16", True),
        ("userbuffers_fp16_sum_inplace_gpu_rr_rs_oop", True),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", False),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<unsigned int>", False),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", False),
        ("triton_poi_fused__to_copy_all_gather_into_tensor_3", False),
        ("triton_red_fused_add_rms_norm_reduce_scatter_tensor_1", False),
        ("void softmax_warp_all_reduce<float>", False),
        ("void moe::dev::routing::routingIndicesDispatchKernel", False),
        ("vectorized_gather_kernel", False),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", False),
        ("flash_fwd_splitkv_combine_kernel", False),
    ],
)  # fmt: skip
def test_kernels_that_communicate(name: str, yes: bool) -> None:
    assert communicates(name) is yes


def test_a_kernel_that_says_its_collective_communicates_whatever_its_name() -> None:
    (device,) = breakdown(trace_of([event("kernel", "my_fused", 0, 5, **{"Collective name": "allreduce"})])).devices
    assert device.communication_kernels == 1
