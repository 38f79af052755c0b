"""The logits of one sequence, computed in one step from an empty cache."""

from __future__ import annotations

import torch

from headrace.kernels import ops
from headrace.kernels.layout import LayerCache
from headrace.models.decoder import Decoder


def logits(decoder: Decoder, text: torch.Tensor) -> torch.Tensor:
    return decoder.logits(decoder.hidden(text, _layout(len(text)), _caches(decoder)))


def step_logits(decoder: Decoder, text: torch.Tensor) -> torch.Tensor:
    """The same as the decode graphs of a GPU compute them."""
    return decoder.step_logits(text, _layout(len(text)), _caches(decoder))


def _caches(decoder: Decoder) -> list[LayerCache]:
    return decoder.allocate_caches(4, 16, num_slots=1)


def _layout(length: int) -> ops.StepLayout:
    return ops.StepLayout(
        positions=torch.arange(length),
        slot_mapping=torch.arange(length),
        query_starts=torch.tensor([0, length], dtype=torch.int32),
        context_lens=torch.tensor([length], dtype=torch.int32),
        slots=torch.zeros(1, dtype=torch.int32),
        block_tables=torch.arange(4, dtype=torch.int32)[None],
        max_query_len=length,
        max_context_len=length,
    )
