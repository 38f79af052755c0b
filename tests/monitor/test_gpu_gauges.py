from __future__ import annotations

from headrace.hardware.gpu_monitor import GpuMonitor
from headrace.monitor import ServerMetrics
from tests.hardware.readers import HandReader
from tests.monitor.pages import page_of


def test_figures_are_on_the_page_with_the_index_of_the_gpu() -> None:
    reader = HandReader()
    metrics = ServerMetrics("m", gpus=GpuMonitor(open=reader.open, clock=lambda: 0.0))
    for index in (0, 1):
        reader.read(index, utilization=0.97, memory_bytes=3.0, memory_total_bytes=4.0, power_w=612.5 + index)
    reader.read(1, power_w=700.0, temperature_c=58.0, sm_clock_mhz=1785.0, memory_clock_mhz=3201.0)
    page = page_of(metrics)
    assert page.value("headrace:gpu_power_watts", gpu="0") == 612.5
    assert page.value("headrace:gpu_power_watts", gpu="1") == 700.0
    assert page.value("headrace:gpu_utilization", gpu="0") == 0.97
    assert page.value("headrace:gpu_memory_used_bytes", gpu="0") == 3.0
    assert page.value("headrace:gpu_memory_total_bytes", gpu="0") == 4.0
    assert page.value("headrace:gpu_temperature_celsius", gpu="1") == 58.0
    assert page.value("headrace:gpu_sm_clock_hertz") == 1.785e9
    assert page.value("headrace:gpu_memory_clock_hertz") == 3.201e9
    assert page.labels("headrace:gpu_info")[1].items() >= {"gpu": "1", "name": "NVIDIA H200", "uuid": "GPU-1"}.items()
    assert page.value("headrace:gpu_telemetry_info", source="nvml", missing="") == 1


def test_what_a_gpu_stops_reporting_leaves_the_page() -> None:
    reader, now = HandReader(), 0.0
    metrics = ServerMetrics("m", gpus=GpuMonitor(open=reader.open, clock=lambda: now))
    reader.read(utilization=0.5, power_w=300.0)
    assert page_of(metrics).value("headrace:gpu_power_watts") == 300.0
    reader.read(utilization=0.5)
    page = page_of(metrics)
    assert not page.labels("headrace:gpu_power_watts")
    assert page.value("headrace:gpu_utilization") == 0.5
    now = 60.0
    page = page_of(metrics)
    assert not page.labels("headrace:gpu_utilization") and not page.labels("headrace:gpu_info")
    assert "no reading" in page.labels("headrace:gpu_telemetry_info")[0]["missing"]


def test_without_a_gpu_no_figure_is_on_the_page_and_the_reason_is() -> None:
    page = page_of(ServerMetrics("m", gpus=GpuMonitor.of_device("cpu")))
    shown = {name for name in page.families if name.startswith("headrace:gpu_") and page.labels(name)}
    assert shown == {"headrace:gpu_telemetry_info"}
    (labels,) = page.labels("headrace:gpu_telemetry_info")
    assert (labels["source"], labels["missing"]) == ("none", "the engine runs on the CPU")
