"""The parser, the gate and uvicorn together, over real sockets."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.server.live import Live, is_closed, read_answer, run, until

TIMEOUT_S = 1.0  # of the server, where a client must connect and send within it
HEAD = b"POST /echo HTTP/1.1\r\nHost: x\r\n"
WHOLE = HEAD + b"Content-Length: 3\r\n\r\nabc"


def answered(*parts: bytes, **options: object) -> tuple[int, str | None]:
    """Send the parts and return the status and error code of the response."""
    found: list[tuple[int, str | None]] = []

    async def body() -> None:
        async with Live(**options) as live:
            answer = await live.ask(*parts)
            found.append((answer.status, answer.error["code"] if answer.status >= 400 else None))
            await until(lambda: live.tiny.num_running == 0)

    run(body)
    return found[0]


# ---- headers: CVE-2025-48956


def test_a_request_is_answered() -> None:
    assert answered(WHOLE) == (200, None)


def test_a_huge_header_is_refused_before_it_is_complete() -> None:
    assert answered(HEAD + b"X-Bomb: " + b"x" * 70_000) == (431, "headers_too_large")


def test_a_megabyte_of_header_is_refused_and_not_kept() -> None:
    async def body() -> None:
        async with Live() as live:
            reader, writer = await live.connect()
            writer.write(HEAD + b"X-Bomb: ")
            for _ in range(1024):
                writer.write(b"x" * 1024)
            assert (await read_answer(reader)).status == 431
            writer.close()
            await until(lambda: live.lifecycle.num_connections == 0)
            assert live.refused == ["headers_too_large"]
            assert live.tiny.num_running == 0

    run(body)


def test_complete_headers_over_the_limit_are_refused() -> None:
    head = b"".join(b"X-%d: %s\r\n" % (number, b"y" * 1000) for number in range(70))
    assert answered(HEAD + head + b"\r\n") == (431, "headers_too_large")


def test_five_thousand_headers_are_refused() -> None:
    head = b"".join(b"X-%d: y\r\n" % number for number in range(5000))
    assert answered(HEAD + head + b"\r\n", max_header_bytes=1 << 20) == (431, "headers_too_large")


def test_a_long_url_counts_towards_the_header_limit() -> None:
    assert answered(b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n") == (431, "headers_too_large")


def test_headers_within_the_limits_pass() -> None:
    head = b"".join(b"X-%d: %s\r\n" % (number, b"y" * 200) for number in range(200))
    assert answered(HEAD + head + b"Content-Length: 3\r\n\r\nabc") == (200, None)


def test_the_limits_apply_to_every_request_of_a_connection() -> None:
    async def body() -> None:
        async with Live() as live:
            reader, writer = await live.connect()
            for _ in range(3):
                writer.write(WHOLE)
                assert (await read_answer(reader)).status == 200
            writer.write(HEAD + b"X-Bomb: " + b"x" * 70_000)
            assert (await read_answer(reader)).status == 431
            assert await is_closed(reader)
            writer.close()

    run(body)


# ---- bodies


def test_a_content_length_over_the_limit_is_refused_before_the_body_arrives() -> None:
    assert answered(HEAD + b"Content-Length: 268435456\r\n\r\n", max_body_bytes=1000) == (
        413,
        "body_too_long",
    )


def test_chunks_over_the_limit_are_refused() -> None:
    chunks = [b"%x\r\n%s\r\n" % (500, b"a" * 500)] * 3
    assert answered(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *chunks, b"0\r\n\r\n", max_body_bytes=1000) == (
        413,
        "body_too_long",
    )


def test_many_tiny_chunks_are_one_body() -> None:
    """CVE-2025-23310: a server kept memory for each chunk."""
    assert answered(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 99 + b"0\r\n\r\n") == (200, None)


@pytest.mark.parametrize(
    "request_",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS to a plain port
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",  # smuggling
        HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Bad Header: x\r\n\r\n",
        HEAD + b"X: a\x00b\r\n\r\n",
        b"GET http:// HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_invalid_http_is_a_bad_request(request_: bytes) -> None:
    assert answered(request_) == (400, "bad_request")


def test_an_invalid_chunk_ends_the_request_and_its_handler() -> None:
    assert answered(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"zz\r\n") == (400, "bad_request")


def test_an_upgrade_is_ignored_and_the_request_is_answered() -> None:
    upgrade = b"GET /echo HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert answered(upgrade) == (200, None)


def test_an_absolute_url_is_checked_by_its_path() -> None:
    assert answered(b"GET http://evil/v1/models HTTP/1.1\r\nHost: /health\r\n\r\n", api_key="k") == (
        401,
        "invalid_api_key",
    )


@pytest.mark.parametrize(
    "path", [b"/health/../v1/models", b"//v1/models", b"/%2e%2e/v1", b"/health%2f..%2fv1", b"/health%00"]
)
def test_no_spelling_of_a_path_gets_past_the_gate(path: bytes) -> None:
    assert answered(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n", api_key="k") == (401, "invalid_api_key")


# ---- time


def test_headers_that_do_not_arrive_time_out() -> None:
    assert answered(HEAD + b"X-Slow: ", read_timeout_s=TIMEOUT_S) == (408, "read_timeout")


def test_a_body_that_does_not_arrive_times_out() -> None:
    assert answered(HEAD + b"Content-Length: 10\r\n\r\nabc", read_timeout_s=TIMEOUT_S) == (408, "read_timeout")


def test_a_silent_connection_is_closed() -> None:
    async def body() -> None:
        async with Live(read_timeout_s=0.05) as live:
            reader, writer = await live.connect()
            assert await reader.read() == b""
            writer.close()

    run(body)


KEYED = b"Authorization: Bearer secret\r\n"


@pytest.mark.parametrize(
    ("request_", "rest", "status"),
    [
        (HEAD + KEYED + b"Content-Length: 3\r\n\r\nabc", b"", b"200"),
        (HEAD + KEYED + b"Content-Length: 3\r\n\r\nabc", b"\r\n", b"200"),
        (HEAD + b"Content-Length: 3\r\n\r\n", b"abc", b"401"),  # answered before its body arrives
        (HEAD + KEYED + b"Content-Length: 9999999\r\n\r\n", b"abc", b"413"),
    ],
)
def test_an_idle_connection_is_closed_after_its_answer(
    monkeypatch: pytest.MonkeyPatch, request_: bytes, rest: bytes, status: bytes
) -> None:
    monkeypatch.setattr("headrace.server.http.lifecycle.KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr("headrace.server.http.gate.DROP_BODY_S", 0.05)

    async def body() -> None:
        async with Live(read_timeout_s=1000, api_key="secret") as live:
            reader, writer = await live.connect()
            writer.write(request_)
            assert status in await reader.readuntil(b"\r\n\r\n")
            writer.write(rest)
            await reader.read()
            writer.close()
            await until(lambda: live.lifecycle.num_connections == 0)

    run(body)


def test_a_client_of_http_1_0_gets_a_stream_without_chunks_that_ends_with_the_connection() -> None:
    async def body() -> None:
        async with Live() as live:
            live.tiny.end.set()
            reader, writer = await live.connect()
            writer.write(b"GET /stream HTTP/1.0\r\nHost: x\r\n\r\n")
            head, _, text = (await reader.read()).partition(b"\r\n\r\n")
            assert b"transfer-encoding" not in head.lower() and b"connection: close" in head.lower()
            assert text == b"first last"
            writer.close()

    run(body)


def test_a_client_of_http_1_0_gets_a_whole_answer_with_its_length() -> None:
    async def body() -> None:
        async with Live() as live:
            reader, writer = await live.connect()
            writer.write(WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0"))
            head, _, text = (await reader.read()).partition(b"\r\n\r\n")
            assert b"content-length: 2" in head.lower() and text == b" 3"
            writer.close()

    run(body)


def test_a_client_that_does_not_read_is_disconnected_and_its_handler_notified() -> None:
    async def body() -> None:
        async with Live(write_timeout_s=0.05) as live:
            connection = socket.create_connection(("127.0.0.1", live.port))
            connection.sendall(b"GET /flood HTTP/1.1\r\nHost: x\r\n\r\n")
            await until(lambda: live.tiny.num_left == 1)
            await until(lambda: live.lifecycle.num_connections == 0)
            assert live.refused == ["write_timeout"]
            connection.close()

    run(body)


def test_a_client_that_reads_slowly_is_not_disconnected() -> None:
    async def body() -> None:
        async with Live(write_timeout_s=1000.0) as live:
            reader, writer = await live.connect()
            writer.write(b"GET /flood HTTP/1.1\r\nHost: x\r\n\r\n")
            for _ in range(200):
                await reader.readexactly(65536)
            writer.close()
            await until(lambda: live.tiny.num_left == 1)
            assert live.refused == []

    run(body)


# ---- disconnects


def test_a_handler_that_ignores_a_disconnect_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.http.protocol.CANCEL_AFTER_S", 0.01)

    async def body() -> None:
        async with Live() as live:
            _, writer = await live.connect()
            writer.write(b"GET /ignores-disconnect HTTP/1.1\r\nHost: x\r\n\r\n")
            await until(lambda: live.tiny.num_running == 1)
            writer.close()
            await until(lambda: live.tiny.num_running == 0)
            assert live.tiny.num_cancelled == 1

    run(body)


def test_a_pipelined_request_does_not_hide_a_disconnect() -> None:
    async def body() -> None:
        async with Live() as live:
            reader, writer = await live.connect()
            writer.write(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
            await reader.readuntil(b"first ")
            assert live.tiny.num_running == 1  # the second was dropped; the client must send it again
            writer.close()
            await until(lambda: live.tiny.num_left == 1)

    run(body)


def test_of_pipelined_requests_the_first_is_answered_and_the_connection_closed() -> None:
    async def body() -> None:
        async with Live() as live:
            live.tiny.end.set()
            reader, writer = await live.connect()
            writer.write(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
            assert (await read_answer(reader)).body == b"first last"
            assert await is_closed(reader)
            writer.close()

    run(body)


# ---- number of connections


def test_connections_over_the_limit_are_closed_at_once() -> None:
    async def body() -> None:
        async with Live(max_connections=2) as live:
            kept = [await live.connect() for _ in range(2)]
            await until(lambda: live.lifecycle.num_connections == 2)
            reader, writer = await live.connect()
            assert await is_closed(reader)
            assert live.refused == ["connections"]
            writer.close()
            kept[0][1].write(WHOLE)
            assert (await read_answer(kept[0][0])).status == 200
            for _, one in kept:
                one.close()

    run(body)


def test_a_response_does_not_name_the_server_software() -> None:
    async def body() -> None:
        async with Live() as live:
            answer = await live.get()
            assert answer.headers.keys() == {"date", "content-length", "x-request-id"}

    run(body)


def test_many_connections_at_once_are_served() -> None:
    async def body() -> None:
        async with Live() as live:
            answers = await asyncio.gather(*(live.get() for _ in range(100)))
            assert {answer.status for answer in answers} == {200}

    run(body)
