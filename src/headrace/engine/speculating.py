"""Chooses how speculative decoding runs on a device: when drafts pay, and what is not supported."""

from __future__ import annotations

from typing import NamedTuple

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.models.shards import check_divisible
from headrace.models.spec import ModelSpec
from headrace.speculation import Speculation, SpeculativeConfig

# Rows whose computation takes as long as what a decode step does once, mostly reading the weights. Measured for a CPU,
# estimated for a GPU: docs/experiments.md.
CPU_FREE_ROWS = 6.0
GPU_FREE_ROWS = 256.0
CPU_MAX_SEQS = 16
GPU_MAX_SEQS = 32
GPU_MAX_ROWS = 256


class StepTimes(NamedTuple):
    """In seconds: a device idles while the host reads what a step with drafts has sampled and prepares the next one. A
    decode step of one sequence takes as long as reading its weights, and a time for each layer beside them."""

    wait: float
    per_weight: float
    per_layer: float


GPU_TIMES = StepTimes(wait=0.8e-3, per_weight=2 / 4e12, per_layer=12e-6)  # measured on an H200
CPU_TIMES = StepTimes(wait=1.1e-3, per_weight=1.3e-11, per_layer=80e-6)  # on two cores, with weights of four bits


def choose_speculation(
    config: EngineConfig,
    spec: ModelSpec,
    draft: ModelSpec | None,
    *,
    on_gpu: bool,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
) -> Speculation | None:
    """`draft` is the draft model, where it is known. `check_speculation` comes first."""
    speculative = config.speculative
    if speculative is None:
        return None
    if draft is not None and draft.max_model_len < max_model_len:
        raise ConfigError(
            f"the draft model {speculative.model!r} has a context of {draft.max_model_len:,} tokens, and max_model_len "
            f"is {max_model_len:,}; set max_model_len={draft.max_model_len}, or take another draft model"
        )
    max_seqs = min(max_num_seqs, GPU_MAX_SEQS if on_gpu else CPU_MAX_SEQS)
    max_rows = min(max_seqs * (1 + speculative.num_tokens), max_num_batched_tokens)
    if on_gpu:
        max_rows = min(max_rows, GPU_MAX_ROWS)
    return Speculation(
        config=speculative,
        max_seqs=max_seqs,
        max_rows=max_rows,
        free_rows=GPU_FREE_ROWS if on_gpu else CPU_FREE_ROWS,
        draft_cost=_draft_cost(speculative, spec, draft),
        wait_cost=_wait_cost(spec, GPU_TIMES if on_gpu else CPU_TIMES),
    )


def check_speculation(config: EngineConfig, spec: ModelSpec, draft: ModelSpec | None, *, on_gpu: bool) -> None:
    """Refuse what is not supported with speculative decoding."""
    speculative = config.speculative
    if speculative is None:
        return
    _refuse_unsupported(config, speculative, spec, draft)
    if draft is not None:
        _check_ranks(config, speculative, draft, on_gpu=on_gpu)


def _refuse_unsupported(
    config: EngineConfig, speculative: SpeculativeConfig, spec: ModelSpec, draft: ModelSpec | None
) -> None:
    if config.pipeline_parallel_size > 1:
        raise ConfigError(
            f"speculative decoding is not supported with pipeline_parallel_size={config.pipeline_parallel_size}: a "
            "step with drafts waits for the result of the one before it, so that one stage at a time would work; "
            "leave out one of them, or use tensor_parallel_size"
        )
    if spec.recurrent is not None or (draft is not None and draft.recurrent is not None):
        raise ConfigError(
            "speculative decoding is not supported where layers have a recurrent state: a draft that is not accepted "
            "cannot be taken out of it; leave out speculative_config, or take another draft model"
        )
    if speculative.num_layers is not None and spec.num_cache_layers < spec.num_layers:
        raise ConfigError(
            "speculative_config's method='early_exit' is not supported where layers share keys and values"
        )
    if speculative.num_layers is not None and speculative.num_layers >= spec.num_layers:
        raise ConfigError(
            f"speculative_config's num_layers={speculative.num_layers} must be less than the model's "
            f"{spec.num_layers} layers"
        )


def _check_ranks(config: EngineConfig, speculative: SpeculativeConfig, draft: ModelSpec, *, on_gpu: bool) -> None:
    """A draft model is divided over the ranks of the model: then all of them have the same drafts, bitwise."""
    size, own_size = config.tensor_parallel_size, speculative.draft_tensor_parallel_size
    if own_size not in (None, size):
        raise ConfigError(
            f"speculative_config's draft_tensor_parallel_size={own_size} must be tensor_parallel_size={size}: a draft "
            "model is divided over the ranks of the model; leave it out"
        )
    whole_experts = config.enable_expert_parallel and draft.mixture is not None
    try:
        check_divisible(draft, size, evenly=on_gpu, whole_experts=whole_experts)
    except ConfigError as error:
        raise ConfigError(f"the draft model {speculative.model!r}: {error}") from None


def _draft_cost(speculative: SpeculativeConfig, spec: ModelSpec, draft: ModelSpec | None) -> float:
    """The weights that a draft reads, as a share of the model's."""
    if speculative.method == "ngram":
        return 0.0
    if speculative.num_layers is not None:
        head = spec.vocab_size * spec.hidden_size
        layers = spec.num_linear_params
        return (head + layers * speculative.num_layers / spec.num_layers) / (head + layers)
    return 0.1 if draft is None else draft.num_params / spec.num_params


def _wait_cost(spec: ModelSpec, times: StepTimes) -> float:
    """The time that the device idles, as a share of a decode step: little for a large model, much for a small one."""
    num_weights = spec.num_params
    if (mixture := spec.mixture) is not None:
        num_idle = len(mixture.layers) * (mixture.num_experts - mixture.num_chosen)
        num_weights -= 3 * spec.hidden_size * mixture.expert_size * num_idle
    return times.wait / (times.per_weight * num_weights + times.per_layer * spec.num_layers)
