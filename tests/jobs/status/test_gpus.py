from __future__ import annotations

from dataclasses import replace

from headrace.hardware.gpu_monitor import ON_CPU, GpuMonitor
from headrace.jobs.status.gpus import gpu_statuses, progress_text, summary_rows
from headrace.jobs.store.status_file import GpuStatus
from tests.hardware.readers import HandReader

GIB = 2**30
H200 = GpuStatus(
    index=0,
    name="NVIDIA H200",
    utilization=0.97,
    memory_bytes=80 * GIB,
    power_w=612.4,
    temperature_c=58.0,
    utilization_mean=0.9,
    utilization_max=1.0,
    power_mean_w=600.0,
    power_max_w=690.0,
    memory_peak_bytes=81.5 * GIB,
    memory_total_bytes=140 * GIB,
)


def test_a_status_has_the_figures_of_now_and_of_the_run() -> None:
    reader, now = HandReader(), 0.0
    monitor = GpuMonitor(open=reader.open, clock=lambda: now)
    assert gpu_statuses(monitor) == []
    reader.read(utilization=1.0, power_w=500.0, memory_bytes=2.0)
    reader.read(utilization=0.5, power_w=300.0, memory_bytes=1.0)
    (status,) = gpu_statuses(monitor)
    assert (status.utilization, status.utilization_mean, status.utilization_max) == (0.5, 0.75, 1.0)
    assert (status.power_w, status.power_mean_w, status.power_max_w) == (300.0, 400.0, 500.0)
    assert (status.memory_bytes, status.memory_peak_bytes) == (1.0, 2.0)
    now = 60.0  # no reading since
    (status,) = gpu_statuses(monitor)
    assert (status.utilization, status.utilization_max) == (None, 1.0)


def test_the_progress_shows_what_is_reported() -> None:
    assert progress_text([H200], None) == "GPU 97% 612 W 80.0 GiB 58 °C"
    two = [GpuStatus(index=0, name="x", power_w=100.0), GpuStatus(index=1, name="x")]
    assert progress_text(two, None) == "GPU 0 100 W, GPU 1 reports nothing"
    assert progress_text([], ON_CPU) is None
    assert progress_text([], "NVML: Driver Not Loaded") == "GPU: figures not available (NVML: Driver Not Loaded)"


def test_the_summary_has_mean_and_highest_values_or_the_reason() -> None:
    assert summary_rows([H200], None) == [
        (
            "GPU",
            "90% busy on average, 100% at most · 600 W on average, 690 W at most · 81.5 of 140.0 GiB at peak",
        )
    ]
    assert [name for name, _ in summary_rows([H200, replace(H200, index=1)], None)] == ["GPU 0", "GPU 1"]
    assert summary_rows([GpuStatus(index=0, name="x")], None) == [("GPU", "it reports no figures")]
    assert summary_rows([], ON_CPU) == [("GPU", "none (the engine runs on the CPU)")]
    assert summary_rows([], "NVML: x") == [("GPU", "figures not available (NVML: x)")]
