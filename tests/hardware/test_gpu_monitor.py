"""The monitor of GPUs with readings by hand; on a real GPU with a load."""

from __future__ import annotations

from time import monotonic, sleep

import pytest

from headrace.hardware.gpu_monitor import MAX_AGE_S, ON_CPU, GpuMonitor
from headrace.hardware.nvml import NoTelemetry
from tests.hardware.readers import HandReader


def test_now_is_the_last_reading_and_use_covers_all() -> None:
    reader = HandReader()
    monitor = GpuMonitor(open=reader.open, clock=lambda: 3.0)
    for at, (utilization, power, memory) in enumerate([(0.5, 100.0, 8.0), (1.0, 300.0, 16.0), (0.75, 200.0, 4.0)]):
        reader.read(at=at, utilization=utilization, power_w=power, memory_bytes=memory, memory_total_bytes=32.0)
    found = monitor.now()
    assert (found.source, found.missing, found.gpus[0].power_w) == ("nvml", "", 200.0)
    (use,) = monitor.use()
    assert (use.utilization_mean, use.utilization_max) == (0.75, 1.0)
    assert (use.power_mean_w, use.power_max_w) == (200.0, 300.0)
    assert (use.memory_peak_bytes, use.memory_total_bytes) == (16.0, 32.0)
    assert use.temperature_max_c is None  # never reported, so not 0
    assert reader.interval_s >= 1.0


def test_gpus_are_kept_apart() -> None:
    reader = HandReader()
    monitor = GpuMonitor(open=reader.open, clock=lambda: 0.0)
    reader.read(0, power_w=10.0)
    reader.read(1, power_w=20.0)
    assert [(use.index, use.power_max_w) for use in monitor.use()] == [(0, 10.0), (1, 20.0)]
    assert [gpu.index for gpu in monitor.now().gpus] == [0, 1]


def test_an_old_reading_is_not_shown_as_now() -> None:
    reader, now = HandReader(), 0.0
    monitor = GpuMonitor(open=reader.open, clock=lambda: now)
    assert monitor.now().missing == "nvml: no reading yet"
    reader.read(power_w=10.0)
    assert monitor.now().gpus
    now = MAX_AGE_S + 1
    reader.failure = OSError("the driver was unloaded")
    found = monitor.now()
    assert not found.gpus
    assert found.missing == "nvml: no reading for more than 10 s (the driver was unloaded)"
    assert monitor.use()[0].power_max_w == 10.0


def test_without_a_gpu_the_reason_is_said() -> None:
    def refuses(take: object, interval_s: float) -> HandReader:
        raise NoTelemetry("NVML: Driver Not Loaded")

    with GpuMonitor(open=refuses) as monitor:
        assert (monitor.now().source, monitor.now().missing) == ("none", "NVML: Driver Not Loaded")
        assert monitor.use() == ()


def test_an_engine_on_the_cpu_has_no_gpu() -> None:
    assert GpuMonitor.of_device("cpu").now().missing == ON_CPU


def test_leaving_stops_the_reader() -> None:
    reader = HandReader()
    with GpuMonitor(open=reader.open):
        assert not reader.is_stopped
    assert reader.is_stopped


@pytest.mark.gpu
def test_a_busy_gpu_shows_its_use_memory_and_power() -> None:
    import torch

    matrix = torch.rand(8192, 8192, device="cuda", dtype=torch.bfloat16)
    with GpuMonitor(0.1) as monitor:
        deadline = monotonic() + 30
        while monotonic() < deadline:
            for _ in range(20):
                matrix @ matrix
            torch.cuda.synchronize()
            if any((use.utilization_max or 0) > 0.5 for use in monitor.use()):
                break
            sleep(0)
        found, uses = monitor.now(), monitor.use()
    assert found.missing == "" and found.source in ("nvml", "nvidia-smi")
    busiest = max(uses, key=lambda use: use.utilization_max or 0)
    assert 0.5 < (busiest.utilization_max or 0) <= 1
    assert busiest.memory_total_bytes and busiest.memory_peak_bytes
    assert 128 * 2**20 < busiest.memory_peak_bytes <= busiest.memory_total_bytes
    assert busiest.power_max_w is not None and 20 < busiest.power_max_w < 2000
    assert all(gpu.sm_clock_mhz is None or gpu.sm_clock_mhz > 100 for gpu in found.gpus)
