"""How fast the device computes prompts, by the large ones of its steps."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from headrace.steps import StepPlan

MEAN_WEIGHT = 0.2  # of the newest step


class _Step(NamedTuple):
    number: int
    num_tokens: int
    has_prompts: bool
    planned_at: float


class ComputeRate:
    """Owned by `Fetching`. Small steps say nothing about the time of a large one, so only steps with prompts and at
    least half as many tokens as the largest one count."""

    def __init__(self, max_step_tokens: int) -> None:
        self._max_step_tokens = max_step_tokens
        self._largest = 0  # tokens of a step
        self._token_s: float | None = None
        self._in_flight: deque[_Step] = deque()
        self._applied_at = float("-inf")

    def planned(self, plan: StepPlan, now: float) -> None:
        has_prompts = plan.drafts is None and plan.num_batched_tokens > len(plan.slots)
        self._in_flight.append(_Step(plan.step, plan.num_batched_tokens, has_prompts, now))

    def applied(self, number: int, now: float) -> None:
        """A step's result has arrived. It began when it was planned, or when the step before it ended."""
        while self._in_flight and self._in_flight[0].number <= number:
            step = self._in_flight.popleft()
            begun_at, self._applied_at = max(step.planned_at, self._applied_at), now
            if step.has_prompts:
                self._learn(step.num_tokens, now - begun_at)

    def _learn(self, num_tokens: int, seconds: float) -> None:
        if 2 * num_tokens < self._largest:
            return
        token_s = seconds / num_tokens
        if self._token_s is None or num_tokens > 2 * self._largest:
            self._token_s = token_s
        else:
            # Towards a faster device at once: if it is thought too slow, nothing large is computed that would show it.
            self._token_s = min(token_s, self._token_s + MEAN_WEIGHT * (token_s - self._token_s))
        self._largest = max(self._largest, num_tokens)

    def token_s(self, num_tokens: int) -> float | None:
        """Seconds for each of so many tokens of prompts; None: unknown, as no step had half as many."""
        needed = min(num_tokens, self._max_step_tokens)
        return None if 2 * self._largest < needed else self._token_s

    def in_flight_s(self, now: float) -> float:
        """The time until all planned steps have ended."""
        if self._token_s is None or not self._in_flight:
            return 0.0
        begun_at = max(self._in_flight[0].planned_at, self._applied_at)
        return max(0.0, begun_at + sum(step.num_tokens for step in self._in_flight) * self._token_s - now)
