"""Writes the figures of GPUs into the gauges of a metrics page. What a GPU does not report is left out, never 0."""

from __future__ import annotations

from threading import Lock

from headrace.hardware.gpu_monitor import GpuMonitor
from headrace.hardware.nvml import GpuSample
from headrace.monitor import table
from headrace.monitor.series import Series
from headrace.monitor.store import Labels, Store

MHZ = 1e6


class GpuGauges:
    """`update` may be called from any thread, before a scrape."""

    def __init__(self, store: Store, gpus: GpuMonitor) -> None:
        self._store = store
        self._gpus = gpus
        self._updating = Lock()
        self._shown: dict[Series, set[Labels]] = {}

    def update(self) -> None:
        with self._updating:
            found = self._gpus.now()
            values: dict[Series, dict[Labels, float]] = {series: {} for series in _SERIES}
            values[table.GPU_TELEMETRY_INFO][found.source, found.missing] = 1.0
            for sample in found.gpus:
                values[table.GPU_INFO][str(sample.index), sample.name, sample.uuid] = 1.0
                for series, value in _figures(sample).items():
                    if value is not None:
                        values[series][str(sample.index),] = value
            for series, by_labels in values.items():
                self._show(series, by_labels)

    def _show(self, series: Series, by_labels: dict[Labels, float]) -> None:
        if self._shown.get(series, set()) - by_labels.keys():  # rare, so that a concurrent scrape misses nothing
            self._store.clear(series)
        self._shown[series] = set(by_labels)
        for labels, value in by_labels.items():
            self._store.set(series, value, *labels)


def _figures(sample: GpuSample) -> dict[Series, float | None]:
    return {
        table.GPU_UTILIZATION: sample.utilization,
        table.GPU_MEMORY_USED: sample.memory_bytes,
        table.GPU_MEMORY_TOTAL: sample.memory_total_bytes,
        table.GPU_POWER: sample.power_w,
        table.GPU_TEMPERATURE: sample.temperature_c,
        table.GPU_SM_CLOCK: None if sample.sm_clock_mhz is None else sample.sm_clock_mhz * MHZ,
        table.GPU_MEMORY_CLOCK: None if sample.memory_clock_mhz is None else sample.memory_clock_mhz * MHZ,
    }


_SERIES = (
    *(table.GPU_TELEMETRY_INFO, table.GPU_INFO, table.GPU_UTILIZATION, table.GPU_MEMORY_USED, table.GPU_MEMORY_TOTAL),
    *(table.GPU_POWER, table.GPU_TEMPERATURE, table.GPU_SM_CLOCK, table.GPU_MEMORY_CLOCK),
)
