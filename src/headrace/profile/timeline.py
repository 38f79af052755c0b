"""The device's time in a window: which part ran when, and what the gaps between kernels are.

On a GPU the events are kernels and copies; where they overlap, the one that began first has the time. On a CPU the
events are the ranges and operations of the device's thread, which are nested: the innermost known one has the time.

    GPU    | gemm | gemm ┊ attention |········| gemm |      ┊ gap between kernels, ····· host gap or waiting
    CPU    [ execute [ op.rms_norm ] . [ gemm ] ... ]·····[ execute ...      . unattributed: in a step, in no operation
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.profile.parts import EXECUTE, OPERATION, RANGE, Part, part_of_kernel, part_of_operation, part_of_range
from headrace.profile.trace import DEVICE_CATEGORIES, Event, StepLine, Trace

LAUNCH_GAP_US = 20.0  # a longer gap on a GPU is no gap between two queued kernels

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the device's time. Microseconds of the trace's clock."""

    start: float
    end: float
    part: Part
    name: str  # of the kernel or operation; of a gap: empty

    @property
    def us(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The pieces follow one another without a hole, from the start of the window to its end."""

    pieces: list[Piece]
    base_ns: int

    @property
    def span_us(self) -> float:
        return self.pieces[-1].end - self.pieces[0].start if self.pieces else 0.0

    @property
    def busy_us(self) -> float:
        return sum(piece.us for piece in self.pieces if piece.name)

    def us_by_part(self) -> dict[Part, float]:
        totals: dict[Part, float] = defaultdict(float)
        for piece in self.pieces:
            totals[piece.part] += piece.us
        return dict(totals)

    def us_by_name(self) -> dict[tuple[Part, str], float]:
        totals: dict[tuple[Part, str], float] = defaultdict(float)
        for piece in self.pieces:
            if piece.name:
                totals[piece.part, piece.name] += piece.us
        return dict(totals)


def timeline_of(trace: Trace, steps: Sequence[StepLine] = ()) -> Timeline:
    """The window's timeline. Without steps, every long gap is a host gap."""
    busy = _gpu_pieces(trace) if trace.has_kernels else _cpu_pieces(trace)
    if not busy:
        return Timeline([], trace.base_ns)
    idle = idle_times(steps, trace.base_ns)
    pieces: list[Piece] = []
    until = busy[0].start
    for piece in busy:
        if piece.start > until:
            pieces += _gap(until, piece.start, idle, is_gpu=trace.has_kernels)
        pieces.append(piece)
        until = piece.end
    return Timeline(pieces, trace.base_ns)


def idle_times(steps: Sequence[StepLine], base_ns: int) -> list[Interval]:
    """When the engine had no work, in the trace's microseconds: after a step that left none, until the next one."""
    times = []
    for step, following in itertools.pairwise(steps):
        if step.is_last:
            times.append((step.ended_at * 1e6 - base_ns / 1e3, following.started_at * 1e6 - base_ns / 1e3))
    return times


def _gap(start: float, end: float, idle: Sequence[Interval], *, is_gpu: bool) -> Iterable[Piece]:
    if is_gpu and end - start < LAUNCH_GAP_US:
        yield Piece(start, end, "launch_gaps", "")
        return
    at = start
    for first, last in idle:
        first, last = max(first, at), min(last, end)
        if first >= last:
            continue
        if first > at:
            yield Piece(at, first, "host_gaps", "")
        yield Piece(first, last, "waiting", "")
        at = last
    if at < end:
        yield Piece(at, end, "host_gaps", "")


# ---- GPU


def _gpu_pieces(trace: Trace) -> list[Piece]:
    sampled = sorted(
        (event.ts, event.end)
        for event in trace.events
        if event.cat == "gpu_user_annotation" and event.name == RANGE + "sample"
    )
    kernels = sorted((event for event in trace.events if event.cat in DEVICE_CATEGORIES), key=lambda event: event.ts)
    pieces: list[Piece] = []
    until = 0.0
    for event in kernels:
        start, end = max(event.ts, until), event.end
        if end <= start:
            continue
        part = part_of_kernel(event.name)
        if part == "other" and _is_inside(event, sampled):
            part = "sampling"  # an operation of torch that the sampler called
        pieces.append(Piece(start, end, part, event.name))
        until = end
    return pieces


def _is_inside(event: Event, intervals: list[Interval]) -> bool:
    index = bisect_right(intervals, (event.ts, float("inf"))) - 1
    return index >= 0 and event.end <= intervals[index][1]


# ---- CPU


def _cpu_pieces(trace: Trace) -> list[Piece]:
    threads = {event.tid for event in trace.events if event.name == EXECUTE}
    events = [event for event in trace.events if event.tid in threads and event.cat != "Trace"]
    events.sort(key=lambda event: (event.ts, -event.end))
    pieces: list[Piece] = []
    stack: list[tuple[float, Part, str, bool]] = []  # end, part, name, and whether it is one of our part ranges
    at = 0.0

    def close_until(time: float) -> None:
        nonlocal at
        while stack and stack[-1][0] <= time:
            end, part, name, _ = stack.pop()
            if end > at:
                pieces.append(Piece(at, end, part, name))
                at = end
        if stack and time > at:
            _, part, name, _ = stack[-1]
            pieces.append(Piece(at, time, part, name))
        at = max(at, time)

    for event in events:
        close_until(event.ts)
        if not stack and event.name != EXECUTE:
            continue  # outside a step
        end = min(event.end, stack[-1][0]) if stack else event.end
        if event.name == EXECUTE:
            stack.append((end, "unattributed", EXECUTE, False))
            continue
        _, part, name, is_range = stack[-1]
        own = part_of_range(event.name)
        if own is not None:
            stack.append((end, own, event.name.removeprefix(OPERATION).removeprefix(RANGE), True))
        elif not is_range and part != "gemm" and (of_torch := part_of_operation(event.name)) is not None:
            stack.append((end, of_torch, event.name, False))
        elif part == "unattributed" and event.cat == "cpu_op":
            stack.append((end, "other", event.name, False))
        else:
            stack.append((end, part, name, is_range))
    close_until(float("inf"))
    return pieces
