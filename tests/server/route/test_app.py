"""The router over real sockets, with replicas that are slow, fail, refuse or die where a test says so."""

from __future__ import annotations

import asyncio
import json

import pytest

from headrace.server.route.app import MAX_HELD, split_events
from tests.server.live import run, until
from tests.server.route.fakes import (
    Answer,
    FakeReplica,
    Router,
    answers,
    dies_after,
    dies_without_answer,
    event,
    never_answers,
    request_of,
    streams,
    streams_until_closed,
    waits_to_be_released,
)

CHAT = "/v1/chat/completions"
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def long_prompt(number: int, turn: int = 0) -> dict[str, object]:
    """A conversation of some kilobytes; each turn continues the one before."""
    turns = [{"role": "user", "content": f"conversation {number} " * 100}]
    turns += [{"role": "user", "content": f"turn {each} " * 60} for each in range(turn)]
    return {"model": "m", "messages": turns}


def test_a_stream_is_passed_on_with_the_replica_and_the_request_id() -> None:
    async def body() -> None:
        async with FakeReplica(streams(event("a"), event("b"), b"data: [DONE]\n\n")) as one, Router([one]) as router:
            headers = ("Authorization: Bearer key", "X-Request-Id: mine", "X-Other: kept", "Accept-Encoding: gzip")
            answer = await router.ask(CHAT + "?x=1", *headers, body=HELLO)
            assert answer.status == 200 and answer.is_complete
            assert answer.body == event("a") + event("b") + b"data: [DONE]\n\n"
            assert answer.headers["content-type"] == "text/event-stream"
            assert answer.headers["x-headrace-replica"] == one.name
            assert answer.headers["x-request-id"] == "mine"
            (asked,) = one.asked
            assert asked.path == CHAT + "?x=1" and json.loads(asked.body) == HELLO
            assert (asked.headers["authorization"], asked.headers["x-other"]) == ("Bearer key", "kept")
            assert asked.headers["x-request-id"] == "mine" and asked.headers["host"] == one.name
            assert "accept-encoding" not in asked.headers

    run(body)


def test_a_request_without_an_id_gets_one_that_the_replica_sees_too() -> None:
    async def body() -> None:
        async with FakeReplica() as one, Router([one]) as router:
            answer = await router.ask(CHAT, body=HELLO)
            assert answer.headers["x-request-id"] == one.asked[0].headers["x-request-id"] != ""

    run(body)


def test_events_arrive_while_the_stream_goes_on() -> None:
    async def body() -> None:
        async with FakeReplica(streams_until_closed) as one, Router([one]) as router:
            reader, writer = await router.send(request_of(CHAT, body=HELLO))
            await reader.readuntil(event("first"))
            writer.close()

    run(body)


@pytest.mark.parametrize("behave", [streams_until_closed, never_answers])
def test_a_client_that_goes_aborts_its_request_at_the_replica(behave: object) -> None:
    async def body() -> None:
        async with FakeReplica(behave) as one, Router([one]) as router:  # type: ignore[arg-type]
            _, writer = await router.send(request_of(CHAT, body=HELLO))
            await until(lambda: len(one.asked) == 1)
            assert router.fleet.replicas[0].num_in_flight == 1
            writer.close()
            await until(lambda: one.num_left == 1)
            await until(lambda: router.fleet.replicas[0].num_in_flight == 0)
            assert router.fleet.replicas[0].outcomes["lost"] == 0, "the client's leaving is not the replica's failure"

    run(body)


