"""Opens the checkpoint that a config names."""

from __future__ import annotations

from headrace.config import EngineConfig
from headrace.models import Checkpoint, open_checkpoint
from headrace.models.pooling_config import PoolingChoice
from headrace.startup import OnStage, ignore_stage


def open_model(config: EngineConfig, on_stage: OnStage = ignore_stage) -> Checkpoint:
    """Locate the model and read its config; a hub model that is not cached is downloaded."""

    def progress(num_bytes: int, total: int | None) -> None:
        on_stage("download", num_bytes, total or 0)

    return open_checkpoint(
        config.model,
        revision=config.revision,
        load_format=config.load_format,
        progress=progress,
        pooling=PoolingChoice(config.runner, config.convert, config.pooler_config),
        hf_overrides=config.hf_overrides,
    )
