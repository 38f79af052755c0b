"""Frames to and from an actor."""

from __future__ import annotations

import threading

import pytest

from headrace.errors import EngineDeadError
from headrace.jobs.workers.on_ray.actor import MailBox
from headrace.jobs.workers.on_ray.channel import MAX_BATCH_BYTES, ActorChannel

PATIENCE_S = 30.0


class Calls:
    """An actor whose `send` can be held."""

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.may_return = threading.Event()
        self.has_sent = threading.Semaphore(0)
        self.is_called = threading.Event()
        self.death: EngineDeadError | None = None
        self.num_kills = 0

    def send(self, frames: list[bytes]) -> None:
        self.is_called.set()
        assert self.may_return.wait(PATIENCE_S)
        if self.death is not None:
            raise self.death
        self.batches.append(frames)
        self.has_sent.release()

    def receive(self, timeout_s: float) -> list[bytes] | None:
        if self.death is not None:
            raise self.death
        return None

    def kill(self) -> None:
        self.num_kills += 1


def test_frames_that_gather_during_a_call_go_together_in_order() -> None:
    calls = Calls()
    channel = ActorChannel(calls)
    channel.send(b"0")
    assert calls.is_called.wait(PATIENCE_S)
    for number in range(1, 6):
        channel.send(b"%d" % number)
    calls.may_return.set()
    assert calls.has_sent.acquire(timeout=PATIENCE_S)
    assert calls.has_sent.acquire(timeout=PATIENCE_S)
    assert calls.batches == [[b"0"], [b"1", b"2", b"3", b"4", b"5"]]
    channel.close()
    assert calls.num_kills == 1


def test_a_batch_is_limited_in_bytes() -> None:
    calls = Calls()
    channel = ActorChannel(calls)
    channel.send(b"")
    assert calls.is_called.wait(PATIENCE_S)
    large = bytes(MAX_BATCH_BYTES)
    channel.send(large)
    channel.send(large)
    calls.may_return.set()
    for _ in range(3):
        assert calls.has_sent.acquire(timeout=PATIENCE_S)
    assert [len(batch) for batch in calls.batches] == [1, 1, 1]
    channel.close()


def test_a_lost_actor_ends_the_channel_with_its_reason() -> None:
    calls = Calls()
    calls.death = EngineDeadError("its node is on fire")
    channel = ActorChannel(calls)
    assert channel.receive() is None
    assert channel.death is calls.death
    with pytest.raises(ConnectionError):
        channel.send(b"late")


def test_an_engine_that_ends_delivers_its_last_frames() -> None:
    mail = MailBox(batch_s=0.0)
    assert mail.take(0.0) == []
    mail.send(b"step")
    mail.send(b"failed")
    mail.hang_up()
    assert mail.take(PATIENCE_S) == [b"step", b"failed"]
    assert mail.take(PATIENCE_S) is None


def test_commands_reach_the_engine_in_order() -> None:
    mail = MailBox()
    mail.put([b"start"])
    mail.put([b"submit", b"abort"])
    assert mail.receive(PATIENCE_S) == [b"start", b"submit", b"abort"]
    assert mail.receive(0.0) == []
