"""`GpuMonitor`: figures of the visible GPUs now and since the start, for metrics pages and the progress of jobs.

A thread of its own reads them every two seconds, never the engine's. Where there is nothing to read, `missing` says
why; an unknown figure is None, never 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from time import monotonic

from headrace.hardware.nvml import GpuReader, GpuSample, NoTelemetry, open_reader

INTERVAL_S = 2.0  # a reading takes 3 to 6 ms of CPU time
MAX_AGE_S = 10.0  # an older reading says nothing about now
NO_SOURCE = "none"
ON_CPU = "the engine runs on the CPU"

Open = Callable[[Callable[[GpuSample], None], float], GpuReader]


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """The last reading of each GPU, or why there is none."""

    gpus: tuple[GpuSample, ...] = ()
    source: str = NO_SOURCE  # nvml, nvidia-smi or none
    missing: str = ""  # empty if there are figures


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """One GPU since the monitor started. None: the GPU does not report it."""

    index: int
    name: str
    utilization_mean: float | None = None  # shares of time with a kernel running, 0 to 1
    utilization_max: float | None = None
    power_mean_w: float | None = None
    power_max_w: float | None = None
    memory_peak_bytes: float | None = None  # of all processes on the GPU
    memory_total_bytes: float | None = None
    temperature_max_c: float | None = None


class GpuMonitor:
    """Never raises. Its methods may be called from any thread; `stop` ends its thread, or its nvidia-smi."""

    def __init__(
        self,
        interval_s: float = INTERVAL_S,
        *,
        open: Open | None = open_reader,
        missing: str = "",
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Without `open` nothing is read, and `missing` is the reason."""
        self._clock = clock
        self._lock = Lock()
        self._last: dict[str, GpuSample] = {}  # by UUID, in the order of the driver
        self._totals: dict[str, _Totals] = {}
        self._missing = missing
        self._reader: GpuReader | None = None
        if open is None:
            return
        try:
            self._reader = open(self._take, interval_s)
        except NoTelemetry as error:
            self._missing = str(error)

    @classmethod
    def of_device(cls, device: str) -> GpuMonitor:
        """The monitor of an engine on `cuda` or `cpu`: the GPUs of a machine do not concern an engine on its CPU."""
        return cls() if device == "cuda" else cls(open=None, missing=ON_CPU)

    def stop(self) -> None:
        if self._reader is not None:
            self._reader.stop()

    def __enter__(self) -> GpuMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def now(self) -> GpuFigures:
        if self._reader is None:
            return GpuFigures(missing=self._missing)
        with self._lock:
            samples = tuple(self._last.values())
        recent = tuple(sample for sample in samples if self._clock() - sample.at <= MAX_AGE_S)
        if recent:
            return GpuFigures(recent, self._reader.source)
        failure = self._reader.failure
        reason = f" ({failure})" if failure else ""
        # No changing number here: the text is a label of metrics.
        when = f"no reading for more than {MAX_AGE_S:.0f} s" if samples else "no reading yet"
        return GpuFigures(source=self._reader.source, missing=f"{self._reader.source}: {when}{reason}")

    def use(self) -> tuple[GpuUse, ...]:
        with self._lock:
            return tuple(_use_of(self._last[uuid], totals) for uuid, totals in self._totals.items())

    def _take(self, sample: GpuSample) -> None:
        with self._lock:
            self._last[sample.uuid] = sample
            self._totals.setdefault(sample.uuid, _Totals()).add(sample)


@dataclass(slots=True)
class _Mean:
    """Sum, count and maximum: a job may run for days, so the readings are not kept."""

    total: float = 0.0
    count: int = 0
    max: float | None = None

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total += value
            self.count += 1
            self.max = value if self.max is None else max(self.max, value)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(slots=True)
class _Totals:
    utilization: _Mean = field(default_factory=_Mean)
    power: _Mean = field(default_factory=_Mean)
    memory: _Mean = field(default_factory=_Mean)
    temperature: _Mean = field(default_factory=_Mean)

    def add(self, sample: GpuSample) -> None:
        self.utilization.add(sample.utilization)
        self.power.add(sample.power_w)
        self.memory.add(sample.memory_bytes)
        self.temperature.add(sample.temperature_c)


def _use_of(last: GpuSample, totals: _Totals) -> GpuUse:
    return GpuUse(
        index=last.index,
        name=last.name,
        utilization_mean=totals.utilization.mean,
        utilization_max=totals.utilization.max,
        power_mean_w=totals.power.mean,
        power_max_w=totals.power.max,
        memory_peak_bytes=totals.memory.max,
        memory_total_bytes=last.memory_total_bytes,
        temperature_max_c=totals.temperature.max,
    )