def test_a_slow_client_slows_its_replica_down() -> None:
    """The replica can write no more than the buffers on the way hold, however long it tries."""
    num_bytes = 64 * 2**20
    sent = 0

    async def floods(replica: FakeReplica, asked: object, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        part = event("x" * 65_000)
        while sent < num_bytes:
            writer.write(part)
            await writer.drain()
            sent += len(part)

    async def body() -> None:
        nonlocal sent
        async with FakeReplica(floods) as one, Router([one]) as router:
            reader, writer = await router.send(request_of(CHAT, body=HELLO))
            await reader.readuntil(b"\r\n\r\n")
            before = -1
            while before != sent:  # until the replica is stuck
                before = sent
                await asyncio.sleep(0.3)
            assert sent < num_bytes / 2
            writer.transport.abort()

    run(body)


def test_a_replica_that_cannot_be_reached_costs_no_request() -> None:
    async def body() -> None:
        async with FakeReplica() as one, FakeReplica() as two, Router([one, two]) as router:
            one.stop_listening()
            for _ in range(4):
                assert (await router.ask(CHAT, body=HELLO)).headers["x-headrace-replica"] == two.name
            assert router.fleet.num_retries["no_connection"] == 1, "it is out after the first"
            assert router.fleet.state(router.fleet.replicas[0]) == "out"

    run(body)


@pytest.mark.parametrize("behave", [dies_without_answer, dies_after()])
def test_a_request_without_a_byte_of_an_answer_goes_to_another_replica(behave: object) -> None:
    async def body() -> None:
        async with FakeReplica(behave) as one, FakeReplica() as two, Router([one, two]) as router:  # type: ignore[arg-type]
            answer = await router.ask(CHAT, body=HELLO)
            assert (answer.status, answer.headers["x-headrace-replica"]) == (200, two.name)
            assert (len(one.asked), len(two.asked)) == (1, 1)
            assert router.fleet.num_retries["lost"] == 1

    run(body)


def test_a_body_that_breaks_off_is_asked_for_again() -> None:
    async def breaks_off(replica: FakeReplica, asked: object, writer: asyncio.StreamWriter) -> None:
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"half":')
        await writer.drain()
        writer.close()

    async def body() -> None:
        async with FakeReplica(breaks_off) as one, FakeReplica() as two, Router([one, two]) as router:
            assert (await router.ask(CHAT, body=HELLO)).json == {"ok": True}
            assert len(one.asked) == 1

    run(body)


def test_a_stream_that_breaks_off_ends_with_an_error_event() -> None:
    async def body() -> None:
        half = b'data: {"text": "ha'
        async with FakeReplica(dies_after(event("a"), half)) as one, FakeReplica() as two:
            async with Router([one, two]) as router:
                answer = await router.ask(CHAT, body=HELLO)
                assert answer.status == 200 and answer.is_complete
                first, error, done = answer.body.split(b"\n\n")[:-1]
                assert (first + b"\n\n", done) == (event("a"), b"data: [DONE]")
                assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "replica_lost"
                assert two.asked == [], "a begun answer is not begun again"
                assert router.fleet.replicas[0].outcomes["broken"] == 1

    run(body)


def test_a_long_body_that_breaks_off_is_not_complete() -> None:
    async def breaks_off(replica: FakeReplica, asked: object, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (4 * MAX_HELD) + b"x" * 2 * MAX_HELD)
        await writer.drain()
        writer.close()

    async def body() -> None:
        async with FakeReplica(breaks_off) as one, Router([one]) as router:
            assert not (await router.ask(CHAT, body=HELLO)).is_complete

    run(body)


def test_a_long_body_is_passed_on_whole() -> None:
    async def body() -> None:
        long = b"y" * (3 * MAX_HELD)
        async with FakeReplica(answers(200, long)) as one, Router([one]) as router:
            answer = await router.ask(CHAT, body=HELLO)
            assert answer.body == long and answer.is_complete

    run(body)


def test_a_request_that_loses_two_replicas_is_given_up() -> None:
    async def body() -> None:
        async with (
            FakeReplica(dies_without_answer) as one,
            FakeReplica(dies_without_answer) as two,
            FakeReplica(dies_without_answer) as three,
            Router([one, two, three]) as router,
        ):
            answer = await router.ask(CHAT, body=HELLO)
            assert (answer.status, answer.json["error"]["code"]) == (502, "replica_lost")
            assert len(one.asked) + len(two.asked) + len(three.asked) == 2

    run(body)


def test_a_busy_replica_is_passed_over_for_a_while() -> None:
    async def body() -> None:
        busy = answers(503, b'{"error":{"message":"full"}}', "Retry-After: 2")
        async with FakeReplica(busy) as one, FakeReplica() as two, Router([one, two]) as router:
            for _ in range(3):
                assert (await router.ask(CHAT, body=HELLO)).headers["x-headrace-replica"] == two.name
            assert len(one.asked) == 1
            assert router.fleet.state(router.fleet.replicas[0]) == "up", "load is not an error"

    run(body)


def test_if_all_are_busy_the_answer_is_theirs() -> None:
    async def body() -> None:
        busy = answers(503, b'{"error":{"message":"full"}}', "Retry-After: 7")
        async with FakeReplica(busy) as one, FakeReplica(busy) as two, Router([one, two]) as router:
            answer = await router.ask(CHAT, body=HELLO)
            assert (answer.status, answer.headers["retry-after"]) == (503, "7")
            assert answer.json == {"error": {"message": "full"}}
            assert len(one.asked) == len(two.asked) == 1

    run(body)


def test_errors_of_a_replica_go_to_the_client_and_take_it_out() -> None:
    async def body() -> None:
        async with FakeReplica(answers(500, b"{}")) as one, FakeReplica() as two:
            async with Router([one, two], policy="round-robin") as router:
                statuses = [(await router.ask(CHAT, body=HELLO)).status for _ in range(8)]
                assert statuses == [500, 200, 500, 200, 200, 200, 200, 200]
                assert router.fleet.state(router.fleet.replicas[0]) == "out"
                assert "score" in router.fleet.replicas[0].health.reason

    run(body)


def test_a_replica_that_is_out_is_tried_again_with_one_request() -> None:
    async def body() -> None:
        async with FakeReplica(dies_without_answer) as one, FakeReplica() as two, Router([one, two]) as router:
            (first, _) = router.fleet.replicas
            router.fleet.unreachable(first, "no connection")
            await router.ask(CHAT, body=HELLO)
            assert one.asked == []
            router.now += 1.0
            assert (await router.ask(CHAT, body=HELLO)).headers["x-headrace-replica"] == two.name
            assert len(one.asked) == 1, "it was asked first, and failed"
            router.now += 1.9
            await router.ask(CHAT, body=HELLO)
            assert len(one.asked) == 1, "the second wait is longer"
            router.now += 0.1
            one.behave = waits_to_be_released
            probing = asyncio.create_task(router.ask(CHAT, body=HELLO))
            await until(lambda: len(one.asked) == 2)
            for _ in range(3):
                assert (await router.ask(CHAT, body=HELLO)).headers["x-headrace-replica"] == two.name
            one.release.set()
            assert (await probing).headers["x-headrace-replica"] == one.name
            assert router.fleet.state(first) == "up"

    run(body)


def test_one_error_sends_requests_to_others_while_they_are_idle() -> None:
    async def body() -> None:
        async with FakeReplica(answers(500, b"{}")) as one, FakeReplica() as two, Router([one, two]) as router:
            assert [(await router.ask(CHAT, body=HELLO)).status for _ in range(5)] == [500, 200, 200, 200, 200]
            assert router.fleet.state(router.fleet.replicas[0]) == "up"

    run(body)


def test_errors_of_all_replicas_take_none_out() -> None:
    async def body() -> None:
        bad = answers(500, b"{}")
        async with FakeReplica(bad) as one, FakeReplica(bad) as two, Router([one, two]) as router:
            for _ in range(10):
                assert (await router.ask(CHAT, body=HELLO)).status == 500
            assert [router.fleet.state(each) for each in router.fleet.replicas].count("up") >= 1

    run(body)


def test_the_errors_of_a_request_are_not_those_of_its_replica() -> None:
    async def body() -> None:
        async with FakeReplica(answers(400, b"{}")) as one, FakeReplica() as two, Router([one, two]) as router:
            for _ in range(10):
                await router.ask(CHAT, body=HELLO)
            assert [router.fleet.score(each) for each in router.fleet.replicas] == [1.0, 1.0]

    run(body)


def test_requests_that_wait_at_a_replica_that_hangs_go_to_another() -> None:
    async def body() -> None:
        async with FakeReplica(never_answers) as one, FakeReplica() as two, Router([one, two]) as router:
            asking = asyncio.create_task(router.ask(CHAT, body=HELLO))
            await until(lambda: len(one.asked) == 1)
            for _ in range(3):
                router.fleet._scrape_failed(router.fleet.replicas[0], "it does not answer in time")
            assert (await asking).headers["x-headrace-replica"] == two.name

    run(body)


def test_a_conversation_stays_at_its_replica() -> None:
    async def body() -> None:
        async with FakeReplica() as one, FakeReplica() as two, FakeReplica() as three:
            async with Router([one, two, three]) as router:
                homes: list[set[str]] = [set() for _ in range(6)]
                for turn in range(4):
                    for number, home in enumerate(homes):
                        answer = await router.ask(CHAT, body=long_prompt(number, turn))
                        home.add(answer.headers["x-headrace-replica"])
                assert [len(home) for home in homes] == [1] * 6
                assert len(set.union(*homes)) == 3, "conversations are spread"
                assert router.fleet.choices == {"load": 6, "prefix": 18}

    run(body)


def test_round_robin_takes_turns() -> None:
    async def body() -> None:
        async with FakeReplica() as one, FakeReplica() as two, Router([one, two], policy="round-robin") as router:
            for _ in range(6):
                await router.ask(CHAT, body=long_prompt(0))
            assert (len(one.asked), len(two.asked)) == (3, 3)

    run(body)


def test_a_connection_that_the_replica_has_closed_meanwhile_is_no_failure() -> None:
    async def resets_second(replica: FakeReplica, asked: object, writer: asyncio.StreamWriter) -> None:
        if len(replica.asked) == 2:
            writer.transport.abort()
        else:
            await answers()(replica, asked, writer)  # type: ignore[arg-type]

    async def body() -> None:
        async with FakeReplica(resets_second) as one, Router([one]) as router:
            assert [(await router.ask(CHAT, body=HELLO)).status for _ in range(3)] == [200, 200, 200]
            assert len(one.asked) == 4, "the second was sent again on a new connection"
            assert router.fleet.replicas[0].outcomes == {"2xx": 3}

    run(body)


def test_connections_are_used_again() -> None:
    async def body() -> None:
        async with FakeReplica() as one, Router([one]) as router:
            scraped = one.num_connections
            for _ in range(5):
                await router.ask(CHAT, body=HELLO)
            assert one.num_connections == scraped + 1

    run(body)


def test_models_are_those_of_all_replicas() -> None:
    def models(*names: str) -> dict[str, tuple[int, bytes]]:
        return {"/v1/models": (200, json.dumps({"data": [{"id": name} for name in names]}).encode())}

    async def body() -> None:
        async with FakeReplica(pages=models("a", "b")) as one, FakeReplica(pages=models("b", "c/d")) as two:
            async with Router([one, two]) as router:
                assert {model["id"] for model in (await router.ask("/v1/models")).json["data"]} == {"a", "b", "c/d"}
                assert (await router.ask("/v1/models/c/d")).json == {"id": "c/d"}
                assert (await router.ask("/v1/models/x")).json["error"]["code"] == "model_not_found"

    run(body)


def test_a_key_that_all_replicas_refuse_is_refused() -> None:
    async def body() -> None:
        async with FakeReplica(pages={"/v1/models": (401, b"{}")}) as one, Router([one]) as router:
            assert (await router.ask("/v1/models")).status == 401

    run(body)


@pytest.mark.parametrize(
    "path, given, status",
    [
        ("/nowhere", None, 404),
        ("/admin/drain", b"{}", 404),
        ("/start_profile", b"{}", 404),
        ("/v1/files", b"{}", 404),
        ("/v1/batches", None, 404),
        ("/v1/chat/completions", None, 405),
        ("/health", b"{}", 405),
        ("/v1/a%0d%0aX-Injected:%201", b"{}", 404),
        ("/v1/completions", b"x" * 5_000, 413),
    ],
)
def test_what_is_not_for_a_replica_does_not_get_there(path: str, given: bytes | None, status: int) -> None:
    async def body() -> None:
        async with FakeReplica() as one, Router([one], max_body_bytes=4_096) as router:
            assert (await router.ask(path, body=given)).status == status
            assert one.asked == []

    run(body)


def test_a_body_that_is_not_json_is_for_the_replica_to_refuse() -> None:
    async def body() -> None:
        async with FakeReplica(answers(400, b'{"error":{}}')) as one, Router([one]) as router:
            assert (await router.ask(CHAT, body=b"\xff{")).status == 400
            assert one.asked[0].body == b"\xff{"

    run(body)


def test_readiness_follows_the_replicas() -> None:
    async def body() -> None:
        async with FakeReplica() as one, Router([one]) as router:
            assert (await router.ask("/ready")).status == 200
            one.pages["/ready"] = (503, b"{}")
            await router.fleet.scrape(router.fleet.replicas[0])
            answer = await router.ask("/ready")
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert (await router.ask(CHAT, body=HELLO)).json["error"]["code"] == "no_replica"
            assert (await router.ask("/health")).status == 200, "the router itself is well"
            one.pages["/ready"] = (200, b"{}")
            await router.fleet.scrape(router.fleet.replicas[0])
            assert (await router.ask(CHAT, body=HELLO)).status == 200

    run(body)


def test_a_router_that_stops_answers_what_is_in_flight() -> None:
    async def body() -> None:
        async with FakeReplica(waits_to_be_released) as one, Router([one]) as router:
            asking = asyncio.create_task(router.ask(CHAT, body=HELLO))
            await until(lambda: len(one.asked) == 1)
            router.server.lifecycle.stop()
            await until(lambda: router.server.lifecycle.is_draining)
            one.release.set()
            assert (await asking).json == {"ok": True}
            assert await router.exit == 0

    run(body)


def test_a_router_that_is_stopped_at_once_ends_every_request() -> None:
    async def body() -> None:
        async with FakeReplica(never_answers) as one, FakeReplica(streams_until_closed) as two:
            async with Router([one, two], policy="round-robin") as router:
                waiting = asyncio.create_task(router.ask(CHAT, body=HELLO))
                await until(lambda: len(one.asked) == 1)
                streaming = asyncio.create_task(router.ask(CHAT, body=HELLO))
                await until(lambda: router.fleet.replicas[1].outcomes["2xx"] == 1)
                router.server.lifecycle.stop()
                router.server.lifecycle.stop()
                assert (await waiting).json["error"]["code"] == "no_replica"
                assert b"replica_lost" in (await streaming).body
                assert (len(one.asked), len(two.asked)) == (1, 1), "nothing is sent again"
                assert await router.exit == 1

    run(body)


def test_the_metrics_page_and_the_document_agree() -> None:
    async def body() -> None:
        async with FakeReplica() as one, FakeReplica() as two, Router([one, two]) as router:
            for _ in range(2):
                await router.ask(CHAT, body=long_prompt(1))
            page = (await router.ask("/metrics")).body.decode()
            document = (await router.ask("/replicas")).json
            assert "headrace:desired_replicas 1.0" in page
            assert f'headrace:route_requests_total{{outcome="2xx",replica="{one.name}"}} 2.0' in page
            assert 'headrace:route_choices_total{reason="prefix"} 1.0' in page
            assert f'headrace:route_state{{replica="{two.name}",state="up"}} 1.0' in page
            assert document["hit_share"] == 0.5
            assert [each["outcomes"] for each in document["replicas"]] == [{"2xx": 2}, {}]

    run(body)


@pytest.mark.parametrize(
    "data, whole",
    [
        (b"data: a\n\n", b"data: a\n\n"),
        (b"data: a\n\ndata: b", b"data: a\n\n"),
        (b"data: a\r\n\r\ndata: b", b"data: a\r\n\r\n"),
        (b"data: a", b""),
        (b"\n", b""),
        (b"", b""),
        (b"\n\n", b"\n\n"),
    ],
)
def test_streams_are_split_at_the_ends_of_events(data: bytes, whole: bytes) -> None:
    assert split_events(data) == (whole, data[len(whole) :])


def test_answers_of_tests_are_parsed() -> None:
    """The client above sees a body that breaks off."""
    assert not Answer.parse(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n").is_complete
