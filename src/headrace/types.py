"""Types that cross module borders: sampling parameters, requests, events and outputs.

No torch here, and no behaviour beyond checking values.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.arguments import unknown_argument
from headrace.errors import HeadraceError, RequestError

T = TypeVar("T")
TokenIds = npt.NDArray[np.int32]
FinishReason = Literal["stop", "length", "abort"]
Pooling = Literal["last", "mean", "cls"]

_LARGEST = 2**31 - 1  # of parameters that become int32 values on the device
NUM_DEVICE_STOPS = (
    16  # stop ids of a sequence that the device knows, end of sequence included; the host finds the others
)
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
MAX_SEQUENCES = 16_384  # of one request: `n` and `best_of`
MAX_LOGPROBS = 20  # that an API allows unless it is told otherwise
ALL_LOGPROBS = -1  # in place of a number: the whole vocabulary
MAX_LOGPROB_TOKEN_IDS = 128  # width of their column on the device
MAX_LOGIT_BIAS = 300  # tokens with a bias; OpenAI's limit
MAX_BAD_WORDS = 128  # token sequences; a word has two: with and without a leading space
MAX_BAD_WORD_LEN = 16  # tokens of each
JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"  # in JSON answers; bounded, since weak models would not stop
MAX_GRAMMAR_LEN = 1 << 17  # characters of a schema, regex, grammar or list of choices


def refuses_unknown(
    error: Callable[[str], HeadraceError], *, explain: Callable[[str], str | None] = lambda name: None
) -> Callable[[type[T]], type[T]]:
    """Class decorator: an unknown keyword argument raises `error` with an explanation or the nearest known name."""

    def decorate(cls: type[T]) -> type[T]:
        known = [f.name for f in fields(cls) if f.init]  # type: ignore[arg-type]
        original = cls.__init__

        @functools.wraps(original)
        def checked(self: T, *args: Any, **kwargs: Any) -> None:
            for name in kwargs:
                if name not in known:
                    if (why := explain(name)) is not None:
                        raise error(f"{cls.__name__} has no argument {name!r}: {why}")
                    raise error(unknown_argument(cls.__name__, name, known))
            original(self, *args, **kwargs)

        cls.__init__ = checked  # type: ignore[method-assign, assignment]
        return cls

    return decorate


def _refuse(param: str, value: object, rule: str) -> RequestError:
    return RequestError(f"{param} must be {rule}, got {value!r}", param=param)


@dataclass(frozen=True, slots=True)
class ReasoningSpan:
    """A model's reasoning at the start of its answer, where no grammar applies. The answer proper starts after the
    first of `end_texts`, special tokens included."""

    end_texts: tuple[str, ...]
    start_token_id: int | None = None  # the reasoning starts with this token, if there is any; None: it has started
    max_tokens: int | None = None  # after so many tokens `end_token_ids` follow; None: no limit
    end_token_ids: tuple[int, ...] = ()


@refuses_unknown(RequestError)
@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form that an answer must have: exactly one of these fields. Names are vLLM's; a `json` object becomes text.
    None of them: any form, after a reasoning of limited length.

    Only what needs no tokenizer is checked here; the rest is checked when the grammar is compiled.
    """

    json: Mapping[str, Any] | str | None = None  # a JSON schema
    regex: str | None = None  # the whole answer matches it
    choice: Sequence[str] | None = None  # the answer is one of these
    grammar: str | None = None  # in Lark or GBNF notation
    json_object: bool = False  # any JSON object
    reasoning: ReasoningSpan | None = None  # what may come before; set by the front, which knows the model's format
    asked_as: str = field(default="structured_outputs", compare=False)  # the parameter name in error messages

    def __post_init__(self) -> None:
        named = {"json": self.json, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        given = [name for name, value in named.items() if value is not None]
        if not isinstance(self.json_object, bool):
            raise self.refused(f"json_object must be true or false, got {self.json_object!r}")
        if not isinstance(self.reasoning, ReasoningSpan | None):
            raise self.refused("reasoning cannot be set; it is known from the model")
        if len(given) + self.json_object != 1 and not (self.is_any and self._limits_reasoning):
            got = ", ".join([*given, *(["json_object"] if self.json_object else [])]) or "none"
            raise self.refused(f"give exactly one of json, regex, choice, grammar and json_object, got {got}")
        if self.json is not None:
            object.__setattr__(self, "json", self._schema_text(self.json))
        for name in ("regex", "grammar"):
            value = named[name]
            if value is not None and not (isinstance(value, str) and value):
                raise self.refused(f"{name} must be non-empty text, got {value!r}")
        if self.choice is not None:
            object.__setattr__(self, "choice", self._choices(self.choice))
        if len(self.source) > MAX_GRAMMAR_LEN:
            num_chars = len(self.source)
            raise self.refused(f"{self.kind} has {num_chars:,} characters; at most {MAX_GRAMMAR_LEN:,} are allowed")
        try:
            self.source.encode("utf-8")
        except UnicodeEncodeError:
            raise self.refused(f"{self.kind} is not valid Unicode: it contains a lone surrogate") from None

    @classmethod
    def of(cls, given: object) -> StructuredOutputs:
        """Builds it from what the user passed: an instance, or a mapping with its fields."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise _refuse("structured_outputs", given, "StructuredOutputs or a mapping with its fields")
        try:
            return cls(**{str(name): value for name, value in given.items()})
        except RequestError as error:
            raise RequestError(str(error), param=error.param or "structured_outputs") from None

    @classmethod
    def of_checked(cls, fields: Mapping[str, Any]) -> StructuredOutputs:
        """See `SamplingParams.of_checked`."""
        outputs = object.__new__(cls)
        for name, value in fields.items():
            object.__setattr__(outputs, name, tuple(value) if isinstance(value, list) else value)
        if (span := fields["reasoning"]) is not None:
            lists = {name: tuple(value) for name, value in span.items() if isinstance(value, list)}
            object.__setattr__(outputs, "reasoning", ReasoningSpan(**span | lists))
        return outputs

    @property
    def kind(self) -> str:
        names = ("json", "regex", "choice", "grammar")
        found = next((name for name in names if getattr(self, name) is not None), None)
        return found or ("json_object" if self.json_object else "any")

    @property
    def is_any(self) -> bool:
        """Whether the answer may have any form, after its reasoning."""
        return self.kind == "any"

    @property
    def _limits_reasoning(self) -> bool:
        return self.reasoning is not None and self.reasoning.max_tokens is not None

    @property
    def source(self) -> str:
        """The field that was given, as text."""
        if self.is_any:
            return ""
        value = getattr(self, self.kind)
        if self.kind == "json_object":
            return '{"type":"object"}'
        return json.dumps(value, ensure_ascii=False) if self.kind == "choice" else str(value)

    def refused(self, message: str) -> RequestError:
        name = self.asked_as if isinstance(self.asked_as, str) else "structured_outputs"
        return RequestError(f"{name}: {message}", param=name)

    def _schema_text(self, schema: object) -> str:
        try:
            value = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except RecursionError:
            raise self.refused("the JSON schema is nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise self.refused(f"the JSON schema is not JSON: {error}") from None
        if not isinstance(value, Mapping):
            raise self.refused(f"a JSON schema must be an object, got {type(value).__name__}")
        return text

    def _choices(self, given: object) -> tuple[str, ...]:
        if isinstance(given, str) or not isinstance(given, Sequence) or not given:
            raise self.refused(f"choice must be a list of at least one text, got {given!r}")
        if not all(isinstance(text, str) and text for text in given):
            raise self.refused("every choice must be non-empty text")
        return tuple(given)


StructuredOutputsParams = StructuredOutputs  # vLLM's name


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
            raise _refuse("stop", self.stop, "non-empty text or a list of it")
        if isinstance(self.stop_token_ids, str) or not isinstance(self.stop_token_ids, (Iterable, type(None))):
            raise _refuse("stop_token_ids", self.stop_token_ids, "a list of token ids")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))

    def _check_flags(self) -> None:
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            check_flag(name, getattr(self, name))

    def _check_numbers(self) -> None:
        _integer("n", self.n, low=1, high=MAX_SEQUENCES)
        if self.best_of is not None:
            _integer("best_of", self.best_of, low=1, high=MAX_SEQUENCES)
            if self.best_of < self.n:
                raise _refuse("best_of", self.best_of, f"at least n ({self.n})")
        _integer("top_k", self.top_k, low=-1, high=_LARGEST)
        _integer("min_tokens", self.min_tokens, low=0, high=_LARGEST)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, low=1)
            if self.min_tokens > self.max_tokens:
                raise _refuse("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.seed is not None:
            _integer("seed", self.seed, low=MIN_SEED, high=MAX_SEED)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, low=ALL_LOGPROBS, high=_LARGEST)
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, low=ALL_LOGPROBS, high=_LARGEST)
        _number("temperature", self.temperature, low=0.0, high=1e4)
        _number("top_p", self.top_p, low=0.0, high=1.0)
        _number("min_p", self.min_p, low=0.0, high=1.0)
        if self.top_p == 0.0:
            raise _refuse("top_p", self.top_p, "above 0 and at most 1")

    def _check_stops(self) -> None:
        if not all(isinstance(text, str) and text for text in self.stop):
            raise _refuse("stop", self.stop, "non-empty text or a list of it")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, low=0, high=_LARGEST)
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True", param="stop")

    def _check_penalties(self) -> None:
        _number("repetition_penalty", self.repetition_penalty, low=0.01, high=100.0)
        _number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)

    def _check_chosen_tokens(self) -> None:
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
        if self.logprob_token_ids is not None:
            object.__setattr__(self, "logprob_token_ids", _logprob_token_ids(self.logprob_token_ids))
        words = _list("bad_words", (self.bad_words,) if isinstance(self.bad_words, str) else self.bad_words)
        if not all(isinstance(word, str) and word.strip() for word in words):
            raise _refuse("bad_words", self.bad_words, "a list of words")
        object.__setattr__(self, "bad_words", words)
        given = _list("bad_words_token_ids", self.bad_words_token_ids)
        sequences = tuple(_token_ids("bad_words_token_ids", word) for word in given)
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


def check_flag(param: str, value: object) -> None:
    """Refuse what is not a boolean: the text "no" would count as true."""
    if not isinstance(value, (bool, np.bool_)):
        raise _refuse(param, value, "True or False")


def _integer(param: str, value: object, *, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise _refuse(param, value, "an integer")
    if value < low or (high is not None and value > high):
        raise _refuse(param, value, f"at least {low}" if high is None else f"between {low} and {high}")


def _number(param: str, value: object, *, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating)) or not math.isfinite(value):
        raise _refuse(param, value, "a finite number")
    if not low <= value <= high:
        raise _refuse(param, value, f"between {low:g} and {high:g}")


def _list(param: str, given: object) -> tuple[Any, ...]:
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise _refuse(param, given, "a list")
    return tuple(given)


def _token_ids(param: str, given: object) -> tuple[int, ...]:
    if isinstance(given, str) or not isinstance(given, (Sequence, set, frozenset, np.ndarray)) or not len(given):
        raise _refuse(param, given, "a list of at least one token id")
    for token in given:
        _integer(param, token, low=0, high=_LARGEST)
    return tuple(int(token) for token in given)


def _logprob_token_ids(given: object) -> tuple[int, ...]:
    tokens = tuple(dict.fromkeys(_token_ids("logprob_token_ids", given)))
    if len(tokens) > MAX_LOGPROB_TOKEN_IDS:
        rule = f"at most {MAX_LOGPROB_TOKEN_IDS} token ids"
        raise RequestError(f"logprob_token_ids can be {rule}, got {len(tokens)}", param="logprob_token_ids")
    return tokens


def _biases(given: object) -> dict[int, float]:
    """Token ids to biases. OpenAI's ids are text, since JSON keys are."""
    if not isinstance(given, Mapping):
        raise _refuse("logit_bias", given, "a mapping from token ids to biases")
    if len(given) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias can have at most {MAX_LOGIT_BIAS} tokens, got {len(given)}", param="logit_bias")
    biases: dict[int, float] = {}
    wrong = [token for token in given if _token_id(token) is None]
    if wrong:
        shown = ", ".join(str(token)[:40] for token in wrong)
        raise RequestError(f"the keys of logit_bias must be token ids, got {shown}", param="logit_bias")
    for token, bias in given.items():
        _number("logit_bias", bias, low=-100.0, high=100.0)
        biases[_token_id(token) or 0] = float(bias)
    return biases


def _token_id(given: object) -> int | None:
    """A token id, also one that is written as text; None: it is something else."""
    if isinstance(given, str):
        return int(given) if given.isdecimal() and len(given) <= 10 and int(given) <= _LARGEST else None
    if isinstance(given, bool) or not isinstance(given, (int, np.integer)) or not 0 <= given <= _LARGEST:
        return None
    return int(given)


@dataclass(frozen=True, slots=True, eq=False)
class Readout:
    """What a request wants from its prompt instead of an answer: pooled hidden states (an embedding; vLLM's pooling) or
    log-probabilities of given tokens (a score). One of the two is set."""

    pooling: Pooling | None = None  # of the hidden states after the final norm: the last or first token's, or the mean
    targets: TokenIds | None = None  # tokens to score; the last one would follow the last prompt token
    second_start: int | None = None  # where the second text of a pair starts, for models with token types

    def first_position(self, prompt_len: int) -> int:
        """Position of the first token whose hidden state is needed; those before may come from the prefix cache."""
        if self.targets is not None:
            return prompt_len - len(self.targets)
        return prompt_len - 1 if self.pooling == "last" else 0

    def end_position(self, prompt_len: int) -> int:
        """Position after the last token whose hidden state is needed."""
        return 1 if self.pooling == "cls" else prompt_len


# Requests with this priority or a higher number are background work, such as lines of batches: they use what other
# requests leave free (`sched/background.py`). Requests of HTTP clients have lower numbers.
BACKGROUND_PRIORITY = 2**30


class Request(msgspec.Struct, frozen=True, eq=False):
    """One request as the engine takes it: tokens, not text. A Struct, since a job makes millions."""

    request_id: str
    prompt_token_ids: TokenIds
    params: SamplingParams
    priority: int = 0  # lower runs first under the priority policy
    cache_salt: str | None = None  # prompts share cached blocks only under the same salt
    watched: bool = False  # deliver tokens each step, not once at the end
    announced: bool = False  # deliver the first token at once, even if not watched
    readout: Readout | None = None  # if set, nothing is sampled and `params` is not used
    seed: int | None = None  # used if `params` has none: many requests may share `params`
    shares_blocks: bool = False  # with other such requests of its salt, even without prefix caching

    @property
    def is_background(self) -> bool:
        return self.priority >= BACKGROUND_PRIORITY

    def __post_init__(self) -> None:
        # The prefix cache compares the bytes of token ids, so they have one type.
        ids = np.ascontiguousarray(self.prompt_token_ids, np.int32)
        if ids is not self.prompt_token_ids:
            msgspec.structs.force_setattr(self, "prompt_token_ids", ids)


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The log-probability and rank of one token, and the most likely tokens with theirs."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


PromptLogprobs = tuple[TokenLogprobs | None, ...]  # of each token of a prompt; None for the first


class SequenceTiming(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The times of a sequence, on the clock that all processes of a machine share (`time.monotonic`)."""

    started_at: float | None = None  # when it first got a slot
    first_token_at: float | None = None
    last_token_at: float | None = None  # known at its end
    num_preemptions: int = 0  # how often it lost its slot


class SequenceEvent(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """An event of one sequence: the tokens since the last event, and the finish reason if it ended.

    There is one for each watched sequence and step, so it is a Struct, which is far cheaper to make and to send.
    """

    request_id: str
    index: int  # which of the request's `n` sequences
    token_ids: TokenIds
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that ended it; it is the last of its tokens
    logprobs: tuple[TokenLogprobs, ...] | None = None
    num_cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    error: str | None = None
    prompt_logprobs: PromptLogprobs | None = None  # once, with the first event after the whole prompt is computed
    readout: npt.NDArray[np.float64] | None = None  # at the end: the pooled state [H], or a value for each target
    timing: SequenceTiming | None = None  # with the first event of a sequence and with its last


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of a request's `n` answers so far."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop string or stop token id that ended it
    logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass(frozen=True)
class RequestOutput:
    """A request with its answers so far."""

    request_id: str
    prompt: str | None
    prompt_array: TokenIds = field(repr=False, compare=False)  # `prompt_token_ids` is made from it on first use
    outputs: tuple[CompletionOutput, ...]
    finished: bool = True
    num_cached_tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None  # why the engine gave up on it, if it did
    prompt_logprobs: PromptLogprobs | None = None  # if the request asked for them, once its prompt is computed

    @functools.cached_property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return tuple(self.prompt_array.tolist())


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingOutput:
    embedding: npt.NDArray[np.float32]  # [H]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingRequestOutput:
    """A prompt with its embedding."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: EmbeddingOutput
    finished: bool = True
    num_cached_tokens: int = 0

    @property
    def embedding(self) -> npt.NDArray[np.float32]:
        return self.outputs.embedding


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """A continuation's tokens, and the log-probability (natural logarithm) of each given all tokens before it."""

    token_ids: tuple[int, ...]
    token_logprobs: tuple[float, ...]

    @property
    def logprob(self) -> float:
        """The log-probability of the whole continuation: the sum over its tokens."""
        return math.fsum(self.token_logprobs)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ScoreRequestOutput:
    """A prompt with the score of one continuation."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: ScoreOutput
    finished: bool = True
    num_cached_tokens: int = 0
