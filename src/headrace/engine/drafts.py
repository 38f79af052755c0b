"""Opens, checks and loads the draft model of speculative decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.config import EngineConfig
from headrace.engine.runners import load_model
from headrace.engine.settings import Settings
from headrace.errors import ConfigError
from headrace.models import Checkpoint, ModelSpec, open_checkpoint
from headrace.startup import OnStage, ignore_stage
from headrace.text import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from headrace.dist.collectives import Groups
    from headrace.models import Decoder  # imports torch, which a front without an engine of its own does not need

_COMPARED_IDS = 997  # of every so many ids, the text in both tokenizers is compared


def open_draft(config: EngineConfig, spec: ModelSpec, on_stage: OnStage = ignore_stage) -> Checkpoint | None:
    """The draft model of a config, if it has one; refused if it cannot draft for the model."""
    speculative = config.speculative
    if speculative is None or speculative.model is None:
        return None

    def progress(num_bytes: int, total: int | None) -> None:
        on_stage("download", num_bytes, total or 0)

    checkpoint = open_checkpoint(
        speculative.model, revision=speculative.revision, load_format=config.load_format, progress=progress
    )
    if checkpoint.spec.is_encoder:
        raise ConfigError(f"the draft model {speculative.model!r} is an encoder, which generates nothing")
    if checkpoint.spec.vocab_size != spec.vocab_size:
        raise ConfigError(
            f"the draft model {speculative.model!r} has {checkpoint.spec.vocab_size:,} tokens, and the model "
            f"{spec.vocab_size:,}; take a model with the same tokenizer"
        )
    return checkpoint


def check_tokenizer(config: EngineConfig, draft: Checkpoint, tokenizer: Tokenizer | None) -> None:
    """Refuse a draft model whose token ids mean something else."""
    assert config.speculative is not None
    if tokenizer is None:  # random weights
        return
    other = load_tokenizer(draft.text)
    for token_id in range(0, draft.spec.vocab_size, _COMPARED_IDS):
        if tokenizer.token_bytes(token_id) != other.token_bytes(token_id):
            raise ConfigError(
                f"the draft model {config.speculative.model!r} has another tokenizer: token {token_id} is "
                f"{other.token_bytes(token_id)!r} there and {tokenizer.token_bytes(token_id)!r} in the model"
            )


def load_draft(
    checkpoint: Checkpoint, settings: Settings, on_stage: OnStage = ignore_stage, *, groups: Groups | None = None
) -> Decoder:
    """Load the weights of a draft model, or this rank's part of them, in the engine's dtype."""
    from headrace.models.decoder import Decoder

    draft = load_model(checkpoint, replace(settings, quantization=None), on_stage, groups)
    assert isinstance(draft, Decoder)
    return draft
