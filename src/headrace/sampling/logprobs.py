"""Log-probabilities of the drawn and of the likeliest tokens, as the model gave them: before masks and temperature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from headrace.sampling.feature import Batch, Column, SequenceSettings


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """For those Q rows of a batch that asked. One that asked for fewer than n finds them at the front of its line."""

    slots: Tensor  # [Q] int64, row numbers as the sampler was given them
    chosen: Tensor  # [Q] float32, of the drawn token
    ranks: Tensor  # [Q] int64, of the drawn token; 1 is the likeliest
    top_ids: Tensor  # [Q, n] int64, likeliest first, n the most that any of them asked for
    top_values: Tensor  # [Q, n] float32


@dataclass(frozen=True, slots=True)
class Scores:
    """Of one token each in Q lines of logits."""

    chosen: Tensor  # [Q] float32
    ranks: Tensor  # [Q] int64
    top_ids: Tensor  # [Q, n] int64
    top_values: Tensor  # [Q, n] float32


def scores(logits: Tensor, tokens: Tensor, *, num_top: int) -> Scores:
    """What [Q, V] logits say of tokens [Q]."""
    if logits.is_cuda:
        from headrace.kernels.gpu.scores import scores as scores_on_gpu

        return Scores(*scores_on_gpu(logits, tokens, num_top=num_top))
    return reference_scores(logits, tokens, num_top=num_top)


def reference_scores(logits: Tensor, tokens: Tensor, *, num_top: int) -> Scores:
    """The kernel's twin."""
    logprobs = logits.log_softmax(dim=1)
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = 1 + (logprobs > chosen).sum(dim=1)
    top_values, top_ids = logprobs.topk(min(num_top, logprobs.shape[1]), dim=1)
    return Scores(chosen[:, 0], ranks, top_ids, top_values)


class Logprobs:
    columns = (Column("num_logprobs", np.int64, 0),)

    def is_used(self, sequence: SequenceSettings) -> bool:
        return sequence.params.uses_logprobs

    def settings(self, sequence: SequenceSettings) -> Mapping[str, int]:
        return {"num_logprobs": sequence.params.logprobs or 0}

    def capture(self, batch: Batch, rows: Tensor, *, is_changed: bool) -> Tensor:
        """Before anything touches the logits: those of the rows, [Q, V]. A copy, unless all stay as they are."""
        return batch.logits if len(rows) == len(batch.slots) and not is_changed else batch.logits[rows]

    def collect(self, captured: Tensor, slots: Tensor, tokens: Tensor, *, num_top: int) -> SampledLogprobs:
        """After the draw. `rows` and `tokens` are those of the rows, [Q]."""
        found = scores(captured, tokens, num_top=num_top)
        return SampledLogprobs(slots, found.chosen, found.ranks, found.top_ids, found.top_values)
