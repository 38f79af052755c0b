"""What else would work: formats with fewer bits, more GPUs, other GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from headrace.errors import ConfigError
from headrace.plan.gpus import GPUS, Gpu
from headrace.plan.prediction import Prediction, predict
from headrace.plan.settings import PlanSettings
from headrace.plan.shape import ModelShape
from headrace.plan.workload import Workload

FORMATS: tuple[tuple[str | None, str], ...] = ((None, "auto"), ("fp8", "auto"), ("fp8", "fp8"), ("int4", "auto"))
_COUNTS = (1, 2, 4, 8, 16)


def in_other_formats(shape: ModelShape, gpu: Gpu, workload: Workload, settings: PlanSettings) -> list[Prediction]:
    """The same plan in 16 bits, FP8, FP8 with an FP8 cache and INT4, as far as the device computes in them."""
    found = []
    for quantization, cache in FORMATS:
        try:
            wanted = replace(settings, quantization=quantization, kv_cache_dtype=cache)
            found.append(predict(shape, gpu, workload, wanted))
        except ConfigError:  # no such tensor cores
            continue
    return found


def compare(
    shape: ModelShape, gpus: list[Gpu], workload: Workload, settings: PlanSettings
) -> list[tuple[Gpu, Prediction | str]]:
    """The same plan on several devices; the text of the error for those that cannot be planned."""
    rows: list[tuple[Gpu, Prediction | str]] = []
    for gpu in gpus:
        try:
            rows.append((gpu, predict(shape, gpu, workload, settings)))
        except ConfigError as error:
            rows.append((gpu, str(error)))
    return rows


def ways_out(prediction: Prediction, settings: PlanSettings) -> list[str]:
    """What makes a plan fit that does not, cheapest change first."""
    memory = prediction.memory
    if memory.fits and prediction.workload.max_len > memory.max_model_len:
        return ["shorten the requests, or take a model with a longer context"]
    ways = [
        *_by_format(prediction, settings),
        *_by_count(prediction, settings),
        *_by_other_gpu(prediction, settings),
    ]
    return ways or ["no format, number or kind of GPU in the table is enough"]


def _by_format(prediction: Prediction, settings: PlanSettings) -> Iterator[str]:
    if prediction.precision.is_quantized and prediction.precision.cache == "fp8":
        return
    for each in in_other_formats(prediction.model, prediction.gpu, prediction.workload, settings):
        if each.fits:
            yield (
                f"{each.precision.label}: weights of {each.memory.weights / 2**30:,.1f} GiB leave room for "
                f"{each.memory.cache_tokens:,} tokens of cache"
                + (" (not in Headrace yet)" if each.precision.weights == "int4" else "")
            )


def _by_count(prediction: Prediction, settings: PlanSettings) -> Iterator[str]:
    if prediction.gpu.is_cpu:
        return
    for count in _COUNTS:
        if count > settings.num_gpus and settings.tensor_parallel_size is None:
            each = _try(prediction, prediction.gpu, replace(settings, num_gpus=count))
            if each is not None:
                yield f"{count} x {prediction.gpu.name}: {each.layout.label} (not in Headrace yet)"
                return


def _by_other_gpu(prediction: Prediction, settings: PlanSettings) -> Iterator[str]:
    larger = sorted(
        (gpu for gpu in GPUS if gpu.memory_bytes > prediction.gpu.memory_bytes or prediction.gpu.is_cpu),
        key=lambda gpu: gpu.memory_bytes,
    )
    fitting = [gpu for gpu in larger if _try(prediction, gpu, settings) is not None]
    if fitting:
        count = f"{settings.num_gpus} x " if settings.num_gpus > 1 else "one "
        yield "another GPU: " + ", ".join(f"{count}{gpu.name}" for gpu in fitting)


def _try(prediction: Prediction, gpu: Gpu, settings: PlanSettings) -> Prediction | None:
    try:
        found = predict(prediction.model, gpu, prediction.workload, settings)
    except ConfigError:
        return None
    return found if found.fits else None
