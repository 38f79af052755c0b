"""Types that cross module borders: how a request is sampled, the request itself, its events and its outputs.

    sampling_params.py      SamplingParams; structured_outputs.py is the form that an answer must have
    requests.py             Request, and the SequenceEvents that the engine answers with
    outputs.py              what users of the Python API get back
    checks.py               checks of the values, each of which names the parameter

No torch here, and no behaviour beyond checking values. Import the names from this package.
"""

from __future__ import annotations

from headrace.types.checks import check_flag
from headrace.types.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoreOutput,
    ScoreRequestOutput,
)
from headrace.types.requests import (
    BACKGROUND_PRIORITY,
    FinishReason,
    Pooling,
    PromptLogprobs,
    Readout,
    Request,
    SequenceEvent,
    SequenceTiming,
    TokenIds,
    TokenLogprobs,
)
from headrace.types.sampling_params import (
    ALL_LOGPROBS,
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_SEED,
    MIN_SEED,
    NUM_DEVICE_STOPS,
    SamplingParams,
)
from headrace.types.structured_outputs import JSON_WHITESPACE, ReasoningSpan, StructuredOutputs, StructuredOutputsParams

__all__ = [
    "ALL_LOGPROBS",
    "BACKGROUND_PRIORITY",
    "JSON_WHITESPACE",
    "MAX_BAD_WORDS",
    "MAX_BAD_WORD_LEN",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_LOGPROB_TOKEN_IDS",
    "MAX_SEED",
    "MIN_SEED",
    "NUM_DEVICE_STOPS",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "FinishReason",
    "Pooling",
    "PromptLogprobs",
    "Readout",
    "ReasoningSpan",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "ScoreRequestOutput",
    "SequenceEvent",
    "SequenceTiming",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "TokenIds",
    "TokenLogprobs",
    "check_flag",
]
