"""How long the rest of a job will take: from tokens, as lines are not alike, and never less than its tail."""

from __future__ import annotations

from dataclasses import dataclass

FORGET = 0.97  # how much an interval counts when the next has come
CERTAIN = 1e-3  # how unlike the mixtures of prompt and answer must have been to tell their costs apart


@dataclass(frozen=True, slots=True)
class TokensLeft:
    """Of all lines that are not answered."""

    num_prompt_tokens: float  # to compute
    num_decode_tokens: float
    longest: float  # tokens that the longest answer still has to draw, one a step


class TokenCosts:
    """What a prompt token and a drawn token cost in seconds, by least squares over the intervals so far."""

    def __init__(self) -> None:
        self._pp = self._pd = self._dd = self._ps = self._ds = 0.0
        self._seconds = self._tokens = 0.0

    def add(self, num_prompt_tokens: float, num_decode_tokens: float, seconds: float) -> None:
        p, d, s = num_prompt_tokens, num_decode_tokens, seconds
        self._pp, self._pd, self._dd = FORGET * self._pp + p * p, FORGET * self._pd + p * d, FORGET * self._dd + d * d
        self._ps, self._ds = FORGET * self._ps + p * s, FORGET * self._ds + d * s
        self._seconds, self._tokens = FORGET * self._seconds + s, FORGET * self._tokens + p + d

    def seconds_for(self, num_prompt_tokens: float, num_decode_tokens: float) -> float | None:
        """None as long as nothing was computed."""
        if self._tokens <= 0:
            return None
        prompt_cost, decode_cost = self._costs()
        return prompt_cost * num_prompt_tokens + decode_cost * num_decode_tokens

    def _costs(self) -> tuple[float, float]:
        """Of a prompt token and a drawn one; the same for both where they cannot be told apart."""
        determinant = self._pp * self._dd - self._pd * self._pd
        if determinant > CERTAIN * self._pp * self._dd:
            prompt_cost = (self._ps * self._dd - self._ds * self._pd) / determinant
            decode_cost = (self._ds * self._pp - self._ps * self._pd) / determinant
            if prompt_cost >= 0 and decode_cost >= 0:
                return prompt_cost, decode_cost
        mean = self._seconds / self._tokens
        return mean, mean


def seconds_left(left: TokensLeft, costs: TokenCosts, *, step_seconds: float) -> float | None:
    """The work at the present speed, or the longest answer alone if that takes longer."""
    body = costs.seconds_for(left.num_prompt_tokens, left.num_decode_tokens)
    return None if body is None else max(body, left.longest * step_seconds)
