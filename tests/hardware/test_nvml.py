"""GPU telemetry with a fake NVML, a fake nvidia-smi, and without either."""

from __future__ import annotations

import sys
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.hardware import nvml
from headrace.hardware.nvml import GpuSample, GpuSampler, _of_gpu, is_visible, parse_smi
from headrace.hardware.sampler import integral, mean_and_max

SMI_LINE = "0, GPU-5f2c, NVIDIA H200, 97, 81234, 612.42, 58, 1785, 3201, 143771"


class FakeNvml(SimpleNamespace):
    """Two GPUs; each reading raises the power, and temperature is not supported."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2

    class NVMLError(Exception):
        pass

    def __init__(self, *, has_energy: bool = False, starts: bool = True) -> None:
        super().__init__(num_readings=0, is_shut_down=False)
        self._has_energy, self._starts = has_energy, starts

    def nvmlInit(self) -> None:
        if not self._starts:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlShutdown(self) -> None:
        self.is_shut_down = True

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return f"GPU-{handle}abc".encode()

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=50 if self.num_readings % 2 else 100, memory=1)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=1 << 30, total=4 << 30)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self.num_readings += 1
        return 1000 * self.num_readings

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return 1785 if kind == self.NVML_CLOCK_SM else 3201

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if not self._has_energy:
            raise self.NVMLError("Not Supported")
        return 5000 * self.num_readings


def sampled(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch, num_readings: int = 3) -> dict[str, Any]:
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    with GpuSampler(interval_s=0.001) as gpus:
        deadline = monotonic() + 30
        while fake.num_readings < 2 * num_readings and monotonic() < deadline:
            sleep(0.001)
    return gpus.summary()


@pytest.fixture(autouse=True)
def _all_gpus_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_nvml_gives_mean_and_max_of_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml()
    told = sampled(fake, monkeypatch)
    assert (told["available"], told["source"]) == (True, "nvml")
    first, second = told["gpus"]
    assert (first["index"], second["index"], first["name"]) == (0, 1, "NVIDIA H200")
    assert first["utilization"]["max"] == 1.0 and second["utilization"]["max"] == 0.5
    assert first["memory_bytes"] == {"mean": 2.0**30, "max": 2**30}
    assert first["power_w"]["max"] > first["power_w"]["mean"]
    assert first["sm_clock_mhz"]["max"] == 1785 and first["memory_clock_mhz"]["max"] == 3201
    assert first["temperature_c"] is None  # not supported by this GPU
    assert first["num_samples"] >= 3 and first["energy_j"] > 0
    assert fake.is_shut_down


def test_the_energy_counter_is_preferred_to_the_integral_of_power(monkeypatch: pytest.MonkeyPatch) -> None:
    told = sampled(FakeNvml(has_energy=True), monkeypatch)["gpus"][0]
    # Two GPUs are read in turn, so the counter of the first rises by 10 J from one of its readings to the next.
    assert told["energy_j"] == pytest.approx(10.0 * (told["num_samples"] - 1))


def test_only_visible_gpus_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu["index"] for gpu in sampled(FakeNvml(), monkeypatch, 1)["gpus"]] == [1]


@pytest.mark.parametrize(
    ("allowed", "is_seen"), [("0,2", True), ("1", False), ("", False), ("GPU-5f", True), ("GPU-9", False)]
)
def test_cuda_visible_devices_has_indices_or_uuids(
    allowed: str, is_seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    assert is_visible(0, "GPU-5f2c") == is_seen


def test_a_driver_that_is_not_loaded_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(starts=False))  # type: ignore[arg-type]
    with GpuSampler() as gpus:
        pass
    assert gpus.summary() == {"available": False, "reason": "not available: NVML: Driver Not Loaded"}


def test_without_package_and_driver_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with GpuSampler() as gpus:
        pass
    told = gpus.summary()
    assert not told["available"] and "nvidia-smi is not there" in told["reason"]


def fake_smi(directory: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")


def test_one_nvidia_smi_is_read_for_the_whole_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    body = f"""
[ "$1" = -L ] && {{ echo "GPU 0: NVIDIA H200 (UUID: GPU-5f2c)"; exit 0; }}
echo "$@" >> {tmp_path}/started
while :; do echo '{SMI_LINE}'; sleep 0.01; done"""
    fake_smi(tmp_path, body, monkeypatch)
    with GpuSampler(interval_s=0.01) as gpus:
        deadline = monotonic() + 30
        while len(gpus._samples) < 3 and monotonic() < deadline:
            sleep(0.005)
    told = gpus.summary()
    assert (told["source"], told["gpus"][0]["power_w"]["mean"]) == ("nvidia-smi", pytest.approx(612.42))
    assert told["gpus"][0]["memory_bytes"]["max"] == 81234 * 2**20
    assert told["gpus"][0]["energy_j"] > 0
    (started,) = (tmp_path / "started").read_text().splitlines()
    assert started.endswith("-lms 10")


def test_a_driver_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_smi(tmp_path, "echo 'NVIDIA-SMI has failed because it could not talk to the driver.'; exit 9", monkeypatch)
    told = GpuSampler().summary()
    assert not told["available"] and "could not talk to the driver" in told["reason"]


def test_what_a_gpu_does_not_report_is_missing() -> None:
    sample = parse_smi(SMI_LINE.replace("612.42", "[N/A]"), 1.5)
    assert sample is not None
    assert (sample.power_w, sample.utilization, sample.at) == (None, pytest.approx(0.97), 1.5)
    assert parse_smi("No devices were found", 0.0) is None


def test_a_window_leaves_out_what_is_before_and_after() -> None:
    gpus = GpuSampler.__new__(GpuSampler)
    gpus.interval_s, gpus._reader = 1.0, SimpleNamespace(source="nvml", failure=None, stop=lambda: None)
    gpus._samples = [GpuSample(float(at), 0, "GPU-1", "x", power_w=100.0 * at) for at in range(5)]
    (told,) = gpus.summary(1.0, 3.0)["gpus"]
    assert (told["num_samples"], told["seconds"], told["power_w"]) == (3, 2.0, {"mean": 200.0, "max": 300.0})
    assert told["energy_j"] == 100.0 * (1 + 2) / 2 + 100.0 * (2 + 3) / 2
    assert not gpus.summary(10.0)["available"]


def test_one_reading_has_no_energy() -> None:
    assert _of_gpu([GpuSample(0.0, 0, "GPU-1", "x", power_w=5.0)])["energy_j"] is None
    assert integral([(0.0, 1.0), (1.0, None), (2.0, 3.0)]) == 4.0
    assert mean_and_max([None]) is None


def test_names_of_columns_are_fields() -> None:
    assert set(nvml.STATISTICS) < set(GpuSample.__dataclass_fields__)
