"""A load in one event loop, together with its server: connections, refusals, time-outs, a server that dies."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest

from headrace.bench.load.bodies import encode_requests
from headrace.bench.load.driver import MAX_UNREACHED, NOT_SENT, Driver, Part, Plan
from headrace.bench.load.null_server import Behaviour, NullServer
from headrace.bench.load.run import LocalSignals
from headrace.bench.load.target import Target
from headrace.bench.workloads import WorkloadSpec, build
from tests.bench.load.streams import COMPLETION, STREAM_HEAD, chunked, sized

WORKLOAD = build(WorkloadSpec(name="random", num_requests=5, input_len=4, output_len=3))
TEST_TIMEOUT_S = 60.0  # ends a test that hangs; no result depends on it
RESPONSE = STREAM_HEAD + chunked(COMPLETION, 40)

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def driven(
    serve: Callable[[], Awaitable[asyncio.Server]],
    plan: Plan,
    signals: LocalSignals | None = None,
    host: str = "127.0.0.1",
) -> Part:
    """Run a plan against a server of the same event loop."""

    async def run() -> Part:
        server = await serve()
        target = replace(plan.target, host=host, port=server.sockets[0].getsockname()[1])
        requests = encode_requests(WORKLOAD, target, "null")
        driver = Driver(replace(plan, target=target, requests=requests), signals or silent(), monotonic())
        part = await driver.run()
        server.close()
        return part

    return asyncio.run(asyncio.wait_for(run(), TEST_TIMEOUT_S))


def silent() -> LocalSignals:
    return LocalSignals(lambda counts: None)


def plan(**changes: object) -> Plan:
    return replace(Plan(Target("", 0), [], 30.0, concurrency=3, num_requests=12), **changes)  # type: ignore[arg-type]


def null(behaviour: Behaviour, made: list[NullServer] | None = None) -> Callable[[], Awaitable[asyncio.Server]]:
    server = NullServer(behaviour)
    if made is not None:
        made.append(server)
    return lambda: asyncio.get_running_loop().create_server(server.protocol, "127.0.0.1", 0)


def handled(handler: Handler) -> Callable[[], Awaitable[asyncio.Server]]:
    return lambda: asyncio.start_server(handler, "127.0.0.1", 0)


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length: "))
    return head + await reader.readexactly(length)


def test_a_closed_loop_sends_each_request_once() -> None:
    part = driven(null(Behaviour()), plan())
    assert sorted(outcome.index for outcome in part.outcomes) == list(range(12))
    for outcome in part.outcomes:
        assert outcome.status == "ok"
        assert outcome.http_status == 200
        assert (outcome.num_prompt_tokens, outcome.num_output_tokens) == (4, 3)
        assert len(outcome.chunk_s) == 3
        assert outcome.first_s is not None
        assert outcome.due_s <= outcome.sent_s <= outcome.first_s <= outcome.end_s
    assert part.num_without_usage == 0
    assert part.has_reached


def test_a_closed_loop_never_has_more_in_flight_than_its_clients() -> None:
    part = driven(null(Behaviour(ttft_s=0.001, itl_s=0.001)), plan(concurrency=3, num_requests=20))
    events = [(outcome.sent_s, 1) for outcome in part.outcomes] + [(outcome.end_s, -1) for outcome in part.outcomes]
    running = [sum(change for _, change in sorted(events)[: count + 1]) for count in range(len(events))]
    assert max(running) <= 3


def test_clients_keep_their_connections() -> None:
    num_connections = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        while not reader.at_eof():
            try:
                await read_request(reader)
            except asyncio.IncompleteReadError:
                break
            writer.write(RESPONSE)
        writer.close()

    part = driven(handled(handler), plan())
    assert {outcome.status for outcome in part.outcomes} == {"ok"}
    assert num_connections == 3


def test_a_connection_that_the_server_closed_while_idle_costs_no_request() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(RESPONSE)
        await writer.drain()
        writer.close()  # without having said so

    part = driven(handled(handler), plan())
    assert [outcome.status for outcome in part.outcomes] == ["ok"] * 12


def test_a_schedule_keeps_its_due_times() -> None:
    schedule = [(0, 0.0), (1, 0.0), (2, 0.01), (3, 0.02)]
    part = driven(null(Behaviour()), plan(schedule=schedule, concurrency=None))
    found = sorted((outcome.index, round(outcome.due_s, 6)) for outcome in part.outcomes)
    assert found == schedule
    assert len(part.lates_s) == 4
    assert all(outcome.sent_s >= outcome.due_s for outcome in part.outcomes)


def test_a_schedule_respects_its_concurrency() -> None:
    part = driven(null(Behaviour(ttft_s=0.002)), plan(schedule=[(n, 0.0) for n in range(8)], concurrency=2))
    events = [(outcome.sent_s, 1) for outcome in part.outcomes] + [(outcome.end_s, -1) for outcome in part.outcomes]
    running = [sum(change for _, change in sorted(events)[: count + 1]) for count in range(len(events))]
    assert len(part.outcomes) == 8
    assert max(running) <= 2


def test_refusals_are_counted_apart() -> None:
    part = driven(null(Behaviour(refused_share=0.25)), plan())
    statuses = [outcome.status for outcome in part.outcomes]
    assert (statuses.count("refused"), statuses.count("ok")) == (3, 9)
    refused = next(outcome for outcome in part.outcomes if outcome.status == "refused")
    assert (refused.http_status, refused.error) == (503, "HTTP 503: the queue is full")


def test_other_http_errors_are_failures() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(sized(404, b'{"error":{"message":"no model"}}', more="Connection: close\r\n"))
        writer.close()

    part = driven(handled(handler), plan())
    assert {(outcome.status, outcome.error) for outcome in part.outcomes} == {("failed", "HTTP 404: no model")}
    assert part.death is None  # it responds


def test_a_broken_stream_is_a_failure() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(RESPONSE[:400])
        writer.close()

    part = driven(handled(handler), plan())
    assert {outcome.status for outcome in part.outcomes} == {"failed"}
    assert len(part.outcomes) == 12


def test_an_answer_that_takes_too_long_is_a_time_out() -> None:
    part = driven(null(Behaviour(ttft_s=1000.0)), plan(timeout_s=0.02, num_requests=4))
    assert [outcome.status for outcome in part.outcomes] == ["timeout"] * 4
    assert part.outcomes[0].error == "not answered within 0.02 s"
    assert part.death is None  # its head arrived


def test_a_server_that_never_says_a_word_ends_the_load() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    part = driven(handled(handler), plan(timeout_s=0.01, num_requests=500, concurrency=1))
    assert part.death == "not answered within 0.01 s"
    statuses = [outcome.status for outcome in part.outcomes]
    assert statuses.count("timeout") == MAX_UNREACHED
    assert sum(outcome.error == NOT_SENT for outcome in part.outcomes) == 500 - MAX_UNREACHED
    assert not part.has_reached


def test_a_server_that_stops_listening_ends_the_load_and_keeps_what_was_measured() -> None:
    servers: list[asyncio.Server] = []
    num_answered = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_answered
        await read_request(reader)
        num_answered += 1
        writer.write(RESPONSE)
        writer.close()
        if num_answered == 5:
            servers[0].close()

    async def serve() -> asyncio.Server:
        servers.append(await asyncio.start_server(handler, "127.0.0.1", 0))
        return servers[0]

    part = driven(serve, plan(num_requests=300, concurrency=1))
    assert sum(outcome.is_ok for outcome in part.outcomes) == 5
    assert len(part.outcomes) == 300
    assert part.death is not None and "Connect" in part.death
    assert sum(outcome.error == NOT_SENT for outcome in part.outcomes) == 300 - 5 - MAX_UNREACHED


def test_the_rest_of_a_schedule_is_not_waited_for() -> None:
    async def serve() -> asyncio.Server:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        server.close()
        return Closed(server)  # type: ignore[return-value]

    class Closed:
        def __init__(self, server: asyncio.Server) -> None:
            self.sockets, self.close = [Socket()], lambda: None

    class Socket:
        def getsockname(self) -> tuple[str, int]:
            return "127.0.0.1", 1  # nobody listens there

    schedule = [(n, 0.0) for n in range(MAX_UNREACHED)] + [(99, 10_000.0)]
    part = driven(serve, plan(schedule=schedule, concurrency=None))
    assert [outcome.error for outcome in part.outcomes].count(NOT_SENT) == 1
    assert len(part.outcomes) == MAX_UNREACHED + 1


def test_tokens_without_usage_are_counted_as_chunks() -> None:
    part = driven(null(Behaviour(has_usage=False)), plan(num_requests=2))
    assert [outcome.num_output_tokens for outcome in part.outcomes] == [3, 3]
    assert part.num_without_usage == 2


def test_tokens_of_large_chunks_come_from_usage() -> None:
    part = driven(null(Behaviour(tokens_per_chunk=2)), plan(num_requests=2))
    assert [(outcome.num_output_tokens, len(outcome.chunk_s)) for outcome in part.outcomes] == [(3, 2)] * 2


def test_an_empty_answer_is_a_failure() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(STREAM_HEAD + chunked(b"data: [DONE]\n\n", 99))
        writer.close()

    part = driven(handled(handler), plan(num_requests=1))
    assert (part.outcomes[0].status, part.outcomes[0].error) == ("failed", "the answer is empty")


def test_a_stopped_load_leaves_out_what_is_in_flight() -> None:
    made: list[NullServer] = []
    signals = silent()

    async def serve() -> asyncio.Server:
        server = await null(Behaviour(ttft_s=1000.0), made)()

        async def stop_when_sent() -> None:
            while made[0].num_requests < 3:
                await asyncio.sleep(0.001)
            signals.stop()

        tasks.append(asyncio.create_task(stop_when_sent()))
        return server

    tasks: list[asyncio.Task[None]] = []
    part = driven(serve, plan(), signals)
    assert part.outcomes == []
    assert part.num_cut == 3


def test_a_load_limited_by_time_ends() -> None:
    part = driven(null(Behaviour()), plan(num_requests=None, seconds=0.05))
    assert part.outcomes
    assert {outcome.status for outcome in part.outcomes} == {"ok"}


def test_tls_with_a_trusted_certificate_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
        f"-addext subjectAltName=DNS:localhost -keyout {key} -out {cert}"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)

    async def serve() -> asyncio.Server:
        server = NullServer(Behaviour())
        return await asyncio.get_running_loop().create_server(server.protocol, "127.0.0.1", 0, ssl=context)

    tls = plan(target=Target("", 0, is_tls=True), num_requests=4)
    with monkeypatch.context() as patched:
        patched.setenv("SSL_CERT_FILE", str(cert))
        part = driven(serve, tls, host="localhost")
        assert [outcome.status for outcome in part.outcomes] == ["ok"] * 4
    part = driven(serve, tls, host="localhost")
    assert {outcome.status for outcome in part.outcomes} == {"failed"}
    assert "certificate is not trusted" in str(part.outcomes[0].error)
