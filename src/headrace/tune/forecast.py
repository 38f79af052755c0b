"""plan's prediction of a config's batch speed, where plan knows the model and the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.bench.workloads import Workload
from headrace.errors import HeadraceError
from headrace.plan import PlanSettings, find_shape, of_lengths, predict
from headrace.plan.gpus import Gpu, match_gpu
from headrace.plan.hostprobe import this_cpu
from headrace.tune.shortlist import Forecast, Predicted

USUAL_PROMPT_LEN = 48  # tokens of a chat message whose length only the engine knows
MAX_REQUESTS = 512  # that are simulated: the ranking of configs needs no more
NAMES = (
    "quantization",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_gpu_blocks_override",
)


def forecaster(
    model: str, workload: Workload, common: Mapping[str, Any], *, gpu_title: str | None, num_gpus: int
) -> Forecast | None:
    """None: plan does not know the model or the device."""
    try:
        shape = find_shape(model)
    except HeadraceError:
        return None
    device: Gpu | None = this_cpu() if gpu_title is None else match_gpu(gpu_title)
    if device is None:
        return None
    lengths = [(each.num_prompt_tokens or USUAL_PROMPT_LEN, each.output_len) for each in workload.requests]
    requests = of_lengths("tuned", lengths[:MAX_REQUESTS])

    def forecast(settings: Mapping[str, Any]) -> Predicted | None:
        given = {name: value for name, value in {**common, **settings}.items() if name in NAMES and value is not None}
        try:
            found = predict(shape, device, requests, PlanSettings(num_gpus=max(1, num_gpus), **given))
        except (HeadraceError, TypeError):
            return None
        if found.speed is None:
            return None
        value, share = found.speed.output_tokens_per_s, found.error.share
        return (
            Predicted(value, None, None)
            if share is None
            else Predicted(value, value / (1 + share), value * (1 + share))
        )

    return forecast
