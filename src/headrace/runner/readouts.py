"""Computes readouts of prompts: pooled hidden states (embeddings), and log-probabilities of given tokens (scores)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.models.decoder import Decoder
from headrace.models.encoder import Encoder
from headrace.steps import IntArray, ReadoutChunk, ReadoutResult

_LOGITS_AT_ONCE = 128  # tokens whose logits exist at a time: a vocabulary is wide


@dataclass(frozen=True, slots=True)
class ReadoutLayout:
    """A step's readout chunks, those that pool first, and the indexes of their tokens."""

    chunks: tuple[ReadoutChunk, ...]
    indexes: IntArray  # [K] tokens of the step
    pooled_lens: IntArray  # [P] how many of them each of the first P chunks adds up
    shares: npt.NDArray[np.float32]  # [P] of each of these tokens in the mean
    targets: IntArray  # [K - sum(pooled_lens)]


@dataclass(frozen=True, slots=True)
class ReadoutValues:
    pooled: Tensor  # [P, H or outputs of the head] float32
    logprobs: Tensor  # [targets] float32


@dataclass(frozen=True, slots=True)
class PendingReadouts:
    """A step's readout values, perhaps still being copied to the host."""

    layout: ReadoutLayout
    values: ReadoutValues

    def results(self) -> tuple[ReadoutResult, ...]:
        """One result for each chunk."""
        found: list[npt.NDArray[np.float32]] = list(self.values.pooled.numpy().copy())
        ends = np.cumsum([chunk.num_tokens for chunk in self.layout.chunks[len(found) :]])
        found += np.split(self.values.logprobs.numpy().copy(), ends[:-1]) if len(ends) else []
        return tuple(
            ReadoutResult(c.slot, c.is_last, values) for c, values in zip(self.layout.chunks, found, strict=True)
        )


def lay_out_readouts(chunks: tuple[ReadoutChunk, ...], slots: IntArray, num_tokens: IntArray) -> ReadoutLayout:
    """Find the tokens of readout chunks in a step that computes `num_tokens` of each of `slots`."""
    starts = dict(zip(slots.tolist(), (np.cumsum(num_tokens) - num_tokens).tolist(), strict=True))
    pooled = [chunk for chunk in chunks if chunk.targets is None]
    scored = [chunk for chunk in chunks if chunk.targets is not None]
    firsts = [starts[chunk.slot] + chunk.first for chunk in (*pooled, *scored)]
    spans = [np.arange(first, first + c.num_tokens) for first, c in zip(firsts, (*pooled, *scored), strict=True)]
    targets = [chunk.targets for chunk in scored if chunk.targets is not None]
    return ReadoutLayout(
        chunks=(*pooled, *scored),
        indexes=np.concatenate(spans),
        pooled_lens=np.array([chunk.num_tokens for chunk in pooled], np.int64),
        shares=np.array([1 / chunk.num_pooled for chunk in pooled], np.float32),
        targets=np.concatenate(targets).astype(np.int64) if targets else np.empty(0, np.int64),
    )


def compute_readouts(
    decoder: Decoder, hidden: Tensor, pooled_lens: Tensor, shares: Tensor, targets: Tensor
) -> ReadoutValues:
    """`hidden` [K, H]: the residual stream of the tokens of a `ReadoutLayout`, in its order."""
    num_pooled = hidden.shape[0] - targets.shape[0]
    pooled = hidden.new_empty(0, hidden.shape[1], dtype=torch.float32)
    if num_pooled:
        pooled = pool(decoder, hidden[:num_pooled], pooled_lens, shares)
    batches = zip(hidden[num_pooled:].split(_LOGITS_AT_ONCE), targets.split(_LOGITS_AT_ONCE), strict=True)
    logprobs = [_logprobs(decoder.logits(states), wanted) for states, wanted in batches] if len(targets) else []
    return ReadoutValues(pooled, torch.cat(logprobs) if logprobs else pooled.new_empty(0))


def pool(model: Decoder | Encoder, hidden: Tensor, lens: Tensor, shares: Tensor) -> Tensor:
    """[K, H] -> [P, H]: parts of the mean over the final hidden states of consecutive tokens, `lens` [P] of them each;
    or [P, N], put through the model's head. A head is applied to whole means only."""
    states = model.normed(hidden).float()
    # `unsafe`: its checks would wait for the GPU
    means = torch.segment_reduce(states, "sum", lengths=lens, unsafe=True).mul_(shares[:, None])
    return means if model.pooler_head is None else model.pooler_head(means)


def _logprobs(logits: Tensor, targets: Tensor) -> Tensor:  # [T, V], [T] -> [T]
    logits = logits.float()
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(1)
