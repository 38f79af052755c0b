"""How a request is sampled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.arguments import refuses_unknown
from headrace.errors import RequestError
from headrace.types.checks import (
    MAX_INT32,
    check_flag,
    check_integer,
    check_number,
    checked_list,
    checked_token_ids,
    refusal,
)
from headrace.types.structured_outputs import StructuredOutputs

# Stop ids of a sequence that the device knows, end of sequence included. The host finds the others.
NUM_DEVICE_STOPS = 16
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
MAX_SEQUENCES = 16_384  # of one request: `n` and `best_of`
MAX_LOGPROBS = 20  # that an API allows unless it is told otherwise
ALL_LOGPROBS = -1  # in place of a number: the whole vocabulary
MAX_LOGPROB_TOKEN_IDS = 128  # width of their column on the device
MAX_LOGIT_BIAS = 300  # tokens with a bias; OpenAI's limit
MAX_BAD_WORDS = 128  # token sequences; a word has two: with and without a leading space
MAX_BAD_WORD_LEN = 16  # tokens of each


@refuses_unknown(RequestError)
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled. Names and defaults are vLLM's; values are checked here, once."""

    n: int = 1
    best_of: int | None = None  # sample this many, and return the n with the largest mean log-probability
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # of tokens in prompt or answer: divides positive logits, multiplies others
    presence_penalty: float = 0.0  # subtracted from the logit of each token in the answer
    frequency_penalty: float = 0.0  # the same, once for each occurrence
    logit_bias: Mapping[int, float] | None = None  # added to the logits of these tokens
    allowed_token_ids: Sequence[int] | None = None  # no other token is sampled
    bad_words: Sequence[str] = ()  # never completed within the answer; the front turns them into `bad_words_token_ids`
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    seed: int | None = None
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: up to the end of the context
    min_tokens: int = 0
    logprobs: int | None = None  # the chosen token's log-probability, and this many of the most likely; -1: all
    logprob_token_ids: Sequence[int] | None = None  # those of these tokens, in place of the most likely
    prompt_logprobs: int | None = None  # the same for the prompt's tokens; the prefix cache is not used then
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None  # the form that the answer must have

    def __post_init__(self) -> None:
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", StructuredOutputs.of(self.structured_outputs))
        self._take_stops()
        self._check_flags()
        self._check_numbers()
        self._check_stops()
        self._check_penalties()
        self._check_chosen_tokens()

    @classmethod
    def of_checked(cls, fields: Mapping[str, Any]) -> SamplingParams:
        """Parameters that another process has checked and sent by their fields: types are restored, nothing is checked
        again."""
        params = object.__new__(cls)
        for name, value in fields.items():
            restored = tuple(value) if isinstance(value, list) else value
            object.__setattr__(params, name, restored)
        if words := fields["bad_words_token_ids"]:
            object.__setattr__(params, "bad_words_token_ids", tuple(map(tuple, words)))
        if (outputs := fields["structured_outputs"]) is not None:
            object.__setattr__(params, "structured_outputs", StructuredOutputs.of_checked(outputs))
        return params

    def with_seed(self, seed: int) -> SamplingParams:
        """The same parameters with another seed, between MIN_SEED and MAX_SEED. Nothing is checked again."""
        params = object.__new__(SamplingParams)
        for name in SamplingParams.__slots__:
            object.__setattr__(params, name, getattr(self, name))
        object.__setattr__(params, "seed", seed)
        return params

    def _take_stops(self) -> None:
        if not isinstance(self.stop, (str, Iterable, type(None))):
            raise refusal("stop", self.stop, "non-empty text or a list of it")
        if isinstance(self.stop_token_ids, str) or not isinstance(self.stop_token_ids, (Iterable, type(None))):
            raise refusal("stop_token_ids", self.stop_token_ids, "a list of token ids")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))

    def _check_flags(self) -> None:
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            check_flag(name, getattr(self, name))

    def _check_numbers(self) -> None:
        check_integer("n", self.n, low=1, high=MAX_SEQUENCES)
        if self.best_of is not None:
            check_integer("best_of", self.best_of, low=1, high=MAX_SEQUENCES)
            if self.best_of < self.n:
                raise refusal("best_of", self.best_of, f"at least n ({self.n})")
        check_integer("top_k", self.top_k, low=-1, high=MAX_INT32)
        check_integer("min_tokens", self.min_tokens, low=0, high=MAX_INT32)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, low=1)
            if self.min_tokens > self.max_tokens:
                raise refusal("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.seed is not None:
            check_integer("seed", self.seed, low=MIN_SEED, high=MAX_SEED)
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, low=ALL_LOGPROBS, high=MAX_INT32)
        if self.prompt_logprobs is not None:
            check_integer("prompt_logprobs", self.prompt_logprobs, low=ALL_LOGPROBS, high=MAX_INT32)
        check_number("temperature", self.temperature, low=0.0, high=1e4)
        check_number("top_p", self.top_p, low=0.0, high=1.0)
        check_number("min_p", self.min_p, low=0.0, high=1.0)
        if self.top_p == 0.0:
            raise refusal("top_p", self.top_p, "above 0 and at most 1")

    def _check_stops(self) -> None:
        if not all(isinstance(text, str) and text for text in self.stop):
            raise refusal("stop", list(self.stop), "non-empty text or a list of it")
        for token in self.stop_token_ids:
            check_integer("stop_token_ids", token, low=0, high=MAX_INT32)
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True", param="stop")

    def _check_penalties(self) -> None:
        check_number("repetition_penalty", self.repetition_penalty, low=0.01, high=100.0)
        check_number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        check_number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)

    def _check_chosen_tokens(self) -> None:
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            object.__setattr__(
                self, "allowed_token_ids", checked_token_ids("allowed_token_ids", self.allowed_token_ids)
            )
        if self.logprob_token_ids is not None:
            object.__setattr__(self, "logprob_token_ids", _logprob_token_ids(self.logprob_token_ids))
        words = checked_list("bad_words", (self.bad_words,) if isinstance(self.bad_words, str) else self.bad_words)
        if not all(isinstance(word, str) and word.strip() for word in words):
            raise refusal("bad_words", self.bad_words, "a list of words")
        object.__setattr__(self, "bad_words", words)
        given = checked_list("bad_words_token_ids", self.bad_words_token_ids)
        sequences = tuple(checked_token_ids("bad_words_token_ids", word) for word in given)
        for sequence in sequences:
            if len(sequence) > MAX_BAD_WORD_LEN:
                rule = f"at most {MAX_BAD_WORD_LEN} tokens long"
                raise RequestError(f"a bad word must be {rule}, got {len(sequence)}", param="bad_words")
        if len(sequences) > MAX_BAD_WORDS:
            raise RequestError(
                f"bad_words can be at most {MAX_BAD_WORDS} token sequences, got {len(sequences)} "
                "(a word has two: with a space before it and without)",
                param="bad_words",
            )
        object.__setattr__(self, "bad_words_token_ids", sequences)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have."""
        if not (self.logit_bias or self.allowed_token_ids or self.bad_words_token_ids or self.logprob_token_ids):
            return
        named = {
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words_token_ids": [token for word in self.bad_words_token_ids for token in word],
            "logprob_token_ids": self.logprob_token_ids or (),
        }
        for param, tokens in named.items():
            largest = max(tokens, default=0)
            if largest >= vocab_size:
                raise RequestError(
                    f"{param} has token id {largest}, but the vocabulary has {vocab_size} tokens", param=param
                )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def num_sequences(self) -> int:
        """How many sequences are sampled; `n` of them are returned."""
        return self.best_of or self.n

    @property
    def picks_best(self) -> bool:
        return self.num_sequences > self.n

    @property
    def forbids_tokens(self) -> bool:
        """Whether a parameter may leave no token to sample."""
        return bool(
            self.allowed_token_ids or self.bad_words_token_ids or self.min_tokens or self.structured_outputs is not None
        )

    @property
    def uses_logprobs(self) -> bool:
        """Whether log-probabilities of sampled tokens are needed, even if they are not returned."""
        return self.returns_logprobs or self.picks_best

    @property
    def returns_logprobs(self) -> bool:
        return self.logprobs is not None or self.logprob_token_ids is not None


def _logprob_token_ids(given: object) -> tuple[int, ...]:
    tokens = tuple(dict.fromkeys(checked_token_ids("logprob_token_ids", given)))
    if len(tokens) > MAX_LOGPROB_TOKEN_IDS:
        rule = f"at most {MAX_LOGPROB_TOKEN_IDS} token ids"
        raise RequestError(f"logprob_token_ids can be {rule}, got {len(tokens)}", param="logprob_token_ids")
    return tokens


def _biases(given: object) -> dict[int, float]:
    """Token ids to biases. OpenAI's ids are text, since JSON keys are."""
    if not isinstance(given, Mapping):
        raise refusal("logit_bias", given, "a mapping from token ids to biases")
    if len(given) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias can have at most {MAX_LOGIT_BIAS} tokens, got {len(given)}", param="logit_bias")
    biases: dict[int, float] = {}
    wrong = [token for token in given if _token_id(token) is None]
    if wrong:
        shown = ", ".join(str(token)[:40] for token in wrong)
        raise RequestError(f"the keys of logit_bias must be token ids, got {shown}", param="logit_bias")
    for token, bias in given.items():
        check_number("logit_bias", bias, low=-100.0, high=100.0)
        biases[_token_id(token) or 0] = float(bias)
    return biases


def _token_id(given: object) -> int | None:
    """A token id, also one that is written as text; None: it is something else."""
    if isinstance(given, str):
        return int(given) if given.isdecimal() and len(given) <= 10 and int(given) <= MAX_INT32 else None
    if isinstance(given, bool) or not isinstance(given, (int, np.integer)) or not 0 <= given <= MAX_INT32:
        return None
    return int(given)
