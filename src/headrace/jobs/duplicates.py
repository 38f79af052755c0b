"""Nothing twice: which requests are the same, which lines wait for another's answer, which answers are kept for later.

Two requests are the same when their tokens and all that shapes the answer are, and the answer depends on nothing else:
at temperature 0, or with a `seed` that the lines give themselves. Memory is bounded: 128 bits of hash for each request
that is unfinished or whose answer is kept, and as many answers as `max_kept_tokens` allows.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from hashlib import blake2b
from operator import attrgetter
from typing import Any

from headrace.jobs.lines import LineRequest
from headrace.sched.sequence import sequence_seed
from headrace.types import RequestOutput, SamplingParams

KEPT_TOKENS = 2_000_000  # prompts included: about 70 MB
MAX_KINDS = 65_536

_shaping_values = attrgetter(
    *(field.name for field in dataclasses.fields(SamplingParams) if field.name not in ("seed", "logit_bias"))
)


class RequestKeys:
    """Knows the job's seed: a line's seed that was made from it is the line's alone."""

    def __init__(self, job_seed: int) -> None:
        self._job_seed = job_seed
        self._kinds: dict[Any, int] = {}  # sampling parameters to a number never used twice
        self._num_kinds = 0

    def key_of(self, line: LineRequest, tokens: bytes) -> bytes | None:
        """Equal for equal requests; None if the answer is a draw of its own."""
        seed = None if line.params.is_greedy else line.params.seed
        if not line.params.is_greedy and (seed is None or seed == sequence_seed(self._job_seed, line.reply.index + 1)):
            return None
        digest = blake2b(tokens, digest_size=16)
        digest.update(b"|%d|%r|%r" % (self._kind(line.params), seed, line.cache_salt))
        return digest.digest()

    def _kind(self, params: SamplingParams) -> int:
        values = (_shaping_values(params), tuple(sorted((params.logit_bias or {}).items())))
        kind = self._kinds.get(values)
        if kind is None:
            if len(self._kinds) >= MAX_KINDS:  # what comes again is then new, never taken for another
                self._kinds.clear()
            kind = self._kinds[values] = self._num_kinds
            self._num_kinds += 1
        return kind


class Duplicates:
    """Leaders are lines that are computed, followers those that wait for a leader's answer."""

    def __init__(self, *, max_kept_tokens: int = KEPT_TOKENS) -> None:
        self._max_kept_tokens = max_kept_tokens
        self._leaders: dict[bytes, int] = {}  # to their indexes
        self._keys: dict[int, bytes] = {}  # of leaders
        self._followers: dict[int, list[LineRequest]] = {}
        self._kept: OrderedDict[bytes, RequestOutput] = OrderedDict()  # the least recently used first
        self._num_kept_tokens = 0
        self.num_waiting = 0  # followers

    @property
    def num_keys(self) -> int:
        return len(self._leaders) + len(self._kept)

    def kept_answer(self, key: bytes) -> RequestOutput | None:
        output = self._kept.get(key)
        if output is not None:
            self._kept.move_to_end(key)
        return output

    def follow(self, key: bytes, line: LineRequest) -> bool:
        """Let the line wait for the answer of the same request, if one is unfinished."""
        leader = self._leaders.get(key)
        if leader is None:
            return False
        self._followers.setdefault(leader, []).append(line)
        self.num_waiting += 1
        return True

    def lead(self, key: bytes, index: int) -> None:
        self._leaders[key] = index
        self._keys[index] = key

    def finished(self, index: int, output: RequestOutput | None) -> list[LineRequest]:
        """The lines that waited for this one; its answer, if it is one, is kept for later ones."""
        key = self._keys.pop(index, None)
        if key is None:
            return []
        del self._leaders[key]
        followers = self._followers.pop(index, [])
        self.num_waiting -= len(followers)
        if output is not None:
            self._keep(key, output)
        return followers

    def _keep(self, key: bytes, output: RequestOutput) -> None:
        if _num_tokens(output) > self._max_kept_tokens or any(each.logprobs is not None for each in output.outputs):
            return  # log-probabilities are many times the size of the text
        self._kept[key] = output
        self._num_kept_tokens += _num_tokens(output)
        while self._num_kept_tokens > self._max_kept_tokens:
            _, oldest = self._kept.popitem(last=False)
            self._num_kept_tokens -= _num_tokens(oldest)


def _num_tokens(output: RequestOutput) -> int:
    return 1 + len(output.prompt_token_ids) + sum(len(answer.token_ids) for answer in output.outputs)
