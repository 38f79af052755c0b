"""What a plan predicts for: requests by their lengths, and the four named workloads of docs/performance.md."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError, nearest

IntArray = NDArray[np.int64]

# Token ids of the named workloads are sampled below this, and cost so many random bits: lengths come from the same
# stream of random numbers, so it has to be advanced past the tokens.
_TOKEN_KINDS = 99_000
_TOKEN_BITS = _TOKEN_KINDS.bit_length()


class RequestLengths(NamedTuple):
    prompt_len: int
    output_len: int
    prefix_group: int = -1  # requests of one group share the first `prefix_len` tokens; -1: none
    prefix_len: int = 0


@dataclass(frozen=True)
class Workload:
    """Requests by length. They are all submitted at once, unless `concurrency` clients keep one each in flight."""

    name: str
    requests: tuple[RequestLengths, ...]
    concurrency: int | None = None  # a closed loop of so many clients; None: everything is submitted at once

    def __post_init__(self) -> None:
        if not self.requests:
            raise ConfigError("a workload needs at least one request")
        shortest = min(min(request.prompt_len, request.output_len) for request in self.requests)
        if shortest < 1:
            raise ConfigError("every request needs at least one token in and one out")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, got {self.concurrency}")

    @property
    def num_prompt_tokens(self) -> int:
        return sum(request.prompt_len for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.output_len for request in self.requests)

    @property
    def mean_prompt_len(self) -> float:
        return self.num_prompt_tokens / len(self.requests)

    @property
    def mean_output_len(self) -> float:
        return self.num_output_tokens / len(self.requests)

    @property
    def max_len(self) -> int:
        return max(request.prompt_len + request.output_len for request in self.requests)

    def columns(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Prompt lengths, output lengths, prefix groups and prefix lengths, one row per request."""
        table = np.array(self.requests, dtype=np.int64)
        return table[:, 0], table[:, 1], table[:, 2], table[:, 3]


def uniform(
    input_len: int, output_len: int, *, num_requests: int, spread: float = 0.0, concurrency: int | None = None
) -> Workload:
    """Requests of about the same length: evenly within `spread` of the means (0.5: from half to one and a half)."""
    if not 0.0 <= spread < 1.0:
        raise ConfigError(f"spread must be at least 0 and below 1, got {spread}")
    rng = random.Random(0)
    requests = tuple(
        RequestLengths(_varied(rng, input_len, spread), _varied(rng, output_len, spread)) for _ in range(num_requests)
    )
    return Workload(f"{input_len} in, {output_len} out", requests, concurrency)


def named(name: str, *, concurrency: int | None = None) -> Workload:
    if name not in NAMED:
        raise ConfigError(f"unknown workload {name!r}{nearest(name, NAMED)} (known: {', '.join(NAMED)})")
    return Workload(name, NAMED[name](), concurrency)


@cache
def _chat() -> tuple[RequestLengths, ...]:
    """2,000 conversations: short, long-tailed prompts and answers."""
    rng = random.Random(0)
    requests = []
    for _ in range(2000):
        prompt_len = _long_tailed(rng, 4.8, 1.1, 4, 2048)
        _skip_tokens(rng, prompt_len)
        requests.append(RequestLengths(prompt_len, _long_tailed(rng, 5.0, 0.9, 4, 1024)))
    return tuple(requests)


def _prefill() -> tuple[RequestLengths, ...]:
    """1,000 documents of 2,048 tokens, 64 out: classification, extraction."""
    return (RequestLengths(2048, 64),) * 1000


def _decode() -> tuple[RequestLengths, ...]:
    """1,000 prompts of 128 tokens, 1,024 out: synthetic data."""
    return (RequestLengths(128, 1024),) * 1000


@cache
def _prefix() -> tuple[RequestLengths, ...]:
    """2,000 requests over 32 system prompts of 1,536 tokens, in random order, with 128 more tokens each and 128 out."""
    rng = random.Random(3)
    _skip_tokens(rng, 32 * 1536)
    requests = []
    for _ in range(2000):
        group = rng.choice(range(32))
        _skip_tokens(rng, 128)
        requests.append(RequestLengths(1536 + 128, 128, group, 1536))
    return tuple(requests)


NAMED: dict[str, Callable[[], tuple[RequestLengths, ...]]] = {
    "chat": _chat,
    "prefill": _prefill,
    "decode": _decode,
    "prefix": _prefix,
}


def of_lengths(name: str, lengths: Sequence[tuple[int, ...]]) -> Workload:
    """A workload of (prompt_len, output_len) or (prompt_len, output_len, prefix_group, prefix_len) tuples."""
    return Workload(name, tuple(RequestLengths(*each) for each in lengths))


def _varied(rng: random.Random, mean: int, spread: float) -> int:
    return max(1, round(mean * (1.0 + spread * rng.uniform(-1.0, 1.0)))) if spread else mean


def _long_tailed(rng: random.Random, log_mean: float, sigma: float, min_len: int, max_len: int) -> int:
    return max(min_len, min(max_len, int(math.exp(rng.normalvariate(log_mean, sigma)))))


def _skip_tokens(rng: random.Random, count: int) -> None:
    """Advance the generator as `count` calls of `randrange(1000, 100000)` do, in a tenth of their time."""
    bits = rng.getrandbits
    while count:
        if bits(_TOKEN_BITS) < _TOKEN_KINDS:
            count -= 1
