"""Finds lines with the same request: one original is computed, its duplicates reuse the answer.

Two requests are the same if they have the same tokens and the same parameters, and the answer depends on nothing else:
at temperature 0, or with a `seed` in the lines themselves. Memory is bounded: the tokens of each request that is
unfinished or whose answer is kept, and as many answers as `max_kept_tokens` allows.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from hashlib import blake2b
from operator import attrgetter
from typing import Any

import msgspec

from headrace.jobs.input.line_output import LineOutput
from headrace.jobs.input.prepare import LineParts, Work
from headrace.types import SamplingParams

KEPT_TOKENS = 2_000_000  # prompts included: about 50 MB if prompts and answers are short
MAX_KINDS = 65_536

_Under = tuple[str | None, str | None]  # the salt and the adapter of a request

_shaping_values = attrgetter(
    *(field.name for field in dataclasses.fields(SamplingParams) if field.name not in ("seed", "logit_bias"))
)


class RequestKeys:
    """A key is the tokens and the parameters of a request, as bytes: it is compared in full, not by a hash."""

    def __init__(self) -> None:
        self._kinds: dict[Any, int] = {}  # sampling parameters to a number that is never reused
        self._num_kinds = 0
        self._last: tuple[SamplingParams, _Under, bytes] | None = None  # most lines are like the one before

    def key_of(self, work: Work) -> bytes | None:
        """Equal for equal requests; None if the line is sampled with a seed of its own."""
        if work.seed is not None:
            return None
        under = (work.cache_salt, work.adapter)
        if work.parts is not None:
            return work.tokens + self._ending(work.params, under, work.parts)
        last = self._last
        if last is None or last[0] is not work.params or last[1] != under:
            last = self._last = (work.params, under, self._ending(work.params, under))
        return work.tokens + last[2]

    def _ending(self, params: SamplingParams, under: _Under, parts: LineParts | None = None) -> bytes:
        """The parameters as 8 bytes: the length is fixed, so tokens cannot be mistaken for a part of it."""
        seed = None if params.is_greedy else params.seed
        values = (_shaping_values(params), tuple(sorted((params.logit_bias or {}).items())), seed, under, parts)
        kind = self._kinds.get(values)
        if kind is None:
            if len(self._kinds) >= MAX_KINDS:  # kinds seen again get a new number, never one of another kind
                self._kinds.clear()
            kind = self._kinds[values] = self._num_kinds
            self._num_kinds += 1
        return kind.to_bytes(8, "little")


def digest_of(work: Work) -> str | None:
    """Equal for equal requests in every process; None if the line is sampled with a seed of its own."""
    if work.seed is not None:
        return None
    params = work.params
    seed = None if params.is_greedy else params.seed
    values: list[Any] = [_shaping_values(params), sorted((params.logit_bias or {}).items()), seed, work.cache_salt]
    if work.parts is not None:
        values.append(work.parts)
    if work.adapter is not None:
        values.append({"adapter": work.adapter})
    ending = msgspec.json.encode([len(work.tokens), values], order="deterministic")
    return blake2b(work.tokens + ending, digest_size=16).hexdigest()


class Duplicates:
    """Originals are computed; duplicates wait for the answer of their original."""

    def __init__(self, *, max_kept_tokens: int = KEPT_TOKENS) -> None:
        self._max_kept_tokens = max_kept_tokens
        self._originals: dict[bytes, int] = {}  # key to index
        self._keys: dict[int, bytes] = {}  # of originals
        self._duplicates_of: dict[int, list[Work]] = {}
        self._kept: OrderedDict[bytes, LineOutput] = OrderedDict()  # least recently used first
        self._num_kept_tokens = 0
        self.num_waiting = 0  # duplicates

    @property
    def num_keys(self) -> int:
        return len(self._originals) + len(self._kept)

    def kept_answer(self, key: bytes) -> LineOutput | None:
        output = self._kept.get(key)
        if output is not None:
            self._kept.move_to_end(key)
        return output

    def add_duplicate(self, key: bytes, line: Work) -> bool:
        """Let the line wait for the answer of the same request, if that is unfinished. Returns whether it is."""
        original = self._originals.get(key)
        if original is None:
            return False
        self._duplicates_of.setdefault(original, []).append(line)
        self.num_waiting += 1
        return True

    def add_original(self, key: bytes, index: int) -> None:
        self._originals[key] = index
        self._keys[index] = key

    def finished(self, index: int, output: LineOutput | None) -> list[Work]:
        """The duplicates that waited for this line. Its answer, if there is one, is kept for later lines."""
        key = self._keys.pop(index, None)
        if key is None:
            return []
        del self._originals[key]
        duplicates = self._duplicates_of.pop(index, [])
        self.num_waiting -= len(duplicates)
        if output is not None:
            self._keep(key, output)
        return duplicates

    def _keep(self, key: bytes, output: LineOutput) -> None:
        num_tokens = _num_tokens(output)
        if not output.answers or output.answers[0].logprobs is not None:
            return  # embeddings and log-probabilities are many times the size of a text
        if num_tokens > self._max_kept_tokens:
            return
        self._kept[key] = output
        self._num_kept_tokens += num_tokens
        while self._num_kept_tokens > self._max_kept_tokens:
            _, oldest = self._kept.popitem(last=False)
            self._num_kept_tokens -= _num_tokens(oldest)


def _num_tokens(output: LineOutput) -> int:
    return 1 + output.num_prompt_tokens + output.num_generated_tokens
