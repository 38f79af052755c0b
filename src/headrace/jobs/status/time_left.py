"""Estimates how long the rest of a job takes: from tokens, since lines differ, and at least the longest answer."""

from __future__ import annotations

from dataclasses import dataclass

FORGET = 0.97  # the weight of an interval is multiplied by this with each later one
CERTAIN = 1e-3  # how much the mix of prompt and decode tokens must have varied to separate their costs


@dataclass(frozen=True, slots=True)
class TokensLeft:
    """Tokens of all lines without an answer."""

    num_prompt_tokens: float  # to compute
    num_decode_tokens: float
    longest: float  # tokens that the longest answer still has to decode, one per step


class TokenCosts:
    """Seconds per prompt token and per decode token, by least squares over the intervals so far."""

    def __init__(self) -> None:
        self._pp = self._pd = self._dd = self._ps = self._ds = 0.0
        self._seconds = self._tokens = 0.0

    def add(self, num_prompt_tokens: float, num_decode_tokens: float, seconds: float) -> None:
        p, d, s = num_prompt_tokens, num_decode_tokens, seconds
        self._pp, self._pd, self._dd = FORGET * self._pp + p * p, FORGET * self._pd + p * d, FORGET * self._dd + d * d
        self._ps, self._ds = FORGET * self._ps + p * s, FORGET * self._ds + d * s
        self._seconds, self._tokens = FORGET * self._seconds + s, FORGET * self._tokens + p + d

    def seconds_for(self, num_prompt_tokens: float, num_decode_tokens: float) -> float | None:
        """Returns None while nothing was computed."""
        if self._tokens <= 0:
            return None
        prompt_cost, decode_cost = self._costs()
        return prompt_cost * num_prompt_tokens + decode_cost * num_decode_tokens

    def _costs(self) -> tuple[float, float]:
        """Per prompt token and per decode token; the same for both if they cannot be separated."""
        determinant = self._pp * self._dd - self._pd * self._pd
        if determinant > CERTAIN * self._pp * self._dd:
            prompt_cost = (self._ps * self._dd - self._ds * self._pd) / determinant
            decode_cost = (self._ds * self._pp - self._ps * self._pd) / determinant
            if prompt_cost >= 0 and decode_cost >= 0:
                return prompt_cost, decode_cost
        mean = self._seconds / self._tokens
        return mean, mean


def seconds_left(left: TokensLeft, costs: TokenCosts, *, step_seconds: float) -> float | None:
    """The tokens at the measured costs, or the longest answer alone if that takes longer."""
    body = costs.seconds_for(left.num_prompt_tokens, left.num_decode_tokens)
    return None if body is None else max(body, left.longest * step_seconds)
