"""How much background work (lines of batches) a step may have while interactive requests are served.

    ──── a step that runs ────┬── its own steps ──┬── decodes ───────────────
            ▲                 │ no background     │ beside background work
            a prompt arrives and waits

A prompt waits for the end of the step that runs when it arrives, and streams wait for each step. So while interactive
requests are there or were there a short time ago, the number of background tokens per step follows the measured time
of such steps:

- A step without interactive sequences takes at most MAX_WAIT of the time in which a prompt is computed, and no other
  such step is queued behind it if both would take longer.
- A step beside interactive decodes takes at most MAX_SLOWDOWN times as long as without background work.

Without interactive requests nothing is limited.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from headrace.steps import StepPlan

RECENT_S = 30.0  # after the last interactive request: the next one probably comes soon
MAX_WAIT = 0.75  # of the mean time of an interactive prompt
MAX_SLOWDOWN = 2.0
MIN_STEP = 1.25  # of a step with interactive decodes only: fewer tokens would hardly make a step shorter
MEAN_WEIGHT = 0.2  # of the newest value in a mean
DEAD_BAND = (0.75, 1.0)  # shares of the time for background tokens that change nothing, so that steps stay steady
MAX_GROWTH, MAX_SHRINKING = 1.25, 0.25  # per step
MIN_LEARNED_TOKENS = 16  # of a step; fewer say little about the time of a token
NUM_KNOWN_STEPS = 256


@dataclass(frozen=True, slots=True)
class BackgroundLimit:
    """Of one step."""

    max_tokens: int | None = None  # of background sequences; None: no limit
    has_interactive: bool = False  # interactive sequences decode in it
    must_wait: bool = False  # it is planned after the steps in flight: a prompt that arrives would wait too long


NO_LIMIT = BackgroundLimit()


@dataclass(frozen=True, slots=True)
class _Step:
    number: int
    planned_at: float
    num_tokens: int
    num_background: int | None  # tokens, if they were limited
    has_interactive: bool
    is_decode: bool  # of interactive sequences only


class BackgroundPace:
    """Owned by the scheduler, which gives it the time."""

    def __init__(self, max_tokens: int) -> None:
        self._num_interactive = 0  # unfinished sequences
        self._num_background = 0
        self._last_interactive_at = float("-inf")
        self._prompt_s: float | None = None  # mean time of an interactive prompt, from its first step on
        self._decode_s: float | None = None  # of the last step with interactive decodes only
        self._token_s: float | None = None  # mean time per token of steps with many
        self._measures_decode = False  # the next step with interactive sequences has no background work
        self._alone, self._beside = _Limit(max_tokens), _Limit(max_tokens)
        self._in_flight: deque[_Step] = deque()
        self._begun_at: dict[int, float] = {}  # by step
        self._applied_at = float("-inf")

    # ---- sequences

    def added(self, num_sequences: int, *, prompt_len: int, is_background: bool) -> None:
        if is_background:
            self._num_background += num_sequences
            return
        self._num_interactive += num_sequences
        if self._prompt_s is None and self._token_s is not None:
            self._prompt_s = self._token_s * prompt_len

    def ended(self, now: float, *, is_background: bool) -> None:
        if is_background:
            self._num_background -= 1
        else:
            self._num_interactive -= 1
            self._last_interactive_at = now

    def computed_prompt(self, since: int, now: float) -> None:
        """The prompt of an interactive sequence is computed; its first step was `since`."""
        oldest = next(iter(self._begun_at.values()), now)
        self._prompt_s = _mean(self._prompt_s, now - self._begun_at.get(since, oldest))
        self._measures_decode = True

    # ---- steps

    def is_limiting(self, now: float) -> bool:
        if not self._num_background or self._prompt_s is None:
            return False
        return self._num_interactive > 0 or now - self._last_interactive_at < RECENT_S

    def limit(self, *, has_interactive: bool, is_paused: bool) -> BackgroundLimit:
        """Of the next step, while `is_limiting`. `has_interactive`: interactive sequences decode in it. `is_paused`: it
        computes an interactive prompt, and has no background work."""
        if has_interactive and self._measures_decode:
            return BackgroundLimit(0, has_interactive)
        given = self._beside if has_interactive else self._alone
        if given.last_s is None and self._token_s is not None:
            given.guess(self._target_s(has_interactive=has_interactive) / self._token_s)
        would_take_s = (len(self._in_flight) + 1) * (given.last_s or 0.0)
        must_wait = bool(self._in_flight) and not is_paused and would_take_s > self._max_wait_s
        return BackgroundLimit(given.num_tokens, has_interactive, must_wait)

    def planned(self, plan: StepPlan, now: float, limit: BackgroundLimit, *, num_background: int) -> None:
        is_decode = limit.has_interactive and not num_background and plan.num_batched_tokens == len(plan.slots)
        self._measures_decode = self._measures_decode and not is_decode
        self._in_flight.append(
            _Step(
                number=plan.step,
                planned_at=now,
                num_tokens=plan.num_batched_tokens,
                num_background=None if limit.max_tokens is None else num_background,
                has_interactive=limit.has_interactive,
                is_decode=is_decode,
            )
        )

    def applied(self, number: int, now: float) -> None:
        """A step's result has arrived. It began when it was planned, or when the step before it ended."""
        while self._in_flight and self._in_flight[0].number <= number:
            step = self._in_flight.popleft()
            begun_at, self._applied_at = max(step.planned_at, self._applied_at), now
            self._begun_at[step.number] = begun_at
            self._begun_at.pop(step.number - NUM_KNOWN_STEPS, None)
            self._learn(step, now - begun_at)

    def _learn(self, step: _Step, seconds: float) -> None:
        if step.num_tokens >= MIN_LEARNED_TOKENS:
            self._token_s = _mean(self._token_s, seconds / step.num_tokens)
        if step.is_decode:
            self._decode_s = seconds
        elif step.num_background:
            limit = self._beside if step.has_interactive else self._alone
            target_s, fixed_s = self._target_s(has_interactive=step.has_interactive), self._decode_s or 0.0
            limit.learn(step.num_background, seconds, share=(seconds - fixed_s) / (target_s - fixed_s))

    @property
    def _max_wait_s(self) -> float:
        assert self._prompt_s is not None
        return max(MAX_WAIT * self._prompt_s, MIN_STEP * (self._decode_s or 0.0))

    def _target_s(self, *, has_interactive: bool) -> float:
        if has_interactive and self._decode_s is not None:
            return MAX_SLOWDOWN * self._decode_s
        return self._max_wait_s


class _Limit:
    """The number of background tokens with which a step takes about a given time."""

    def __init__(self, max_tokens: int) -> None:
        self.num_tokens = max_tokens
        self.last_s: float | None = None  # time of the last such step
        self._max_tokens = max_tokens

    def guess(self, num_tokens: float) -> None:
        self.num_tokens = max(1, min(self._max_tokens, int(num_tokens)))

    def learn(self, num_tokens: int, seconds: float, *, share: float) -> None:
        """`share`: of the time that its background tokens may take."""
        self.last_s = seconds
        low, high = DEAD_BAND
        if share > high:
            wanted = max(num_tokens * low / share, num_tokens * MAX_SHRINKING)
            self.num_tokens = max(1, min(self.num_tokens, int(wanted)))
        elif share < low and num_tokens >= self.num_tokens:
            wanted = min(num_tokens * high / max(share, 0.01), num_tokens * MAX_GROWTH)
            self.num_tokens = min(self._max_tokens, max(self.num_tokens + 1, int(wanted)))


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + MEAN_WEIGHT * (value - before)
