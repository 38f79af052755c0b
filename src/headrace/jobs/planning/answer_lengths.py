"""Expected lengths of answers: their limits at first, then the mean of similar answers that finished in this job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MIN_FINISHED = 16  # answers, before their mean is used for others
NUM_PROBES = 2 * MIN_FINISHED  # lines of a prefix group that start early, to learn from
MAX_KINDS = 4096


@dataclass(slots=True)
class _Mean:
    num_started: int = 0
    num_finished: int = 0
    total: float = 0.0

    def add(self, value: float) -> None:
        self.num_finished += 1
        self.total += value

    @property
    def value(self) -> float | None:
        return self.total / self.num_finished if self.num_finished >= MIN_FINISHED else None

    @property
    def seems_long(self) -> bool:
        """Many have started and few have ended. Short answers end first, so the mean says nothing yet."""
        return self.num_started >= NUM_PROBES and 4 * self.num_finished < self.num_started


class AnswerLengths:
    """Estimates answer lengths from three means: by prefix group and `max_tokens`, by `max_tokens` alone, and as a
    share of the limit. The first one with enough finished answers is used."""

    def __init__(self) -> None:
        self._means: dict[Any, _Mean] = {}  # the oldest first
        self._share = _Mean()

    @property
    def num_learned(self) -> int:
        return self._share.num_finished

    def has_started(self, *, prefix_group: int, max_tokens: int | None) -> bool:
        return (prefix_group, max_tokens) in self._means

    def start(self, *, prefix_group: int, max_tokens: int | None) -> None:
        self._mean((prefix_group, max_tokens)).num_started += 1

    def learn(self, num_tokens: int, *, prefix_group: int, max_tokens: int | None, limit: int) -> None:
        self._share.add(num_tokens / max(1, limit))
        self._mean((prefix_group, max_tokens)).add(num_tokens)
        self._mean(max_tokens).add(num_tokens)

    def expected(self, *, prefix_group: int, max_tokens: int | None, limit: int) -> float:
        """Tokens of one answer, at most `limit`."""
        own = self._means.get((prefix_group, max_tokens))
        if own is not None and own.seems_long:
            return limit
        for mean in (own, self._means.get(max_tokens)):
            if mean is not None and mean.value is not None:
                return min(limit, mean.value)
        share = self._share.value
        return limit if share is None else limit * share

    def _mean(self, kind: Any) -> _Mean:
        mean = self._means.get(kind)
        if mean is None:
            if len(self._means) >= MAX_KINDS:
                del self._means[next(iter(self._means))]
            mean = self._means[kind] = _Mean()
        return mean
