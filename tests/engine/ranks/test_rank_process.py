from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, count, repeat
from types import SimpleNamespace

import pytest

from headrace.engine.ranks import rank_process, wire
from headrace.engine.ranks.rank_process import RankProcess
from headrace.errors import EngineDeadError

STARTED, HEARTBEAT = wire.encode(wire.Started()), wire.encode(wire.Heartbeat())


class Owner:
    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.errors: list[EngineDeadError] = []

    def took(self, rank: int, frame: bytes) -> None:
        self.frames.append(frame)

    def ended(self, error: EngineDeadError) -> None:
        self.errors.append(error)


def watched(monkeypatch: pytest.MonkeyPatch, received: Iterator[list[bytes]]) -> Owner:
    """A rank that sends these frames, one list a second, is watched until it is said to hang."""
    seconds = count()
    monkeypatch.setattr(rank_process, "monotonic", lambda: float(next(seconds)))
    owner = Owner()
    rank = RankProcess(owner, 1, "rank 1 of 2")
    rank._theirs.close()
    rank._channel.close()
    rank._channel = SimpleNamespace(receive=lambda timeout_s: next(received))  # type: ignore[assignment]
    rank.process = SimpleNamespace(pid=7, poll=lambda: 0)  # type: ignore[assignment]
    rank._receive()
    return owner


def test_a_rank_may_be_silent_while_it_imports_torch_and_not_after(monkeypatch: pytest.MonkeyPatch) -> None:
    silence: repeat[list[bytes]] = repeat([])
    owner = watched(monkeypatch, chain([[HEARTBEAT]], repeat([], 30), [[STARTED]], silence))
    assert owner.frames == [HEARTBEAT, STARTED]
    assert [str(error) for error in owner.errors] == [
        "rank 1 of 2 (process 7) hangs: its process sent no heartbeat for 11 s"
    ]


def test_a_rank_that_never_ends_its_import_hangs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    (error,) = watched(monkeypatch, repeat([])).errors
    assert "no heartbeat for 121 s" in str(error)
