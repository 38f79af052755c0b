"""One connection, fed by hand: framing, keep-alive, lost connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from headrace.bench.load.answer import Answer
from headrace.bench.load.connection import Connection
from tests.bench.load.streams import COMPLETION, STREAM_HEAD, STREAMS, chunked, sized


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted


class Fed:
    """A connection with a request in flight. The clock shows how often bytes have arrived."""

    def __init__(self) -> None:
        self.now = 0.0
        self.transport = Transport()
        self.connection = Connection(lambda: self.now)
        self.connection.connection_made(self.transport)
        self.answer = Answer()
        self.ended = self.connection.ask(b"GET", self.answer)

    def feed(self, *pieces: bytes) -> Fed:
        for piece in pieces:
            self.now += 1
            self.connection.data_received(piece)
        return self


def in_loop(test: Callable[[], None]) -> None:
    async def run() -> None:
        test()

    asyncio.run(run())


@pytest.mark.parametrize("name", STREAMS)
def test_every_split_of_a_chunked_response_reads_the_same(name: str) -> None:
    stream, num_chunks = STREAMS[name]
    response = STREAM_HEAD + chunked(stream, 37)

    def test() -> None:
        for place in range(1, len(response)):
            fed = Fed().feed(response[:place], response[place:])
            assert fed.ended.done()
            assert fed.answer.error is None, place
            assert len(fed.answer.chunk_at) == num_chunks
            assert fed.connection.is_reusable

    in_loop(test)


def test_a_connection_answers_one_request_after_the_other() -> None:
    def test() -> None:
        fed = Fed().feed(STREAM_HEAD + chunked(COMPLETION, 1000))
        again = Answer()
        ended = fed.connection.ask(b"GET", again)
        fed.feed(sized(200, COMPLETION, "text/event-stream"))
        assert ended.done()
        assert again.error is None
        assert again.chunk_at == [2.0] * 5
        assert fed.transport.written == [b"GET", b"GET"]

    in_loop(test)


def test_an_http_error_keeps_the_connection() -> None:
    def test() -> None:
        fed = Fed().feed(sized(503, b'{"error":{"message":"queue full"}}'))
        assert fed.answer.http_status == 503
        assert fed.answer.error == "HTTP 503: queue full"
        assert fed.connection.is_reusable

    in_loop(test)


def test_connection_close_is_obeyed() -> None:
    def test() -> None:
        fed = Fed().feed(sized(200, COMPLETION, "text/event-stream", "Connection: close\r\n"))
        assert fed.answer.error is None
        assert not fed.connection.is_reusable
        assert fed.transport.is_aborted

    in_loop(test)


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    def test() -> None:
        fed = Fed().feed(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", COMPLETION)
        assert not fed.ended.done()
        fed.connection.connection_lost(None)
        assert fed.ended.done()
        assert fed.answer.error is None
        assert fed.answer.chunk_at == [2.0] * 5

    in_loop(test)


def test_an_interim_response_is_skipped() -> None:
    def test() -> None:
        fed = Fed().feed(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", STREAM_HEAD + chunked(COMPLETION, 99))
        assert fed.answer.http_status == 200
        assert fed.answer.error is None
        assert len(fed.answer.chunk_at) == 5

    in_loop(test)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.7])
def test_a_lost_connection_fails_the_request(share: float) -> None:
    response = STREAM_HEAD + chunked(COMPLETION, 50)

    def test() -> None:
        fed = Fed()
        if share:
            fed.feed(response[: int(share * len(response))])
        fed.connection.connection_lost(ConnectionResetError(104, "Connection reset by peer"))
        assert fed.ended.done()
        where = "in the middle of the answer" if share else "without a response"
        assert fed.answer.error == f"the server closed the connection {where} (Connection reset by peer)"

    in_loop(test)


def test_a_connection_lost_after_done_has_its_answer() -> None:
    response = STREAM_HEAD + chunked(COMPLETION, 10_000).removesuffix(b"0\r\n\r\n")

    def test() -> None:
        fed = Fed().feed(response)
        fed.connection.connection_lost(None)
        assert fed.answer.error is None
        assert not fed.connection.is_reusable

    in_loop(test)


def test_what_is_not_http_fails_and_closes() -> None:
    def test() -> None:
        fed = Fed().feed(b"SSH-2.0-OpenSSH_9.6\r\n")
        assert fed.ended.done()
        assert fed.answer.error is not None and "not HTTP" in fed.answer.error
        assert fed.transport.is_aborted

    in_loop(test)


def test_a_request_that_is_given_up_closes_the_connection() -> None:
    def test() -> None:
        fed = Fed().feed(STREAM_HEAD)
        fed.connection.give_up("not answered within 5 s")
        assert fed.answer.error == "not answered within 5 s"
        assert fed.transport.is_aborted
        fed.connection.connection_lost(None)  # does not change the verdict
        assert fed.answer.error == "not answered within 5 s"

    in_loop(test)


def test_bytes_that_nobody_asked_for_close_the_connection() -> None:
    def test() -> None:
        fed = Fed().feed(STREAM_HEAD + chunked(COMPLETION, 99))
        fed.feed(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
        assert not fed.connection.is_reusable

    in_loop(test)
