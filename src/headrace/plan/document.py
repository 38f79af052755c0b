"""The plan as a JSON document, for programs. docs/plan.md lists the fields."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from headrace.engine.settings import Settings
from headrace.plan.gpus import Gpu
from headrace.plan.memory import Memory
from headrace.plan.prediction import Prediction
from headrace.plan.shape import ModelShape
from headrace.plan.workload import Workload

SCHEMA = "headrace.plan/1"


def document(
    prediction: Prediction | None,
    *,
    formats: list[Prediction],
    compared: list[tuple[Gpu, Prediction | str]],
    ways_out: list[str],
    probe: dict[str, Any] | None,
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "plan": None if prediction is None else of_prediction(prediction),
        "ways_out": ways_out,
        "formats": [of_prediction(each) for each in formats],
        "compare": [
            {"gpu": gpu.name, "error": found} if isinstance(found, str) else of_prediction(found)
            for gpu, found in compared
        ],
        "probe": probe,
    }


def of_prediction(prediction: Prediction) -> dict[str, Any]:
    speed = prediction.speed
    return {
        "model": _of_model(prediction.model),
        "gpu": _of_gpu(prediction.gpu),
        "precision": {"weights": prediction.precision.weights, "cache": prediction.precision.cache},
        "workload": of_workload(prediction.workload),
        "layout": {
            "num_gpus": prediction.num_gpus,
            "replicas": prediction.layout.replicas,
            "tensor_parallel_size": prediction.layout.tensor,
            "pipeline_parallel_size": prediction.layout.pipeline,
            "enable_expert_parallel": prediction.layout.whole_experts,
            "reason": prediction.layout_reason,
        },
        "fits": prediction.fits,
        "problem": prediction.problem,
        "memory_per_gpu": _of_memory(prediction.memory),
        "capacity": _capacity(prediction),
        "settings": None if prediction.settings is None else _of_settings(prediction.settings),
        "speed": None if speed is None else asdict(speed),
        "cost": None
        if speed is None
        else {
            "per_million_output_tokens": prediction.cost_per_million(speed.output_tokens_per_s),
            "per_million_tokens": prediction.cost_per_million(speed.total_tokens_per_s),
        },
        "error": {"share": prediction.error.share, "text": prediction.error.text},
        "notes": list(prediction.notes),
    }


def _of_model(shape: ModelShape) -> dict[str, Any]:
    return {
        "name": shape.name,
        "num_params": shape.num_params,
        "active_params": shape.active_params,
        "max_model_len": shape.max_model_len,
        "runs_on_headrace": shape.why_not_run is None,
    }


def _of_gpu(gpu: Gpu) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "title": gpu.title,
        "memory_bytes": gpu.memory_bytes,
        "bandwidth_bytes_per_s": gpu.bandwidth,
        "price_per_hour": gpu.price,
        "is_price_assumed": gpu.price is not None and not gpu.is_price_given,
    }


def _of_memory(memory: Memory) -> dict[str, Any]:
    return {
        "total_bytes": memory.total,
        "allowed_bytes": memory.allowed,
        "weights_bytes": memory.weights,
        "streamed_bytes": memory.streamed.num_bytes,
        "activations_bytes": memory.activations,
        "cuda_graphs_bytes": memory.runtime,
        "recurrent_states_bytes": memory.states,
        "adapters_bytes": memory.adapters,
        "cache_bytes": memory.cache,
        "cache_bytes_per_token": memory.bytes_per_token,
        "missing_bytes": memory.shortfall,
    }


def _capacity(prediction: Prediction) -> dict[str, Any]:
    memory, replicas = prediction.memory, prediction.layout.replicas
    return {
        "cache_tokens": memory.cache_tokens * replicas,
        "longest_context": memory.longest_context,
        "max_model_len": memory.max_model_len,
        "sequences_of_workload": memory.concurrency(mean_len(prediction.workload)) * replicas,
        "sequences_of_max_model_len": memory.concurrency(memory.max_model_len) * replicas,
    }


def _of_settings(settings: Settings) -> dict[str, Any]:
    return {
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "num_blocks": settings.num_blocks,
        "block_size": settings.block_size,
    }


def of_workload(workload: Workload) -> dict[str, Any]:
    return {
        "name": workload.name,
        "requests": len(workload.requests),
        "mean_prompt_len": round(workload.mean_prompt_len, 1),
        "mean_output_len": round(workload.mean_output_len, 1),
        "concurrency": workload.concurrency,
    }


def mean_len(workload: Workload) -> float:
    return workload.mean_prompt_len + workload.mean_output_len
