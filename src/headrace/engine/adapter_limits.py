"""Chooses how many LoRA adapters the device has room for, and refuses what they do not go with. A part of `resolve`."""

from __future__ import annotations

from headrace.adapters import DEFAULT_MAX_LORAS, AdapterLimits
from headrace.config import EngineConfig
from headrace.engine.choices import Choices
from headrace.engine.precision import BYTES_OF
from headrace.errors import ConfigError
from headrace.models.adapter_spec import adapter_bytes, why_not_adapted
from headrace.models.spec import ModelSpec

MIB = 2**20


def choose_adapters(
    config: EngineConfig, spec: ModelSpec, *, num_ranks: int, on_gpu: bool, dtype: str, choices: Choices
) -> AdapterLimits | None:
    """None: the engine has none."""
    if not config.uses_adapters:
        if config.max_loras is not None:
            choices.warn(f"max_loras={config.max_loras} has no effect without enable_lora")
        return None
    _refuse_unsupported(config, spec, num_ranks=num_ranks, on_gpu=on_gpu)
    max_loras = config.max_loras or max(DEFAULT_MAX_LORAS, len(config.adapter_paths))
    limits = AdapterLimits(max_loras=max_loras, max_rank=config.max_lora_rank)
    size = adapter_bytes(spec, limits, BYTES_OF[dtype])
    given = "as set" if config.max_loras is not None else "adapters on the device at once"
    choices.note("max_loras", max_loras, f"{given}: {size / MIB:,.0f} MiB for ranks up to {limits.max_rank}")
    return limits


def _refuse_unsupported(config: EngineConfig, spec: ModelSpec, *, num_ranks: int, on_gpu: bool) -> None:
    if (reason := why_not_adapted(spec)) is not None:
        raise ConfigError(f"enable_lora: {reason}; leave it out, or merge the adapter into the model")
    if num_ranks > 1:
        raise ConfigError(
            f"enable_lora with tensor_parallel_size={config.tensor_parallel_size} and "
            f"pipeline_parallel_size={config.pipeline_parallel_size}: adapters are not divided over ranks "
            "yet; use one rank, with data_parallel_size for more engines, or merge the adapter into the model"
        )
    if on_gpu and config.cpu_offload_gb:
        raise ConfigError(
            "enable_lora is not supported with cpu_offload_gb: layers that stream from host memory have no place "
            "for adapters yet; leave one of them out, or merge the adapter into the model"
        )
