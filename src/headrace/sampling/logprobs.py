"""Log-probabilities of the sampled and of the likeliest tokens, from the model's own logits: before masks and
temperature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from headrace.sampling.feature import Batch, Column, SequenceSettings
from headrace.types import ALL_LOGPROBS, MAX_LOGPROB_TOKEN_IDS, MAX_LOGPROBS


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Log-probabilities of the Q rows of a batch that asked for them. A row that asked for fewer than n uses the
    first ones."""

    slots: Tensor  # [Q] int64
    chosen: Tensor  # [Q] float32, of the sampled token
    ranks: Tensor  # [Q] int64, of the sampled token; 1 is the likeliest
    top_ids: Tensor  # [Q, n] int64, likeliest first; n is the most that any row asked for
    top_values: Tensor  # [Q, n] float32
    named_values: Tensor | None  # [Q, m] float32, of the tokens that a row named; None: no row did


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of one token in each of Q rows of logits, and of the n likeliest."""

    chosen: Tensor  # [Q] float32
    ranks: Tensor  # [Q] int64
    top_ids: Tensor  # [Q, n] int64
    top_values: Tensor  # [Q, n] float32


def scores(logits: Tensor, tokens: Tensor, *, num_top: int) -> Scores:
    """Returns the log-probabilities of tokens [Q] under logits [Q, V]."""
    if logits.is_cuda and num_top <= MAX_LOGPROBS:  # the kernel finds them one by one
        from headrace.kernels.gpu.scores import scores as scores_on_gpu

        return Scores(*scores_on_gpu(logits, tokens, num_top=num_top))
    return reference_scores(logits, tokens, num_top=num_top)


def reference_scores(logits: Tensor, tokens: Tensor, *, num_top: int) -> Scores:
    """Computes what the GPU kernel computes, in plain PyTorch."""
    logprobs = logits.log_softmax(dim=1)
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = 1 + (logprobs > chosen).sum(dim=1)
    top_values, top_ids = logprobs.topk(min(num_top, logprobs.shape[1]), dim=1)
    return Scores(chosen[:, 0], ranks, top_ids, top_values)


class Logprobs:
    params = ("logprobs", "logprob_token_ids")
    columns = (
        Column("num_logprobs", np.int64, 0),
        Column("logprob_token_ids", np.int64, 0, width=MAX_LOGPROB_TOKEN_IDS, is_rare=True),
    )

    def is_used(self, sequence: SequenceSettings) -> bool:
        return sequence.params.uses_logprobs

    def settings(self, sequence: SequenceSettings) -> Mapping[str, Any]:
        params = sequence.params
        if params.logprob_token_ids is not None:
            named = np.zeros(MAX_LOGPROB_TOKEN_IDS, np.int64)
            named[: len(params.logprob_token_ids)] = params.logprob_token_ids
            return {"num_logprobs": 0, "logprob_token_ids": named}
        return {"num_logprobs": sequence.vocab_size if params.logprobs == ALL_LOGPROBS else params.logprobs or 0}

    def capture(self, batch: Batch, rows: Tensor, *, is_changed: bool) -> Tensor:
        """Returns the logits of these rows, [Q, V], before anything changes them. A copy, unless none will change."""
        return batch.logits if len(rows) == len(batch.slots) and not is_changed else batch.logits[rows]

    def collect(
        self, captured: Tensor, slots: Tensor, tokens: Tensor, *, num_top: int, named: Tensor | None = None
    ) -> SampledLogprobs:
        """Computes the log-probabilities after sampling. `slots` and `tokens` belong to the captured rows, [Q]; `named`
        [num_slots, m] are the tokens that slots have named."""
        found = scores(captured, tokens, num_top=num_top)
        values = None
        if named is not None:  # a logit less the logarithm of the sum, which the sampled token's two values give
            norms = captured.gather(1, tokens[:, None]).float() - found.chosen[:, None]
            values = captured.gather(1, named[slots]).float() - norms
        return SampledLogprobs(slots, found.chosen, found.ranks, found.top_ids, found.top_values, values)
