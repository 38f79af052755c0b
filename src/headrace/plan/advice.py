"""What else would work: formats with fewer bits, more GPUs, weights in host memory, other GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from headrace.errors import ConfigError
from headrace.plan.gpus import GIB, GPUS, Gpu
from headrace.plan.layout import Layout
from headrace.plan.prediction import Prediction, predict, smallest_layout
from headrace.plan.settings import PlanSettings
from headrace.plan.shape import ModelShape
from headrace.plan.workload import Workload

FORMATS: tuple[tuple[str | None, str], ...] = ((None, "auto"), ("fp8", "auto"), ("fp8", "fp8"), ("int4", "auto"))
_COUNTS = (1, 2, 4, 8, 16)


def in_other_formats(
    shape: ModelShape, gpu: Gpu, workload: Workload, settings: PlanSettings, *, layout: Layout | None = None
) -> list[Prediction]:
    """The same plan in 16 bits, FP8, FP8 with an FP8 cache and INT4, as far as the device computes in them. A `layout`
    that is given is kept, so that only the format differs."""
    if layout is not None:
        settings = replace(settings, tensor_parallel_size=layout.tensor, pipeline_parallel_size=layout.pipeline)
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
        *_by_offload(prediction, settings),
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
                f"{each.memory.cache_tokens * each.layout.replicas:,} tokens of cache"
            )


def _by_offload(prediction: Prediction, settings: PlanSettings) -> Iterator[str]:
    """Weights in host memory, as many as make room for the longest request."""
    memory, workload = prediction.memory, prediction.workload
    if prediction.gpu.is_cpu or settings.cpu_offload_gb or memory.fits:
        return
    wanted = math.ceil((memory.shortfall + workload.max_len * memory.bytes_per_token) / GIB)
    found = predict(prediction.model, prediction.gpu, workload, replace(settings, cpu_offload_gb=wanted))
    if found.speed is not None:
        rate = found.speed.output_tokens_per_s
        streamed = found.memory.streamed.num_bytes / GIB
        yield f"--cpu-offload-gb {wanted}: every step copies {streamed:,.1f} GiB of weights, {rate:,.0f} tokens/s out"


def _by_count(prediction: Prediction, settings: PlanSettings) -> Iterator[str]:
    if prediction.gpu.is_cpu:
        return
    for count in _COUNTS:
        if count > settings.num_gpus and settings.tensor_parallel_size is None:
            layout = _try(prediction, prediction.gpu, replace(settings, num_gpus=count))
            if layout is not None:
                yield f"{count} x {prediction.gpu.name}: {layout.label} (predicted; several GPUs were not measured)"
                return


def _by_other_gpu(prediction: Prediction, settings: PlanSettings) -> Iterator[str]:
    """Larger GPUs: as many as asked for, or else the fewest that are enough."""
    larger = sorted(
        (gpu for gpu in GPUS if gpu.memory_bytes > prediction.gpu.memory_bytes or prediction.gpu.is_cpu),
        key=lambda gpu: gpu.memory_bytes,
    )
    found = []
    for gpu in larger:
        for count in (settings.num_gpus, *(each for each in _COUNTS if each > settings.num_gpus)):
            if _try(prediction, gpu, replace(settings, num_gpus=count)) is not None:
                found.append((count, f"{count} x {gpu.name}"))
                break
    if found:
        fewest = min(count for count, _ in found)
        yield "another GPU: " + ", ".join(text for count, text in found if count == fewest)


def _try(prediction: Prediction, gpu: Gpu, settings: PlanSettings) -> Layout | None:
    try:
        return smallest_layout(prediction.model, gpu, prediction.workload, settings)
    except ConfigError:  # a format that this GPU does not compute in, or heads that do not divide
        return None
