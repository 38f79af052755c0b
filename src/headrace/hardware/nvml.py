"""GPU utilisation, memory, power, temperature and clocks during a run, with mean, maximum and energy.

From NVML through the optional package nvidia-ml-py; without it, from one `nvidia-smi` process that prints at an
interval; without a driver, the summary says why there is nothing. Imports no torch and allocates no GPU memory.
"""

from __future__ import annotations

import csv
import importlib
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from headrace.hardware.sampler import Sampler, in_window, integral, mean_and_max, unavailable

INTERVAL_S = 0.2
STOP_S = 5.0
MIB = 2**20

# Columns of nvidia-smi, and the fields of GpuSample that they fill.
_COLUMNS = {
    "index": None,
    "uuid": None,
    "name": None,
    "utilization.gpu": "utilization",
    "memory.used": "memory_bytes",
    "power.draw": "power_w",
    "temperature.gpu": "temperature_c",
    "clocks.sm": "sm_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "memory.total": "memory_total_bytes",
}
_SCALE = {"utilization": 0.01, "memory_bytes": float(MIB), "memory_total_bytes": float(MIB)}
_CONSTANT = "memory_total_bytes"  # needs no statistics
STATISTICS = tuple(field for field in _COLUMNS.values() if field is not None and field != _CONSTANT)


