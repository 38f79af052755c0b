"""Lists every setting of a running engine with its source and reason, for records of benchmarks, the summaries of jobs
and the server. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from headrace.config import EngineConfig
from headrace.engine.memory_budget import CPU_MEMORY_SHARE, GPU_MEMORY_SHARE
from headrace.engine.settings import SettingInForce, Settings, Source
from headrace.models.spec import ModelSpec

# Names of config fields that Settings has under another name.
_FIELD_OF = {"kv_cache_dtype": "kv_dtype", "scheduling_policy": "queue_policy"}
_UNDECIDED = (None, "auto")
_AS_SET = "as set"


def settings_in_force(settings: Settings, config: EngineConfig, given: Iterable[str] = ()) -> dict[str, SettingInForce]:
    """Every field of the config, then what `resolve` adds. A value that is not the default was given; so were those
    named in `given`, which may be equal to the default."""
    named = set(given)
    found = {
        field.name: _of_field(
            field.name, settings, config, is_given=field.name in named or getattr(config, field.name) != field.default
        )
        for field in fields(EngineConfig)
    }
    return found | _derived(settings)


def _of_field(name: str, settings: Settings, config: EngineConfig, *, is_given: bool) -> SettingInForce:
    asked = getattr(config, name)
    value = getattr(settings, _FIELD_OF.get(name, name), asked)
    if is_given and asked not in _UNDECIDED:
        return SettingInForce(value, "given")
    if name == "gpu_memory_utilization":
        return _memory_share(settings, config)
    reason = {choice.name: choice.reason for choice in settings.choices}.get(name)
    if reason is None and name == "kv_cache_dtype":
        reason = "the same as dtype"
    if reason is None:
        return SettingInForce(value, "default")
    return SettingInForce(value, "automatic", reason)


def _memory_share(settings: Settings, config: EngineConfig) -> SettingInForce:
    if config.num_gpu_blocks_override is not None or config.kv_cache_memory_bytes is not None:
        return SettingInForce(None, "default", "not used: the size of the KV cache is set")
    if settings.device == "cuda":
        return SettingInForce(GPU_MEMORY_SHARE, "automatic", "of the GPU's memory")
    return SettingInForce(CPU_MEMORY_SHARE, "automatic", "of the free memory")


def memory_share(settings: Settings, config: EngineConfig) -> float | None:
    """The gpu_memory_utilization that decided the size of the KV cache; None where that size is set."""
    found = _memory_share(settings, config).value
    return found if found is None or config.gpu_memory_utilization is None else config.gpu_memory_utilization


def _derived(settings: Settings) -> dict[str, SettingInForce]:
    """Values that are no fields of the config."""
    why_state = "layers of the model have a state per slot, so prefixes are not cached"
    state = {"has_recurrent_state": SettingInForce(True, "automatic", why_state)}
    sized = next((choice.reason for choice in settings.choices if choice.name == "num_blocks"), "")
    source: Source = "given" if sized.startswith(_AS_SET) else "automatic"
    return {
        "num_blocks": SettingInForce(settings.num_blocks, source, sized),
        "kv_cache_size_tokens": SettingInForce(settings.kv_cache_size_tokens, "automatic", "num_blocks x block_size"),
        "full_step_tokens": SettingInForce(
            settings.full_step_tokens,
            "automatic" if settings.device == "cuda" else "default",
            "a prompt is not chunked to fill a step beyond this",
        ),
        "full_rate_seqs": SettingInForce(
            settings.full_rate_seqs or settings.max_num_seqs,
            "automatic",
            "fewer running sequences waste the device",
        ),
        "min_free_slots_to_start": SettingInForce(
            settings.min_free_slots_to_start, "automatic", "free slots before new sequences start, once all were taken"
        ),
        "speculation": _speculation(settings),
        "cpu_offload_host_bytes": SettingInForce(
            settings.cpu_offload_host_bytes, "automatic", "host memory of a rank for streamed layers"
        ),
        "num_host_blocks": SettingInForce(settings.num_host_blocks, "automatic", "evicted blocks that the host keeps"),
    } | (state if settings.has_recurrent_state else {})


def _speculation(settings: Settings) -> SettingInForce:
    if settings.speculation is None:
        return SettingInForce(None, "default", "nothing is drafted")
    return SettingInForce(asdict(settings.speculation), "automatic", "up to which number of sequences drafts can pay")


def shape_of(spec: ModelSpec) -> dict[str, Any]:
    """A model's size, for records."""
    return {
        "family": spec.family,
        "num_params": spec.num_params,
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "num_experts": None if spec.mixture is None else spec.mixture.num_experts,
        "max_model_len": spec.max_model_len,
    }
