"""What a step reads of prompts: pooled hidden states, and log-probabilities of given tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.models.decoder import Decoder
from headrace.steps import IntArray, Read, Reading

_LOGITS_AT_ONCE = 128  # tokens whose logits are there at a time: a vocabulary is wide


@dataclass(frozen=True, slots=True)
class StepReads:
    """A step's reads in one order, those that pool first, and where they find their tokens."""

    reads: tuple[Read, ...]
    indexes: IntArray  # [K] tokens of the step
    pooled_lens: IntArray  # [P] how many of them each of the first P reads adds up
    targets: IntArray  # [K - sum(pooled_lens)]


@dataclass(frozen=True, slots=True)
class ReadValues:
    pooled: Tensor  # [P, H] float32
    logprobs: Tensor  # [targets] float32


@dataclass(frozen=True, slots=True)
class PendingReads:
    """What a step read, perhaps still on its way."""

    layout: StepReads
    values: ReadValues

    def results(self) -> tuple[Reading, ...]:
        """The values, each to the row that asked."""
        found: list[npt.NDArray[np.float32]] = list(self.values.pooled.numpy().copy())
        ends = np.cumsum([read.num_tokens for read in self.layout.reads[len(found) :]])
        found += np.split(self.values.logprobs.numpy().copy(), ends[:-1]) if len(ends) else []
        return tuple(Reading(r.slot, r.is_last, part) for r, part in zip(self.layout.reads, found, strict=True))


def lay_out(reads: tuple[Read, ...], slots: IntArray, num_tokens: IntArray) -> StepReads:
    """Where the tokens of reads lie in a step that computes `num_tokens` of each of `rows`."""
    starts = dict(zip(slots.tolist(), (np.cumsum(num_tokens) - num_tokens).tolist(), strict=True))
    pooled = [read for read in reads if read.targets is None]
    scored = [read for read in reads if read.targets is not None]
    firsts = [starts[read.slot] + read.first for read in (*pooled, *scored)]
    spans = [np.arange(first, first + r.num_tokens) for first, r in zip(firsts, (*pooled, *scored), strict=True)]
    targets = [read.targets for read in scored if read.targets is not None]
    return StepReads(
        reads=(*pooled, *scored),
        indexes=np.concatenate(spans),
        pooled_lens=np.array([read.num_tokens for read in pooled], np.int64),
        targets=np.concatenate(targets).astype(np.int64) if targets else np.empty(0, np.int64),
    )


def read(decoder: Decoder, hidden: Tensor, pooled_lens: Tensor, targets: Tensor) -> ReadValues:
    """`hidden` [K, H]: the residual stream of the tokens of a `StepReads`, in its order."""
    num_pooled = hidden.shape[0] - targets.shape[0]
    pooled = hidden.new_empty(0, hidden.shape[1], dtype=torch.float32)
    if num_pooled:
        states = decoder.normed(hidden[:num_pooled]).float()
        pooled = torch.segment_reduce(states, "sum", lengths=pooled_lens, unsafe=True)  # its checks would wait
    pieces = zip(hidden[num_pooled:].split(_LOGITS_AT_ONCE), targets.split(_LOGITS_AT_ONCE), strict=True)
    logprobs = [_logprobs(decoder.logits(part), wanted) for part, wanted in pieces] if len(targets) else []
    return ReadValues(pooled, torch.cat(logprobs) if logprobs else pooled.new_empty(0))


def _logprobs(logits: Tensor, targets: Tensor) -> Tensor:  # [T, V], [T] -> [T]
    logits = logits.float()
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(1)