class NoTelemetry(Exception):
    """There is no GPU to read, or no way to read it; the message says why."""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One reading of one GPU. None: the GPU does not report it."""

    at: float  # `time.monotonic`
    index: int
    uuid: str
    name: str
    utilization: float | None = None  # share of time with a kernel running, 0 to 1
    memory_bytes: float | None = None  # used, by all processes
    memory_total_bytes: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    energy_j: float | None = None  # counter since the driver was loaded


class GpuReader(Protocol):
    """Passes on readings until `stop`."""

    @property
    def source(self) -> str: ...
    @property
    def failure(self) -> Exception | None: ...
    def stop(self) -> None: ...


class GpuSampler:
    """Reads all visible GPUs until `stop`. Never raises: `summary` says what is missing.

    >>> with GpuSampler() as gpus:
    ...     run()
    >>> gpus.summary()
    """

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self.interval_s = interval_s
        self._samples: list[GpuSample] = []
        self._reason = ""
        self._reader: GpuReader | None = None
        try:
            self._reader = open_reader(self._samples.append, interval_s)
        except NoTelemetry as error:
            self._reason = str(error)

    def stop(self) -> None:
        if self._reader is not None:
            self._reader.stop()

    def __enter__(self) -> GpuSampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def summary(self, start: float | None = None, end: float | None = None) -> dict[str, Any]:
        """Statistics of each GPU, of the whole time or between two times of `time.monotonic`."""
        if self._reader is None:
            return unavailable(self._reason)
        samples = [sample for sample in list(self._samples) if in_window(sample.at, start, end)]
        if not samples:
            failure = self._reader.failure
            return unavailable(f"{self._reader.source} gave no reading" + (f" ({failure})" if failure else ""))
        return {
            "available": True,
            "source": self._reader.source,
            "interval_s": self.interval_s,
            "gpus": [
                _of_gpu([s for s in samples if s.uuid == uuid]) for uuid in dict.fromkeys(s.uuid for s in samples)
            ],
        }


def _of_gpu(samples: list[GpuSample]) -> dict[str, Any]:
    first, last = samples[0], samples[-1]
    if first.energy_j is not None and last.energy_j is not None and last is not first:
        energy: float | None = last.energy_j - first.energy_j
    else:
        energy = integral((sample.at, sample.power_w) for sample in samples)
    return {
        "index": first.index,
        "name": first.name,
        "num_samples": len(samples),
        "seconds": last.at - first.at,
        **{field: mean_and_max(getattr(sample, field) for sample in samples) for field in STATISTICS},
        "energy_j": energy,
    }


def open_reader(take: Callable[[GpuSample], None], interval_s: float) -> GpuReader:
    """Read at once and then every `interval_s`, on a thread. Raises NoTelemetry."""
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        return _SmiReader(take, interval_s)
    return _NvmlReader(pynvml, take, interval_s)


# ---- NVML


class _NvmlReader:
    """Polls NVML on a thread."""

    source = "nvml"

    def __init__(self, pynvml: Any, take: Callable[[GpuSample], None], interval_s: float) -> None:
        self._nvml, self._take = pynvml, take
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NoTelemetry(f"NVML: {error}") from error
        self._gpus = [gpu for gpu in self._all() if is_visible(gpu[1], gpu[2])]
        if not self._gpus:
            pynvml.nvmlShutdown()
            raise NoTelemetry("NVML lists no GPU that CUDA_VISIBLE_DEVICES allows")
        self._sampler = Sampler(self._read, interval_s, "nvml")

    @property
    def failure(self) -> Exception | None:
        return self._sampler.failure

    def _all(self) -> Iterator[tuple[Any, int, str, str]]:
        nvml = self._nvml
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            yield handle, index, _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))

    def _read(self) -> None:
        nvml = self._nvml
        for handle, index, uuid, name in self._gpus:
            ask = _Question(nvml, handle)
            self._take(
                GpuSample(
                    monotonic(),
                    index,
                    uuid,
                    name,
                    utilization=ask(nvml.nvmlDeviceGetUtilizationRates, lambda rates: rates.gpu / 100),
                    memory_bytes=ask(nvml.nvmlDeviceGetMemoryInfo, lambda memory: memory.used),
                    memory_total_bytes=ask(nvml.nvmlDeviceGetMemoryInfo, lambda memory: memory.total),
                    power_w=ask(nvml.nvmlDeviceGetPowerUsage, lambda milliwatts: milliwatts / 1e3),
                    temperature_c=ask(nvml.nvmlDeviceGetTemperature, float, nvml.NVML_TEMPERATURE_GPU),
                    sm_clock_mhz=ask(nvml.nvmlDeviceGetClockInfo, float, nvml.NVML_CLOCK_SM),
                    memory_clock_mhz=ask(nvml.nvmlDeviceGetClockInfo, float, nvml.NVML_CLOCK_MEM),
                    energy_j=ask(nvml.nvmlDeviceGetTotalEnergyConsumption, lambda millijoules: millijoules / 1e3),
                )
            )

    def stop(self) -> None:
        self._sampler.stop()
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


@dataclass(frozen=True, slots=True)
class _Question:
    """Asks NVML about one GPU. What this GPU does not support is None."""

    nvml: Any
    handle: Any

    def __call__(self, function: Any, convert: Callable[[Any], float], *arguments: Any) -> float | None:
        try:
            return convert(function(self.handle, *arguments))
        except self.nvml.NVMLError:
            return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # older versions of the package return bytes


# ---- nvidia-smi


class _SmiReader:
    """One `nvidia-smi` that prints a line per GPU and interval, read on a thread. It ends with the pipe."""

    source = "nvidia-smi"

    def __init__(self, take: Callable[[GpuSample], None], interval_s: float) -> None:
        self._take = take
        self.failure: Exception | None = None
        if shutil.which("nvidia-smi") is None:
            raise NoTelemetry("no NVIDIA driver (nvidia-smi is not there)")
        _check_driver()
        command = ["nvidia-smi", f"--query-gpu={','.join(_COLUMNS)}", "--format=csv,noheader,nounits"]
        self._process = subprocess.Popen(
            [*command, "-lms", str(max(1, round(1e3 * interval_s)))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which then stops it
        )
        self._thread = threading.Thread(target=self._run, name="nvidia-smi", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            sample = parse_smi(line, monotonic())
            if sample is not None and is_visible(sample.index, sample.uuid):
                self._take(sample)

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join(STOP_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


def _check_driver() -> None:
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoTelemetry(f"nvidia-smi: {error}") from error
    if found.returncode != 0 or "GPU" not in found.stdout:
        said = " ".join((found.stderr or found.stdout).split())[:200]
        raise NoTelemetry(f"nvidia-smi: {said or 'it lists no GPU'}")


def parse_smi(line: str, at: float) -> GpuSample | None:
    """A line of nvidia-smi's CSV. What a GPU does not report reads like [N/A]; other lines are None."""
    cells = [cell.strip() for cell in next(csv.reader([line]), [])]
    if len(cells) != len(_COLUMNS) or not cells[0].isdecimal():
        return None
    values = {}
    for field, cell in zip(_COLUMNS.values(), cells, strict=True):
        if field is not None:
            with suppress(ValueError):
                values[field] = float(cell) * _SCALE.get(field, 1.0)
    return GpuSample(at, int(cells[0]), cells[1], cells[2], **values)


def is_visible(index: int, uuid: str) -> bool:
    """Whether CUDA_VISIBLE_DEVICES, a list of indices or of UUID prefixes, allows a GPU."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return True
    names = [name.strip() for name in allowed.split(",") if name.strip()]
    return any(name == str(index) or (not name.isdecimal() and uuid.startswith(name)) for name in names)
