"""Every sampling feature, in the order in which a step applies them.

    logits ─ logprobs (of the model's own logits) ─ grammar ─ changes ─ filters ─ sampling

The changes have vLLM's order: a bias is added before a penalty looks at the sign of a logit.

Filters and sampling are one kernel on a CPU (`headrace.kernels.cpu.sample`) and a few on a GPU
(`headrace.kernels.gpu.sample`). The files here specify what they compute, and are their reference.
"""

from __future__ import annotations

from headrace.sampling.allowed_tokens import AllowedTokens
from headrace.sampling.bad_words import BadWords
from headrace.sampling.feature import Feature, LogitsFeature
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
FINISHES: tuple[Feature, ...] = (Length(), StopTokens())  # checked where tokens are appended, `ops.append_tokens`

FEATURES: tuple[Feature, ...] = (LOGPROBS, GRAMMAR, *CHANGES, *FILTERS, SEED, *FINISHES)
PLAIN: frozenset[Feature] = frozenset((*FILTERS, SEED, *FINISHES))  # what the GPU's sampling graph supports

# Fields of SamplingParams that no feature implements: the file in src/headrace that does.
HANDLED_ELSEWHERE: dict[str, str] = {
    "n": "engine/core.py",
    "best_of": "engine/answers.py",
    "bad_words": "engine/prompts.py",  # turned into bad_words_token_ids
    "stop": "engine/answers.py",
    "include_stop_str_in_output": "engine/answers.py",
    "prompt_logprobs": "runner/prompt_logprobs.py",
    "detokenize": "engine/answers.py",
    "skip_special_tokens": "engine/answers.py",
}
