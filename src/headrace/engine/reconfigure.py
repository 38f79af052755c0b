"""Gives an idle engine other settings: a new core on the loaded model, without reading the weights again.

check and resolve ─▶ close the core, free its KV cache ─▶ start a core with the new settings
     │ refused: nothing has changed                          │ failed: start one with the old settings
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import fields
from time import perf_counter
from typing import Any, NamedTuple

from headrace.config import EngineConfig
from headrace.engine.client import Deliver
from headrace.engine.resolve import resolve_here
from headrace.engine.settings import Settings
from headrace.engine.settings_file import own_settings
from headrace.engine.start import Engine, LoadedModel, draft_of, engine_of, facts_without, restart_core, start_core
from headrace.errors import ConfigError
from headrace.hardware import release_unused

# Settings that decide which weights are read, and how. They stay as loaded unless they are given.
OF_THE_MODEL = (
    "model",
    "tokenizer",
    "chat_template",
    "default_chat_template_kwargs",
    "revision",
    "runner",
    "convert",
    "pooler_config",
    "hf_overrides",
    "load_format",
    "dtype",
    "quantization",
    "device",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "enable_expert_parallel",
    "disable_custom_all_reduce",
    "cpu_offload_gb",
    "cpu_offload_path",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "distributed_executor_backend",
    "enable_lora",
    "lora_modules",
    "max_loras",
    "max_lora_rank",
)
_RESOLVED = ("dtype", "quantization", "device")  # of these, the ones that may be automatic


class OtherWeightsError(ConfigError):
    """The settings need other weights or another tokenizer than the loaded ones."""


class Reconfigured(NamedTuple):
    engine: Engine
    error: BaseException | None  # why the new settings failed; the engine has the old ones


def reconfigure(engine: Engine, given: Mapping[str, Any], deliver: Deliver) -> Reconfigured:
    """Close an idle engine and start another on its model, with the settings of a fresh start with `given`. Raises
    ConfigError, before anything is closed, for settings that are refused."""
    started, model, old = perf_counter(), engine.model, engine.config
    if model is None or old is None:
        raise OtherWeightsError("this engine runs in another process; start a new one")
    if engine.settings.num_ranks > 1:
        raise OtherWeightsError(
            f"an engine with {engine.settings.parallel_sizes} keeps its settings: each rank has its own runner; start "
            "a new one"
        )
    config = config_of(model, given)
    facts = facts_without(model)
    draft = draft_of(model, config)
    resolved = resolve_here(config, model.spec, facts, None if draft is None else draft.spec)
    _refuse_other_weights(model, config, resolved)
    engine.close()
    _release(model)
    try:
        loaded = start_core(model, config, facts)
    except BaseException as error:  # noqa: BLE001  raised by the caller, once the old settings are restored
        _forget_locals(error)
        _release(model)
        loaded = restart_core(model, old, engine.settings)
        return Reconfigured(engine_of(loaded, old, deliver, started=started), error)
    return Reconfigured(engine_of(loaded, config, deliver, started=started), None)


def config_of(model: LoadedModel, given: Mapping[str, Any]) -> EngineConfig:
    """The config of a fresh start: what is not given has its default, except for settings of the model."""
    kept = {name: getattr(model.config, name) for name in OF_THE_MODEL}
    if model.config.load_format == "random":
        kept["seed"] = model.config.seed
    return EngineConfig(**{**kept, **own_settings(given)})


def _refuse_other_weights(model: LoadedModel, config: EngineConfig, settings: Settings) -> None:
    loaded = model.config
    changed = [
        name
        for name in OF_THE_MODEL
        if getattr(config, name) != getattr(loaded, name)
        and (name not in _RESOLVED or getattr(settings, name) != getattr(model.settings, name))
    ]
    if loaded.load_format == "random" and config.seed != loaded.seed:
        changed.append("seed")
    speculative = config.speculative
    if speculative is not None and speculative.model is not None and speculative != loaded.speculative:
        raise OtherWeightsError(f"the draft model {speculative.model!r} needs a new LLM: it is not loaded")
    if changed:
        asked = ", ".join(f"{name}={getattr(config, name)!r}" for name in changed)
        was = ", ".join(f"{name}={getattr(loaded, name)!r}" for name in changed)
        raise OtherWeightsError(f"{asked} needs a new LLM: the model was loaded with {was}")


def defaults_of_the_model() -> dict[str, Any]:
    """What a fresh start takes for settings of the model that are not given, and for the seed of random weights."""
    return {field.name: field.default for field in fields(EngineConfig) if field.name in (*OF_THE_MODEL[1:], "seed")}


def _release(model: LoadedModel) -> None:
    """Return the memory of the closed core."""
    release_unused()
    if model.settings.device == "cuda":
        from headrace.runner.gpu.memory import release

        release(model.decoder.device)


def _forget_locals(error: BaseException) -> None:
    """Drop what the frames of a failed start refer to: a KV cache, perhaps, which the old settings need."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
