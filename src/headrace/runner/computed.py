"""What the model made of a step's tokens: those that are drawn from, and those of which something is asked."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from headrace.kernels.layout import LayerCache, StepLayout
from headrace.models.decoder import Decoder
from headrace.runner.prompt_logprobs import Pending, Span, foretell, kept_tokens
from headrace.runner.reads import PendingReads, StepReads, read
from headrace.runner.results import on_its_way
from headrace.sampling.columns import sent
from headrace.steps import IntArray, Reading, StepPromptLogprobs


@dataclass(frozen=True, slots=True)
class Computed:
    ends: Tensor  # [S, H] of the tokens that are drawn from, before the final norm
    prompts: Pending | None = None
    reads: PendingReads | None = None

    def on_its_way(self) -> Computed:
        """What goes back to the host, in pinned memory once the step is done."""
        prompts = None if self.prompts is None else replace(self.prompts, found=on_its_way(self.prompts.found))
        reads = None if self.reads is None else replace(self.reads, values=on_its_way(self.reads.values))
        return Computed(self.ends[:0], prompts, reads)

    def prompt_logprobs(self) -> tuple[StepPromptLogprobs, ...]:
        return () if self.prompts is None else self.prompts.results()

    def readings(self) -> tuple[Reading, ...]:
        return () if self.reads is None else self.reads.results()


def compute_with_prompts(
    decoder: Decoder,
    token_ids: Tensor,
    layout: StepLayout,
    caches: list[LayerCache],
    ends: IntArray,
    spans: tuple[Span, ...],
    reads: StepReads | None,
    tokens: Tensor,
) -> Computed:
    """A step that is asked for log-probabilities of prompts (`spans`) or for readouts, of other rows (`reads`)."""
    device = token_ids.device
    kept = kept_tokens(len(token_ids), ends, spans)
    indexes = kept.tokens if reads is None else np.concatenate([kept.tokens, reads.indexes])
    hidden = decoder.hidden(token_ids, layout, caches, kept=sent(indexes, device))
    first, others = hidden[: len(kept.tokens)], hidden[len(kept.tokens) :]
    return Computed(
        ends=first[sent(kept.ends, device)],
        prompts=foretell(decoder, first, kept, spans, tokens) if spans else None,
        reads=None
        if reads is None
        else PendingReads(reads, read(decoder, others, sent(reads.pooled_lens, device), sent(reads.targets, device))),
    )
