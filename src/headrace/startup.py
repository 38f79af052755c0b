"""The stages of an engine's start: timed where they happen, reported to whoever shows them. No torch.

    CPU   download ─▶ import ─▶ load ─▶ compile
    GPU   download ─▶ import ─▶ device ─▶ load ─▶ profile ─▶ compile ─▶ capture
          only if a model is not cached

With tensor_parallel_size above 1, `ranks` is before load. The stages are those of rank 0.

An engine in its own process sends its stages to its front. `engine/startup_display.py` shows them. Within the stages,
`mark` notes when something ended, for `benchmarks/first_start.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter, time
from typing import Literal, NamedTuple, Protocol

StageName = Literal["download", "import", "device", "ranks", "load", "profile", "compile", "capture"]

MIN_INTERVAL_S = 0.1  # between two reports of the progress of a stage
_MAX_MARKS = 1000  # that are kept; a start has fewer

# While a stage runs, and when it is done. {} is what is counted.
_TEXTS: dict[StageName, tuple[str, str]] = {
    "download": ("downloading the model", "downloaded the model"),
    "import": ("importing torch", "imported torch"),
    "device": ("initializing the GPU", "initialized the GPU"),
    "ranks": ("starting the other ranks", "started the other ranks"),
    "load": ("loading weights", "loaded weights"),
    "profile": ("measuring the largest step", "measured the largest step"),
    "compile": ("preparing kernels", "prepared kernels"),
    "capture": ("capturing CUDA graphs", "captured CUDA graphs"),
}
_COUNTED_IN_BYTES = ("download", "load")


@dataclass(frozen=True, slots=True)
class StartupStage:
    """One stage at one moment. Its text is a line for people."""

    name: StageName
    done: int = 0  # bytes, kernels or graphs
    total: int = 0  # 0: it cannot be counted
    seconds: float | None = None  # how long it took; None: it still runs

    @property
    def is_finished(self) -> bool:
        return self.seconds is not None

    def __str__(self) -> str:
        running, finished = _TEXTS[self.name]
        if self.seconds is None:
            return f"{running} ...{self._progress()}"
        return f"{finished}{self._amount()} in {self.seconds:.1f} s"

    def _progress(self) -> str:
        if not self.total:
            return ""
        return f" {self._count(self.done)} of {self._count(self.total)} ({self.done / self.total:.0%})"

    def _amount(self) -> str:
        return f" ({self._count(self.done)})" if self.done else ""

    def _count(self, count: int) -> str:
        return f"{count / 2**30:.2f} GiB" if self.name in _COUNTED_IN_BYTES else f"{count:,}"


Report = Callable[[StartupStage], None]


class OnStage(Protocol):
    """Called by what is slow at a start: which stage it is at, and how far it is."""

    def __call__(self, name: StageName, done: int = 0, total: int = 0) -> None: ...


def ignore_stage(name: StageName, done: int = 0, total: int = 0) -> None:
    """For starts that nobody watches."""


class StartupStages:
    """Times the stages of one start (an `OnStage`): a stage ends when the next one begins, or with `end`. Reports when
    a stage begins and ends, and its progress at most every `MIN_INTERVAL_S`. Owned by the thread that starts."""

    def __init__(self, report: Report, clock: Callable[[], float] = perf_counter) -> None:
        self._report = report
        self._clock = clock
        self._current: StartupStage | None = None
        self._began_at = 0.0
        self._reported_at = 0.0
        self._finished: list[StartupStage] = []

    @property
    def finished(self) -> tuple[StartupStage, ...]:
        return tuple(self._finished)

    def __call__(self, name: StageName, done: int = 0, total: int = 0) -> None:
        now, is_new = self._clock(), self._current is None or self._current.name != name
        if is_new:
            self.end()
            self._began_at = now
        self._current = StartupStage(name, done, total)
        if is_new or now - self._reported_at >= MIN_INTERVAL_S:
            self._reported_at = now
            self._report(self._current)

    def end(self) -> None:
        if self._current is None:
            return
        now, last, self._current = self._clock(), self._current, None
        self.add(StartupStage(last.name, last.done, last.total, now - self._began_at))

    def add(self, stage: StartupStage) -> None:
        """Report a stage that was timed elsewhere: in the engine's process."""
        if stage.is_finished:
            self._finished.append(stage)
        self._report(stage)


def ready_line(seconds: float, stages: Iterable[StartupStage]) -> str:
    """Such as: ready in 4.6 s (import 2.0 s, load 1.3 s, compile 0.4 s)."""
    parts = stage_seconds_text(stages)
    return f"ready in {seconds:.1f} s" + (f" ({parts})" if parts else "")


def stage_seconds_text(stages: Iterable[StartupStage]) -> str:
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in stage_seconds(stages).items())


def stage_seconds(stages: Iterable[StartupStage]) -> dict[str, float]:
    """How long each stage took, in the order in which they ended."""
    found: dict[str, float] = {}
    for stage in stages:
        found[stage.name] = round(found.get(stage.name, 0.0) + (stage.seconds or 0.0), 3)
    return found


class Mark(NamedTuple):
    """Something that a start has done."""

    name: str
    at: float  # `time.time`, which all processes share


_marks: deque[Mark] = deque(maxlen=_MAX_MARKS)  # of this process, and of what it started for its start


def mark(name: str, at: float | None = None) -> None:
    """Note that something has ended, now or `at` this time. Any thread may."""
    _marks.append(Mark(name, time() if at is None else at))


def marks() -> list[Mark]:
    """What was marked in this process, by time."""
    return sorted(_marks, key=lambda each: each.at)
