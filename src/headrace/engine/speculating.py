"""Chooses how speculative decoding runs on a device: when drafts pay, and what is not supported."""

from __future__ import annotations

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.models.spec import ModelSpec
from headrace.speculation import Speculation, SpeculativeConfig

# Rows whose computation takes as long as what a decode step does once, mostly reading the weights. See
# docs/speculative.md for the measurements.
CPU_FREE_ROWS = 4.0
GPU_FREE_ROWS = 128.0
CPU_MAX_SEQS = 16
GPU_MAX_SEQS = 32
GPU_MAX_ROWS = 256


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
    """`draft` is the draft model, where it is known."""
    speculative = config.speculative
    if speculative is None:
        return None
    _refuse_unsupported(config, speculative, spec, draft)
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
    )


def _refuse_unsupported(
    config: EngineConfig, speculative: SpeculativeConfig, spec: ModelSpec, draft: ModelSpec | None
) -> None:
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(config, name)) > 1:
            raise ConfigError(
                f"speculative decoding is not supported with {name}={size}: ranks take one token of a decoding "
                f"sequence in a step; leave out one of them"
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


def _draft_cost(speculative: SpeculativeConfig, spec: ModelSpec, draft: ModelSpec | None) -> float:
    """The weights that a draft reads, as a share of the model's."""
    if speculative.method == "ngram":
        return 0.0
    if speculative.num_layers is not None:
        head = spec.vocab_size * spec.hidden_size
        layers = spec.num_linear_params
        return (head + layers * speculative.num_layers / spec.num_layers) / (head + layers)
    return 0.1 if draft is None else draft.num_params / spec.num_params
