"""Limits of a job's retries."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from headrace.engine.restart_policy import JOB_RESTARTS, RestartPolicy


@dataclass(frozen=True, kw_only=True)
class RetryRules:
    """Rules for failures that the request did not cause."""

    max_attempts: int = 5  # of a line that the engine answers with an error
    max_idle_deaths: int = 4  # deaths of engines in a row without a line done and without a smaller set of suspects
    restarts: RestartPolicy = JOB_RESTARTS  # its delays apply to retries of lines too

    def delay_s(self, num_failures: int, random: Random) -> float:
        return self.restarts.delay_s(num_failures, random)
