"""How far a quantized model is from its original: perplexity, and the share of positions at which both find the same
token most likely. Each window of text is one prefill, read back from the cache."""

from __future__ import annotations

import math
import pydoc_data.topics
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.kernels import ops
from headrace.kernels.layout import StepLayout
from headrace.models.decoder import Decoder
from headrace.models.sources import Progress
from headrace.runner.gpu.tiles import tiles_of

WINDOW_LEN, NUM_WINDOWS, _BLOCK_SIZE = 512, 8, 16


@dataclass(frozen=True, slots=True)
class Scores:
    perplexity: float
    choices: Tensor  # [windows, window_len - 1], the most likely token after each one

    def agreement(self, other: Scores) -> float:
        """The share of positions with the same most likely token."""
        return float((self.choices == other.choices).float().mean())


def embedded_text() -> str:
    """The texts of Python's help topics: text that every installation has."""
    return "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))


def windows_of(
    token_ids: list[int], num_windows: int, window_len: int = WINDOW_LEN, *, text: str = "the text"
) -> Tensor:
    """Returns [windows, window_len] int32: as many windows as the text fills."""
    count = min(num_windows, len(token_ids) // window_len)
    if count == 0:
        raise ConfigError(f"{text} has {len(token_ids)} tokens, and {window_len} are needed at least")
    return torch.tensor(token_ids[: count * window_len], dtype=torch.int32).view(count, window_len)


def score(decoder: Decoder, windows: Tensor, progress: Progress = lambda done, total: None) -> Scores:
    total, choices = 0.0, []
    for index, window in enumerate(windows):
        ids = window.to(decoder.device)
        with torch.inference_mode():
            logits = decoder.logits(prefill(decoder, ids)[:-1]).float()
            chosen = torch.log_softmax(logits, -1).gather(1, ids[1:].long()[:, None])
        total -= float(chosen.mean())
        choices.append(logits.argmax(-1).cpu())
        progress(index + 1, len(windows))
    return Scores(math.exp(total / len(windows)), torch.stack(choices))


def prefill(decoder: Decoder, ids: Tensor) -> Tensor:  # [T] -> [T, H]
    """Runs one sequence through the layers."""
    spec, device = decoder.spec, decoder.device
    num_blocks = -(-len(ids) // _BLOCK_SIZE)
    caches = [
        ops.allocate_cache(num_blocks, _BLOCK_SIZE, spec.num_kv_heads, spec.head_dim, decoder.dtype, device)
        for _ in range(spec.num_layers)
    ]
    return decoder.hidden(ids, _layout(len(ids), num_blocks, device), caches)


def _layout(num_tokens: int, num_blocks: int, device: torch.device) -> StepLayout:
    positions = torch.arange(num_tokens, device=device)
    return StepLayout(
        positions=positions,
        slot_mapping=positions.clone(),
        query_starts=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        context_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        slots=torch.zeros(1, dtype=torch.int32, device=device),
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
        max_query_len=num_tokens,
        max_context_len=num_tokens,
        tiles=torch.from_numpy(tiles_of(np.array([num_tokens]), 0)[0].copy()).to(device, torch.int32),
    )
