"""The figures of GPUs in a job's status and summary."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.hardware.gpu_monitor import ON_CPU, GpuMonitor, GpuUse
from headrace.hardware.nvml import GpuSample
from headrace.jobs.store.status_file import GpuStatus

GIB = 2**30


def gpu_statuses(gpus: GpuMonitor) -> list[GpuStatus]:
    """Each GPU that has been read: its figures now, if they are known, and those of the run so far."""
    now = {sample.index: sample for sample in gpus.now().gpus}
    return [_status(now.get(use.index), use) for use in gpus.use()]


def _status(now: GpuSample | None, use: GpuUse) -> GpuStatus:
    return GpuStatus(
        index=use.index,
        name=use.name,
        utilization=None if now is None else now.utilization,
        memory_bytes=None if now is None else now.memory_bytes,
        power_w=None if now is None else now.power_w,
        temperature_c=None if now is None else now.temperature_c,
        utilization_mean=use.utilization_mean,
        utilization_max=use.utilization_max,
        power_mean_w=use.power_mean_w,
        power_max_w=use.power_max_w,
        memory_peak_bytes=use.memory_peak_bytes,
        memory_total_bytes=use.memory_total_bytes,
        temperature_max_c=use.temperature_max_c,
    )


def progress_text(gpus: Sequence[GpuStatus], missing: str | None) -> str | None:
    """What the GPUs do now; None for a job on the CPU."""
    if missing is not None:
        return None if missing == ON_CPU else f"GPU: figures not available ({missing})"
    return ", ".join(_now_text(gpu, len(gpus) > 1) for gpu in gpus) or None


def _now_text(gpu: GpuStatus, has_index: bool) -> str:
    figures = [
        None if gpu.utilization is None else f"{gpu.utilization:.0%}",
        None if gpu.power_w is None else f"{gpu.power_w:,.0f} W",
        None if gpu.memory_bytes is None else f"{gpu.memory_bytes / GIB:,.1f} GiB",
        None if gpu.temperature_c is None else f"{gpu.temperature_c:.0f} °C",
    ]
    return f"GPU{f' {gpu.index}' if has_index else ''} {' '.join(filter(None, figures)) or 'reports nothing'}"


def summary_rows(gpus: Sequence[GpuStatus], missing: str | None) -> list[tuple[str, str]]:
    """A row for each GPU, or one that says why there are no figures."""
    if gpus:
        return [(f"GPU {gpu.index}" if len(gpus) > 1 else "GPU", _run_text(gpu)) for gpu in gpus]
    if missing is None:
        return []
    return [("GPU", f"none ({missing})" if missing == ON_CPU else f"figures not available ({missing})")]


def _run_text(gpu: GpuStatus) -> str:
    parts = []
    if gpu.utilization_mean is not None and gpu.utilization_max is not None:
        parts.append(f"{gpu.utilization_mean:.0%} busy on average, {gpu.utilization_max:.0%} at most")
    if gpu.power_mean_w is not None and gpu.power_max_w is not None:
        parts.append(f"{gpu.power_mean_w:,.0f} W on average, {gpu.power_max_w:,.0f} W at most")
    if gpu.memory_peak_bytes is not None:
        total = "" if gpu.memory_total_bytes is None else f" of {gpu.memory_total_bytes / GIB:,.1f}"
        parts.append(f"{gpu.memory_peak_bytes / GIB:,.1f}{total} GiB at peak")
    return " · ".join(parts) or "it reports no figures"
