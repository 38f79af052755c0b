"""What the model computes in one step: hidden states to sample from, prompt log-probabilities and readouts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from headrace.kernels.layout import LayerCache, StepLayout
from headrace.models.decoder import Decoder
from headrace.runner.prompt_logprobs import PendingPromptLogprobs, PromptSpan, kept_tokens, score_prompts
from headrace.runner.readouts import PendingReadouts, ReadoutLayout, compute_readouts
from headrace.runner.results import to_pinned
from headrace.sampling.columns import sent
from headrace.steps import IntArray, ReadoutResult, StepPromptLogprobs


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """The outputs of a step, perhaps still on the device."""

    last_hidden: Tensor  # [S, H] of the tokens to sample after, before the final norm
    prompts: PendingPromptLogprobs | None = None
    readouts: PendingReadouts | None = None

    def to_pinned(self) -> StepOutputs:
        """Start copying what the host needs to pinned memory; it is there once the step is done."""
        prompts = None if self.prompts is None else replace(self.prompts, scores=to_pinned(self.prompts.scores))
        readouts = None if self.readouts is None else replace(self.readouts, values=to_pinned(self.readouts.values))
        return StepOutputs(self.last_hidden[:0], prompts, readouts)

    def prompt_logprobs(self) -> tuple[StepPromptLogprobs, ...]:
        return () if self.prompts is None else self.prompts.results()

    def readout_results(self) -> tuple[ReadoutResult, ...]:
        return () if self.readouts is None else self.readouts.results()


def compute_with_prompt_outputs(
    decoder: Decoder,
    token_ids: Tensor,
    layout: StepLayout,
    caches: list[LayerCache],
    ends: IntArray,
    spans: tuple[PromptSpan, ...],
    readouts: ReadoutLayout | None,
    tokens: Tensor,
) -> StepOutputs:
    """Run a step that also needs prompt log-probabilities (`spans`) or readouts, which belong to other slots.

    `ends` are the tokens of the step to sample after, `tokens` [num_slots, max_len] those of all slots.
    """
    device = token_ids.device
    kept = kept_tokens(len(token_ids), ends, spans)
    indexes = kept.tokens if readouts is None else np.concatenate([kept.tokens, readouts.indexes])
    hidden = decoder.hidden(token_ids, layout, caches, kept=sent(indexes, device))
    first, others = hidden[: len(kept.tokens)], hidden[len(kept.tokens) :]
    return StepOutputs(
        last_hidden=first[sent(kept.ends, device)],
        prompts=score_prompts(decoder, first, kept, spans, tokens) if spans else None,
        readouts=None
        if readouts is None
        else PendingReadouts(
            readouts,
            compute_readouts(
                decoder,
                others,
                sent(readouts.pooled_lens, device),
                sent(readouts.shares, device),
                sent(readouts.targets, device),
            ),
        ),
    )
