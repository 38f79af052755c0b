"""For tests of blocks from a disk: whether they are read must not depend on how fast this machine is."""

from __future__ import annotations

import pytest

from headrace.sched import fetching
from headrace.sched.compute_rate import ComputeRate


def trust_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every prompt of this process wait for all of its blocks."""
    monkeypatch.setattr(ComputeRate, "token_s", lambda *_: None)
    monkeypatch.setattr(fetching, "MAX_TRUST_S", 600.0)
