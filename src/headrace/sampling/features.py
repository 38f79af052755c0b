"""Every sampling feature, in the order in which a step meets them.

    logits ─ logprobs (as the model gave them) ─ grammar ─ changes ─ filters ─ draw ─ finish checks

The changes come in vLLM's order: a bias counts before a penalty looks at the sign of a logit.

The filters and the draw are one kernel on a CPU (`headrace.kernels.cpu.sample`) and a few on a GPU
(`headrace.kernels.gpu.sample`); their files here say what these compute, and are their twin.
"""

from __future__ import annotations

from headrace.sampling.allowed_tokens import AllowedTokens
from headrace.sampling.bad_words import BadWords
from headrace.sampling.feature import Feature, FinishFeature, LogitsFeature
from headrace.sampling.frequency_penalty import FrequencyPenalty
from headrace.sampling.grammar import Grammar
from headrace.sampling.length import Length
from headrace.sampling.logit_bias import LogitBias
from headrace.sampling.logprobs import Logprobs
from headrace.sampling.min_p import MinP
from headrace.sampling.min_tokens import MinTokens
from headrace.sampling.presence_penalty import PresencePenalty
from headrace.sampling.repetition_penalty import RepetitionPenalty
from headrace.sampling.seed import Seed
from headrace.sampling.stop_tokens import StopTokens
from headrace.sampling.temperature import Temperature
from headrace.sampling.top_k import TopK
from headrace.sampling.top_p import TopP

LOGPROBS = Logprobs()
GRAMMAR = Grammar()
CHANGES: tuple[LogitsFeature, ...] = (
    AllowedTokens(),
    BadWords(),
    MinTokens(),
    LogitBias(),
    RepetitionPenalty(),
    FrequencyPenalty(),
    PresencePenalty(),
)
TEMPERATURE = Temperature()
FILTERS: tuple[LogitsFeature, ...] = (TEMPERATURE, MinP(), TopK(), TopP())
SEED = Seed()
FINISHES: tuple[FinishFeature, ...] = (Length(), StopTokens())  # what comes later outweighs

FEATURES: tuple[Feature, ...] = (LOGPROBS, GRAMMAR, *CHANGES, *FILTERS, SEED, *FINISHES)
PLAIN: frozenset[Feature] = frozenset((*FILTERS, SEED, *FINISHES))  # what a GPU's draw knows, without a host
