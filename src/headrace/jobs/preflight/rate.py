"""The throughput by which a check estimates time: a number, or the summary of an earlier run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.errors import JobError


@dataclass(frozen=True, slots=True)
class Rate:
    """Generated tokens per second, and the mean length of answers where an earlier run measured it."""

    tokens_per_second: float
    source: str
    tokens_per_answer: float | None = None

    @classmethod
    def read(cls, given: str) -> Rate:
        """A number, or the path of a summary that `--json-summary` wrote."""
        try:
            number = float(given)
        except ValueError:
            return cls._of_summary(given)
        if number <= 0:
            raise JobError(f"a rate must be above 0 tokens per second, got {given}")
        return cls(number, "as given")

    @classmethod
    def _of_summary(cls, path: str) -> Rate:
        try:
            with open(path, "rb") as file:
                summary = msgspec.json.decode(file.read(), type=dict[str, Any])
            rate, answered = float(summary["completion_tokens_per_second"]), int(summary["answered"])
            tokens = int(summary["completion_tokens"])
        except (OSError, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
            raise JobError(f"{path} is neither a number nor a summary of --json-summary: {error!r}") from None
        if rate <= 0 or answered <= 0:
            raise JobError(f"{path} is the summary of a job without answers, which has no rate; give --rate a number")
        return cls(rate, f"as in {path} ({summary.get('model')})", tokens / answered)
