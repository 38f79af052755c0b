"""Jobs on simulated workers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.engine.start import Engine
from tests.jobs.workers.simulation import Mix, simulate, stopped_engine

Start = Callable[..., Engine]


@pytest.mark.parametrize("max_sequences", [22, 392])
def test_workers_that_are_equally_busy_get_more_lines(start: Start, max_sequences: int) -> None:
    """15 / 22 * 22 < 15 and 1 / 392 * 392 < 1 in floating point."""
    mix = Mix(num_lines=40, num_workers=2, max_sequences=max_sequences)
    assert sum(simulate(mix, 0, stopped_engine(start)).is_answered.values()) == 40
