"""A profile's report: the mean step by part, each part against its ceiling; as a table and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headrace.profile.ceilings import PartCeiling, ceilings_of
from headrace.profile.parts import GAPS, TITLES, Part
from headrace.profile.timeline import Timeline, timeline_of
from headrace.profile.trace import ProfileRecord, StepLine, Trace

MAX_KERNELS = 12


@dataclass(frozen=True, slots=True)
class Row:
    """One part of the mean step."""

    part: Part
    ms_per_step: float
    share: float  # of the window
    ceiling_ms: float | None  # least time per step; None: not known for this part
    limit: str
    tflop_s: float | None
    gb_s: float | None

    @property
    def of_ceiling(self) -> float | None:
        """The part's speed as a share of its ceiling."""
        return None if self.ceiling_ms is None or not self.ms_per_step else self.ceiling_ms / self.ms_per_step


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    part: Part
    share: float


@dataclass(frozen=True, slots=True)
class Overhead:
    """What profiling cost: steps per second with and without it, in windows that follow one another."""

    steps_per_s_on: tuple[float, ...]
    steps_per_s_off: tuple[float, ...]

    @property
    def share(self) -> float | None:
        """How much longer a profiled step takes; below 0 within the noise of the windows."""
        on, off = _mean(self.steps_per_s_on), _mean(self.steps_per_s_off)
        return None if not on or not off else off / on - 1

    @property
    def is_noise(self) -> bool:
        """Whether windows with and without the profiler overlap, so that they do not differ for sure."""
        on, off = self.steps_per_s_on, self.steps_per_s_off
        return bool(on and off) and max(on) >= min(off)

    def text(self) -> str:
        if self.share is None:
            return "not measured: a window without steps"
        on, off = self.steps_per_s_on, self.steps_per_s_off
        noise = ", within the noise of the windows" if self.is_noise else ""
        return (
            f"a step takes {self.share:+.1%} with profiling{noise}: {_mean(on):.1f} steps/s with it ({_ranged(on)}), "
            f"{_mean(off):.1f} without ({_ranged(off)})"
        )


@dataclass(frozen=True)
class Report:
    rows: tuple[Row, ...]
    kernels: tuple[Kernel, ...]
    num_steps: int
    seconds: float  # the window as the device saw it
    busy_share: float
    host_ms_per_step: float | None  # of the engine's thread; it overlaps with the device
    wait_ms_per_step: float | None
    tokens_per_step: float | None
    seqs_per_step: float | None
    record: ProfileRecord | None
    timeline: Timeline = field(repr=False)
    overhead: Overhead | None = None
    commands: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def step_ms(self) -> float:
        return 1e3 * self.seconds / max(1, self.num_steps)

    def as_json(self) -> dict[str, Any]:
        record = self.record
        return {
            "num_steps": self.num_steps,
            "seconds": round(self.seconds, 6),
            "step_ms": round(self.step_ms, 4),
            "busy_share": round(self.busy_share, 4),
            "host_ms_per_step": _rounded(self.host_ms_per_step),
            "wait_ms_per_step": _rounded(self.wait_ms_per_step),
            "tokens_per_step": _rounded(self.tokens_per_step),
            "seqs_per_step": _rounded(self.seqs_per_step),
            "parts": {
                row.part: {
                    "ms_per_step": round(row.ms_per_step, 5),
                    "share": round(row.share, 5),
                    "ceiling_ms": _rounded(row.ceiling_ms, 5),
                    "of_ceiling": _rounded(row.of_ceiling),
                    "limit": row.limit or None,
                    "tflop_s": _rounded(row.tflop_s),
                    "gb_s": _rounded(row.gb_s),
                }
                for row in self.rows
            },
            "kernels": [
                {"name": kernel.name, "part": kernel.part, "share": round(kernel.share, 5)} for kernel in self.kernels
            ],
            "overhead": None
            if self.overhead is None
            else {
                "share": _rounded(self.overhead.share),
                "is_noise": self.overhead.is_noise,
                "steps_per_s_on": list(self.overhead.steps_per_s_on),
                "steps_per_s_off": list(self.overhead.steps_per_s_off),
            },
            "device": record and record.device_name,
            "ceilings": record
            and {
                "bandwidth_gb_s": record.ceilings.bandwidth and round(record.ceilings.bandwidth / 1e9, 1),
                "gemm_tflop_s": record.ceilings.gemm_rate and round(record.ceilings.gemm_rate / 1e12, 2),
                "note": record.ceilings.note,
            },
            "model": record and record.model_name,
            "settings": record and record.settings,
            "stopped_by": record and record.window.stopped_by,
            "versions": record and {"headrace": record.headrace_version, "torch": record.torch_version},
            "commands": self.commands,
            "notes": list(self.notes),
        }

    def table(self) -> str:
        """The report for a terminal."""
        lines = [*self._head(), ""]
        lines.append(f"{'part':<30}{'ms/step':>9}{'share':>8}{'ceiling':>10}{'of it':>7}  rate")
        for row in self.rows:
            ceiling = "" if row.ceiling_ms is None else f"{row.ceiling_ms:.3f}"
            share = "" if row.of_ceiling is None else f"{row.of_ceiling:.0%}"
            line = f"{TITLES[row.part]:<30}{row.ms_per_step:>9.3f}{row.share:>8.1%}{ceiling:>10}{share:>7}"
            lines.append(f"{line}  {_rate(row)}".rstrip())
        lines.append(f"{'step':<30}{self.step_ms:>9.3f}{1:>8.1%}")
        if self.kernels:
            lines += ["", "longest kernels and operations, share of the window:"]
            lines += [f"  {kernel.share:>6.1%}  {_short(kernel.name)} ({kernel.part})" for kernel in self.kernels]
        if self.overhead is not None:
            lines += ["", f"overhead: {self.overhead.text()}"]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines) + "\n"

    def _head(self) -> list[str]:
        record = self.record
        lines = []
        if record is not None:
            name = f"{record.model_name} on {record.device_name}".removeprefix(" on ")
            lines.append(name)
        window = f"{self.num_steps:,} steps in {self.seconds:.3f} s; device busy {self.busy_share:.1%}"
        if self.tokens_per_step is not None and self.seqs_per_step is not None:
            window += f"; per step {self.tokens_per_step:,.1f} tokens of {self.seqs_per_step:,.1f} sequences"
        lines.append(window)
        if self.host_ms_per_step is not None and self.wait_ms_per_step is not None:
            lines.append(
                f"engine's thread per step: {self.host_ms_per_step:.3f} ms of work beside the device, "
                f"{self.wait_ms_per_step:.3f} ms of waiting for it"
            )
        if record is not None and record.ceilings.bandwidth and record.ceilings.gemm_rate:
            lines.append(
                f"measured ceilings: {record.ceilings.bandwidth / 1e9:,.0f} GB/s, "
                f"GEMMs {record.ceilings.gemm_rate / 1e12:,.2f} TFLOP/s"
                + (f" ({record.ceilings.note})" if record.ceilings.note else "")
            )
        return lines


