from __future__ import annotations

import itertools

import pytest

from headrace.profile.timeline import LAUNCH_GAP_US, timeline_of
from tests.profile.builders import kernel, operation, ranged, step, trace_of


def test_overlapping_kernels_are_counted_once() -> None:
    timeline = timeline_of(trace_of(kernel("_decode", 0, 100), kernel("nvjet_x", 60, 100), kernel("_norm", 70, 20)))
    assert timeline.us_by_part() == {"decode_attention": 100, "gemm": 60}
    assert timeline.busy_us == timeline.span_us == 160


def test_a_short_gap_lies_between_kernels_and_a_long_one_is_the_hosts() -> None:
    start = 10 + LAUNCH_GAP_US / 2
    long = start + 10 + 5 * LAUNCH_GAP_US
    timeline = timeline_of(trace_of(kernel("_norm", 0, 10), kernel("_norm", start, 10), kernel("_norm", long, 10)))
    assert timeline.us_by_part() == {
        "elementwise": 30,
        "launch_gaps": LAUNCH_GAP_US / 2,
        "host_gaps": 5 * LAUNCH_GAP_US,
    }


def test_time_without_work_is_waiting() -> None:
    """The engine had no work from 0.001 s to 0.003 s, and needed 0.5 ms more to submit the next kernel."""
    steps = [step(0, at=0.0, is_last=True), step(1, at=0.003)]
    timeline = timeline_of(trace_of(kernel("_norm", 0, 500), kernel("_norm", 3500, 100)), steps)
    totals = timeline.us_by_part()
    assert totals["waiting"] == pytest.approx(2000)
    assert totals["host_gaps"] == pytest.approx(500 + 500)


def test_pieces_leave_no_hole() -> None:
    events = [kernel(f"_norm{i}", 37.0 * i, 20 + i % 30) for i in range(50)]
    pieces = timeline_of(trace_of(*events)).pieces
    assert all(left.end == right.start for left, right in itertools.pairwise(pieces))


def test_torch_kernels_under_the_samplers_range_are_sampling() -> None:
    timeline = timeline_of(
        trace_of(
            ranged("headrace.sample", 100, 50, cat="gpu_user_annotation"),
            kernel("void at::native::vectorized_elementwise_kernel", 0, 10),
            kernel("void at::native::vectorized_elementwise_kernel", 110, 10),
        )
    )
    assert timeline.us_by_part()["other"] == 10
    assert timeline.us_by_part()["sampling"] == 10


def test_on_a_cpu_the_innermost_known_operation_has_the_time() -> None:
    timeline = timeline_of(
        trace_of(
            ranged("headrace.execute", 0, 100),
            ranged("headrace.op.rms_norm", 10, 20),
            operation("aten::empty", 12, 5),
            operation("mkl::_mkl_linear", 40, 30),
            operation("aten::view", 45, 5),
            ranged("headrace.sample", 75, 20),
            operation("aten::mm", 80, 10),
        )
    )
    assert timeline.us_by_part() == {"unattributed": 30, "elementwise": 20, "gemm": 30, "sampling": 20}


def test_on_a_cpu_a_torch_operation_of_no_part_is_other() -> None:
    timeline = timeline_of(trace_of(ranged("headrace.execute", 0, 10), operation("aten::index_select", 2, 4)))
    assert timeline.us_by_part() == {"unattributed": 6, "other": 4}


def test_on_a_cpu_only_the_devices_thread_counts_and_gaps_are_the_hosts() -> None:
    timeline = timeline_of(
        trace_of(
            ranged("headrace.execute", 0, 10),
            ranged("headrace.execute", 15, 10),
            operation("aten::mm", 3, 4, tid=99),
        )
    )
    assert timeline.us_by_part() == {"unattributed": 20, "host_gaps": 5}


def test_a_trace_without_steps_is_empty() -> None:
    assert timeline_of(trace_of()).pieces == []
