from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.process.channel import Channel

Pair = tuple[Channel, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = map(Channel, socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def take(channel: Channel, num_frames: int) -> list[bytes]:
    frames: list[bytes] = []
    while len(frames) < num_frames:
        more = channel.receive()
        assert more
        frames += more
    return frames


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=20), st.lists(st.integers(1, 50), min_size=1))
@settings(max_examples=50)
def test_frames_are_the_same_however_the_bytes_are_split(frames: list[bytes], sizes: list[int]) -> None:
    left, right = socket.socketpair()
    with left, right:
        sender, receiver = socket.socketpair()
        with receiver:
            channel = Channel(sender)
            for frame in frames:
                channel.send(frame)
            channel.close()
            data = b"".join(iter(lambda: receiver.recv(4096), b""))
        receiving = Channel(right)
        received: list[bytes] = []
        while data:
            size = sizes[len(received) % len(sizes)]
            left.sendall(data[:size])
            data = data[size:]
            received += receiving.receive(0.0) or []
        received += receiving.receive(0.0) or []
        assert received == frames


def test_a_sender_does_not_wait_for_a_peer_that_reads_nothing(pair: Pair) -> None:
    ours, theirs = pair
    frames = [bytes([i]) * 300_000 for i in range(20)]  # more than any socket takes
    for frame in frames:
        ours.send(frame)
    assert take(theirs, len(frames)) == frames


def test_frames_of_several_threads_stay_whole_and_in_order(pair: Pair) -> None:
    ours, theirs = pair

    def send(name: int) -> None:
        for number in range(50):
            ours.send(bytes([name, number]) * 5_000)

    threads = [threading.Thread(target=send, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    frames = take(theirs, 200)
    for thread in threads:
        thread.join()
    assert all(frame == frame[:2] * 5_000 for frame in frames)
    for name in range(4):
        assert [frame[1] for frame in frames if frame[0] == name] == list(range(50))


def test_with_a_full_backlog_the_sender_waits_until_the_peer_reads() -> None:
    end, other = socket.socketpair()
    ours, theirs = Channel(end, max_backlog_bytes=100_000), Channel(other)
    sent = threading.Semaphore(0)

    def send() -> None:
        for _ in range(40):
            ours.send(bytes(200_000))
            sent.release()

    thread = threading.Thread(target=send)
    thread.start()
    assert sent.acquire(timeout=60)
    assert len(take(theirs, 40)) == 40
    thread.join()
    ours.close()
    theirs.close()


def test_what_was_sent_before_the_end_arrives_and_then_the_end(pair: Pair) -> None:
    ours, theirs = pair
    ours.send(b"last frame")
    ours.hang_up()
    assert theirs.receive() == [b"last frame"]
    assert theirs.receive() is None


def test_hanging_up_wakes_the_receiver_on_the_same_end(pair: Pair) -> None:
    ours, _ = pair
    received: list[object] = []
    thread = threading.Thread(target=lambda: received.append(ours.receive()))
    thread.start()
    ours.hang_up()
    thread.join()
    assert received == [None]


def test_sending_without_a_peer_is_an_error(pair: Pair) -> None:
    ours, theirs = pair
    theirs.close()
    with pytest.raises(ConnectionError):
        ours.send(b"hello")
    ours.hang_up()
    with pytest.raises(ConnectionError, match="closed"):
        ours.send(b"hello")


def test_receiving_with_a_timeout_returns_no_frames_after_it(pair: Pair) -> None:
    ours, theirs = pair
    assert theirs.receive(0.0) == []
    ours.send(b"now")
    assert theirs.receive(60.0) == [b"now"]
