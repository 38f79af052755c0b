"""Grammars of structured outputs, compiled for the model's tokens by llguidance.

Compiling takes one or two milliseconds and is bounded (`_limits`) whatever the user wrote. It runs on the front's
thread, before the request reaches the engine's loop. The last compiled grammars and the last refusals are cached.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import RequestError
from headrace.text import Tokenizer
from headrace.text.closed_schemas import closed
from headrace.types import JSON_WHITESPACE, StructuredOutputs

if TYPE_CHECKING:
    import llguidance

MAX_KEPT = 256
MAX_KEPT_LEN = 1 << 22  # characters of their sources, all together
_AT_ONCE = 2  # compilations; more would take cores from the engine
_MAX_ERROR_LEN = 400


class Grammar:
    """A compiled grammar. Any thread may ask for matchers; each matcher belongs to its caller."""

    def __init__(self, template: llguidance.LLMatcher | None) -> None:
        self._template = template

    @property
    def allows_all(self) -> bool:
        """Whether it is that of an answer of any form, which needs no matcher."""
        return self._template is None

    def matcher(self) -> llguidance.LLMatcher | None:
        return None if self._template is None else self._template.deep_copy()


class Grammars:
    """Owns the compiled grammars of one tokenizer, in an LRU cache.

    The end of an answer is a token id of its own, `end_id`, past the model's vocabulary. Where a matcher allows it, the
    sequence may end with any of its stop tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        max_kept: int = MAX_KEPT,
        num_threads: int = 1,  # for the masks of many slots
    ) -> None:
        self.vocab_size = vocab_size
        self.num_threads = num_threads
        self.end_id = vocab_size
        self._tokenizer = tokenizer
        self._eos_token_ids = tuple(eos_token_ids)
        self._max_kept = max_kept
        self._kept: OrderedDict[tuple[str, str], Grammar | str] = OrderedDict()
        self._kept_len = 0
        self._is_changing = threading.Lock()
        self._may_compile = threading.Semaphore(_AT_ONCE)
        self._may_read_tokens = threading.Lock()
        self._tokens: llguidance.LLTokenizer | None = None

    @property
    def num_kept(self) -> int:
        """Cached grammars and refusals."""
        return len(self._kept)

    @property
    def kept_len(self) -> int:
        """Characters of their sources, all together."""
        return self._kept_len

    @property
    def num_words(self) -> int:
        """The width of a bitmask, in 32-bit words."""
        return -(-(self.vocab_size + 1) // 32)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text, special tokens included."""
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def tokens_of(self, text: bytes) -> list[int]:
        """Tokens that spell these bytes."""
        return self._read_tokens().tokenize_bytes(text)

    def compile(self, outputs: StructuredOutputs) -> Grammar:
        """The grammar of `outputs`; refused, with the reason, if it is invalid."""
        if outputs.is_any:
            return Grammar(None)
        key = (outputs.kind, outputs.source)
        found = self._recall(key)
        if found is None:
            with self._may_compile:
                found = self._recall(key) or self._compiled(outputs)
            self._keep(key, found)
        if isinstance(found, str):
            raise outputs.refused(found)
        return found

    def _recall(self, key: tuple[str, str]) -> Grammar | str | None:
        with self._is_changing:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _keep(self, key: tuple[str, str], found: Grammar | str) -> None:
        with self._is_changing:
            if key not in self._kept:
                self._kept_len += len(key[1])
            self._kept[key] = found
            while len(self._kept) > self._max_kept or self._kept_len > MAX_KEPT_LEN:
                (_, source), _ = self._kept.popitem(last=False)
                self._kept_len -= len(source)

    def _compiled(self, outputs: StructuredOutputs) -> Grammar | str:
        """The grammar, or why it is refused. Computes a first mask, since a grammar that allows no token is refused."""
        import llguidance

        tokens = self._read_tokens()
        try:
            text = _in_llguidances_terms(outputs.kind, outputs.source)
        except _NotAGrammar as error:
            return str(error)
        matcher = llguidance.LLMatcher(tokens, text, log_level=0, limits=_limits())
        if not matcher.is_error():
            probe = matcher.deep_copy()
            first = np.frombuffer(probe.compute_bitmask(), np.uint8)
            if not probe.is_error() and not first.any():
                return "nothing matches it"
            matcher = probe if probe.is_error() else matcher
        return _explained(matcher.get_error()) if matcher.is_error() else Grammar(matcher)

    def _read_tokens(self) -> llguidance.LLTokenizer:
        """The vocabulary in llguidance's form; takes half a second, once."""
        import llguidance

        if self._tokenizer is None:
            raise RequestError(
                "structured output needs the model's tokenizer, and it has none; name one with tokenizer=...",
                param="structured_outputs",
            )
        with self._may_read_tokens:
            if self._tokens is None:
                vocabulary: Any = _Vocabulary(self._tokenizer, self.vocab_size, self._eos_token_ids)
                self._tokens = llguidance.LLTokenizer(vocabulary, n_vocab=self.vocab_size + 1, eos_token=self.end_id)
                vocabulary.greedily = self._tokens.greedy_tokenize
            return self._tokens


class _Vocabulary:
    """Each token's bytes, as they appear in the answer's text; llguidance reads these attributes."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        special = {*tokenizer.special_ids, *tokenizer.eos_token_ids, *eos_token_ids}
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)] + [b"<end>"]
        self.special_token_ids = [*sorted(token_id for token_id in special if token_id < vocab_size), vocab_size]
        self.eos_token_id = vocab_size
        names = [tokenizer.token(token_id) for token_id in tokenizer.special_ids]
        self._special = re.compile(
            "|".join(map(re.escape, sorted(filter(None, names), key=len, reverse=True))) or "(?!)"
        )
        self.greedily: Callable[[str], list[int]] | None = None  # tokenizes a text that the tokenizer would change

    def __call__(self, text: str | bytes) -> list[int]:
        """The usual tokens of a text that the grammar prescribes."""
        text = text.decode() if isinstance(text, bytes) else text
        pieces = self._tokenizer.encode_batch(self._without_special(text), add_special_tokens=False)
        token_ids = [token_id for piece in pieces for token_id in piece]
        is_same = b"".join(self.tokens[token_id] for token_id in token_ids) == text.encode()
        return token_ids if is_same or self.greedily is None else self.greedily(text)

    def _without_special(self, text: str) -> list[str]:
        """The text split within every special token that it spells, so that none is tokenized as such."""
        pieces, start = [], 0
        while match := self._special.search(text, start):
            pieces.append(text[start : match.start() + 1])
            start = match.start() + 1
        return [*pieces, text[start:]]


class _NotAGrammar(Exception):
    pass


def _in_llguidances_terms(kind: str, source: str) -> str:
    from llguidance import LLMatcher, grammar_from

    if kind in ("json", "json_object"):
        return LLMatcher.grammar_from_json_schema(_closed(source), defaults={"whitespace_pattern": JSON_WHITESPACE})
    if kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    if kind == "choice":
        return grammar_from("choice", source)
    try:
        return grammar_from("grammar" if "::=" in source else "lark", source)
    except (ValueError, RecursionError) as error:
        raise _NotAGrammar(str(error)) from None


def _closed(source: str) -> str:
    try:
        return json.dumps(closed(json.loads(source)), ensure_ascii=False)
    except RecursionError:
        raise _NotAGrammar("the JSON schema is nested too deeply") from None


def _limits() -> llguidance.LLParserLimits:
    """Bounds on a grammar's cost: to compile, in each step, and in memory."""
    import llguidance

    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,  # about 20 ms
        step_lexer_fuel=100_000,  # about 10 ms
        step_max_items=10_000,  # about 20 ms; a schema of 150 optional properties needs 5,000
        max_lexer_states=20_000,  # about 30 MB
        max_grammar_size=250_000,
        verbose_errors=False,
    )


def _explained(error: str) -> str:
    """llguidance's message, without its markers and not too long."""
    text = error.replace("<non-verbose/>", "").strip()
    if text.startswith("NoExtension"):
        return "nothing matches it"
    if "coerce_one_of" in text:  # an option of llguidance that users cannot set
        return "more than one alternative of a oneOf may match; use anyOf, which this constrains in the same way"
    return text if len(text) <= _MAX_ERROR_LEN else f"{text[:_MAX_ERROR_LEN]}…"


def explain(error: str) -> str:
    """Why a matcher failed in the middle of an answer."""
    return f"the grammar became too complex for this answer: {_explained(error)}; make the schema or grammar simpler"
