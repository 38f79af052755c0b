"""The step by which a GPU's memory is measured, here on a CPU."""

from __future__ import annotations

from pathlib import Path

import torch

from headrace.models import load_decoder, open_checkpoint
from headrace.runner.gpu.memory import one_prompt_step
from tests.engine.tiny import SHAPE, save_model


def test_a_step_of_more_tokens_than_the_model_has_positions_stays_within_them(tmp_path: Path) -> None:
    save_model(tmp_path, "gpt2")
    decoder = load_decoder(open_checkpoint(str(tmp_path)), dtype=torch.float32)
    num_tokens = SHAPE["max_position_embeddings"] + 100
    layout, caches = one_prompt_step(decoder, num_tokens, torch.float32)
    hidden = decoder.hidden(torch.zeros(num_tokens, dtype=torch.int32), layout, caches)
    assert hidden.shape == (num_tokens, SHAPE["hidden_size"])