def report_of(
    record: ProfileRecord | None,
    trace: Trace,
    *,
    overhead: Overhead | None = None,
    commands: dict[str, str] | None = None,
    num_steps: int | None = None,
) -> Report:
    """Analyse a trace. Without a record there are no ceilings, and `num_steps` may be given."""
    steps = [] if record is None else record.steps
    timeline = timeline_of(trace, steps)
    computed = [step for step in steps if step.num_tokens]
    count = len(computed) or num_steps or 1
    seconds = timeline.span_us / 1e6
    by_part = timeline.us_by_part()
    ceilings = (
        {}
        if record is None
        else ceilings_of(computed, record.model, record.ceilings, splits_attention=trace.has_kernels)
    )
    rows = [_row(part, by_part[part] / 1e6, count, seconds, ceilings.get(part)) for part in TITLES if by_part.get(part)]
    if not any(row.part == "unattributed" for row in rows):
        rows.append(Row("unattributed", 0.0, 0.0, None, "", None, None))
        rows.sort(key=lambda row: list(TITLES).index(row.part))
    named = sorted(timeline.us_by_name().items(), key=lambda item: -item[1])
    kernels = [
        Kernel(name, part, us / timeline.span_us) for (part, name), us in named[:MAX_KERNELS] if part != "unattributed"
    ]
    return Report(
        rows=tuple(rows),
        kernels=tuple(kernels),
        num_steps=count if record is None else len(computed),
        seconds=seconds,
        busy_share=timeline.busy_us / timeline.span_us if timeline.span_us else 0.0,
        host_ms_per_step=_per_step(computed, "host_s", 1e3),
        wait_ms_per_step=_per_step(computed, "wait_s", 1e3),
        tokens_per_step=_per_step(computed, "num_tokens"),
        seqs_per_step=_per_step(computed, "num_seqs"),
        record=record,
        timeline=timeline,
        overhead=overhead,
        commands=commands or {} if record is None or record.device == "cuda" else {},
        notes=_notes(record, trace, timeline, num_steps),
    )


def _row(part: Part, seconds: float, count: int, span: float, ceiling: PartCeiling | None) -> Row:
    work = None if ceiling is None else ceiling.work
    return Row(
        part=part,
        ms_per_step=1e3 * seconds / count,
        share=seconds / span,
        ceiling_ms=None if ceiling is None or ceiling.seconds is None else 1e3 * ceiling.seconds / count,
        limit="" if ceiling is None else ceiling.limit,
        tflop_s=work.flops / seconds / 1e12 if work and work.flops else None,
        gb_s=work.num_bytes / seconds / 1e9 if work and work.num_bytes else None,
    )


def _notes(record: ProfileRecord | None, trace: Trace, timeline: Timeline, num_steps: int | None) -> tuple[str, ...]:
    notes = []
    if not timeline.pieces:
        notes.append("the trace has no step: the engine had no work in the window; send requests while it records")
    if record is None:
        notes.append("a trace without the record of an engine: no ceilings, and all long gaps count as host gaps")
        if num_steps is None:
            notes.append("the number of steps is not known, so the figures are of the whole window")
    elif record.window.stopped_by != "request":
        notes.append(f"the window ended at its limit ({record.window.stopped_by})")
    if record is not None and record.device != "cuda":
        notes.append("nsys and ncu record GPUs; there are no commands for this device")
    if not trace.has_kernels:
        notes.append(
            "on a CPU, attention of a step with prefills counts as prefill; unattributed is Python between operations"
        )
    return tuple(notes)


def _per_step(steps: list[StepLine], name: str, factor: float = 1.0) -> float | None:
    return factor * sum(getattr(step, name) for step in steps) / len(steps) if steps else None


def _rate(row: Row) -> str:
    if row.part in GAPS or row.ceiling_ms is None:
        return ""
    if row.limit == "GEMM rate" and row.tflop_s is not None:
        return f"{row.tflop_s:,.2f} TFLOP/s"
    return "" if row.gb_s is None else f"{row.gb_s:,.1f} GB/s"


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values) if values else 0.0


def _ranged(values: tuple[float, ...]) -> str:
    if len(values) == 1:
        return "one window"
    return f"{len(values)} windows, {min(values):.1f} to {max(values):.1f}"


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)


def _short(name: str) -> str:
    name = name.split("(", maxsplit=1)[0]
    return name if len(name) <= 72 else name[:71] + "…"
