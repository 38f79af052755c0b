"""The seed of a test run. Each test gets its random numbers from it and from the test's name, whatever ran before.

    HEADRACE_TEST_SEED=7 pytest tests/kernels        another seed than the fixed default (make test-seeds)

Hypothesis gets the seed too. Where its profile repeats the same examples (in CI), a named seed takes precedence.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys

import hypothesis
import numpy as np

VARIABLE = "HEADRACE_TEST_SEED"
DEFAULT_SEED = 0
PROFILE = "headrace"


def run_seed() -> int:
    given = os.environ.get(VARIABLE, "").strip() or str(DEFAULT_SEED)
    if not given.isdecimal():
        raise ValueError(f"{VARIABLE} must be a whole number from 0, got {given!r}")
    return int(given)


def seed_of(test: str) -> int:
    """The seed of one test, of 64 bits. `test` is its node id."""
    digest = hashlib.sha256(f"{run_seed()} {test}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


def load_hypothesis_profile() -> None:
    """No test fails because the machine is slow: examples have no time limit. The rest is as in the current profile,
    which in CI is Hypothesis's own `ci`: the same examples in each run.
    """
    current = hypothesis.settings()
    hypothesis.settings.register_profile(
        PROFILE,
        parent=current,
        deadline=None,
        derandomize=current.derandomize and VARIABLE not in os.environ,
        suppress_health_check=[*current.suppress_health_check, hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile(PROFILE)
