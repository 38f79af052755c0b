"""The service around a `DynamicBatcher`, without a socket."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headrace import DynamicBatcher
from headrace.batching.batcher import Application
from headrace.errors import ConfigError
from tests.monitor.pages import Page
from tests.server.asgi import Answer

JSON = {"content-type": "application/json"}


async def ask(
    app: Application,
    path: str,
    *,
    method: str = "GET",
    body: bytes = b"",
    headers: dict[str, str] | None = None,
    gone: asyncio.Event | None = None,
) -> Answer:
    """One request. The client disconnects when `gone` is set."""
    sent: list[Any] = []
    messages: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    fields = [(name.encode(), value.encode()) for name, value in (headers or JSON).items()]
    await app({"type": "http", "method": method, "path": path, "headers": fields}, receive, send)
    if not sent:
        return Answer(0, {}, b"")  # nobody to answer
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Answer(sent[0]["status"], headers, sent[1]["body"])


def predict(app: Application, given: Any, **options: Any) -> Awaitable[Answer]:
    return ask(app, "/predict", method="POST", body=json.dumps({"input": given}).encode(), **options)


def doubled(items: list[Any]) -> list[Any]:
    return [2 * item for item in items]


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(body(), 60)

    asyncio.run(bounded())


def test_each_request_gets_its_own_result_of_one_batch() -> None:
    async def body() -> None:
        batcher = DynamicBatcher(doubled, max_batch_size=3, max_wait_ms=3_600_000)
        answers = await asyncio.gather(*(predict(batcher.app(), number) for number in (1, 2, 3)))
        assert [(answer.status, json.loads(answer.body)) for answer in answers] == [
            (200, {"output": 2}),
            (200, {"output": 4}),
            (200, {"output": 6}),
        ]
        assert batcher.stats.num_batches == 1

    run(body)


def test_the_page_has_queue_batches_waits_and_padding() -> None:
    async def body() -> None:
        batcher = DynamicBatcher(lambda rows: [sum(row) for row in rows], max_batch_size=3, max_wait_ms=3_600_000)
        app = batcher.app()
        await asyncio.gather(*(predict(app, row) for row in ([1, 2, 3, 4], [5], [6])))
        waiting = asyncio.ensure_future(predict(app, [7, 8]))
        while not batcher.stats.num_waiting:
            await asyncio.sleep(0)
        answer = await ask(app, "/metrics")
        page = Page(answer.body.decode())
        assert answer.headers["content-type"].startswith("text/plain")
        assert page.value("headrace:batcher_queue_length") == 1
        assert page.value("headrace:batcher_batches_total") == 1
        assert page.value("headrace:batcher_batch_size_sum") == 3
        assert page.value("headrace:batcher_batch_size_bucket", le="2.0") == 0
        assert page.value("headrace:batcher_batch_size_bucket", le="4.0") == 1
        assert page.value("headrace:batcher_wait_seconds_count") == 3
        assert page.value("headrace:batcher_tokens_total") == 6
        assert page.value("headrace:batcher_padding_tokens_total") == 6  # rows of 4, 1 and 1, padded to 4
        assert batcher.stats.padding_share == 0.5
        await batcher.close()
        assert json.loads((await waiting).body) == {"output": 15}

    run(body)


def test_an_unused_batcher_has_a_page_too() -> None:
    async def body() -> None:
        page = Page((await ask(DynamicBatcher(doubled).app(), "/metrics")).body.decode())
        assert page.value("headrace:batcher_batch_size_count") == 0
        assert page.value("headrace:batcher_wait_seconds_bucket", le="+Inf") == 0

    run(body)


def test_refusals_have_their_status() -> None:
    async def body() -> None:
        batcher = DynamicBatcher(doubled, max_batch_size=1, max_queue_size=1, max_tokens_per_batch=5, max_wait_ms=0)
        app = batcher.app()
        assert (await predict(app, "too long")).status == 413
        started = [asyncio.ensure_future(predict(app, "a")) for _ in range(3)]
        statuses = sorted([(await answer).status for answer in started])
        assert statuses == [200, 200, 503]  # one runs, one waits, one is refused
        refused = next(answer for each in started if (answer := each.result()).status == 503)
        assert (refused.error["code"], refused.headers["retry-after"]) == ("queue_full", "1")
        await batcher.close()
        assert (await predict(app, "a")).error["code"] == "closed"
        assert (await ask(app, "/health")).status == 503

    run(body)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"inputs": 1}', b'{"input": 1, "x": 2}', b"\xff"])
def test_a_body_that_is_no_input_is_refused(body: bytes) -> None:
    async def asks() -> None:
        answer = await ask(DynamicBatcher(doubled).app(), "/predict", method="POST", body=body)
        assert answer.status == 400 and '{"input": ...}' in answer.error["message"]

    run(asks)


def test_routes_methods_and_types_are_checked() -> None:
    async def body() -> None:
        app = DynamicBatcher(doubled).app(max_body_bytes=20)
        assert (await ask(app, "/health")).status == 200
        assert (await ask(app, "/other")).status == 404
        answer = await ask(app, "/predict")
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
        assert (await predict(app, "x" * 20)).status == 413
        assert (await predict(app, 1, headers={"content-type": "text/plain"})).status == 415

    run(body)


def test_parse_refuses_an_input_before_it_can_fail_a_batch() -> None:
    def positive(given: Any) -> int:
        if given <= 0:
            raise ValueError("it must be above 0")
        return int(given)

    async def body() -> None:
        app = DynamicBatcher(doubled, max_batch_size=1).app(parse=positive)
        bad, wrong, good = await asyncio.gather(predict(app, -1), predict(app, "x"), predict(app, 2))
        assert (bad.status, bad.error["message"]) == (400, "the input is refused: it must be above 0")
        assert wrong.status == 400
        assert json.loads(good.body) == {"output": 4}

    run(body)


def test_a_failed_batch_is_500_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def fails(items: list[Any]) -> list[Any]:
        raise KeyError("the secret of the model")

    async def body() -> None:
        app = DynamicBatcher(fails, max_batch_size=2, max_wait_ms=3_600_000).app()
        answers = await asyncio.gather(predict(app, 1), predict(app, 2))
        assert [answer.status for answer in answers] == [500, 500]
        assert b"secret" not in answers[0].body

    with caplog.at_level(logging.ERROR, logger="headrace.server"):
        run(body)
    assert len(caplog.records) == 1 and "the secret of the model" in caplog.text


def test_a_wrong_number_of_results_is_500_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        assert (await predict(DynamicBatcher(lambda items: [], max_wait_ms=0).app(), 1)).status == 500

    with caplog.at_level(logging.ERROR, logger="headrace.server"):
        run(body)
    assert "returned 0 results for 1 items" in caplog.text


def test_a_result_that_is_not_json_is_500_and_says_so_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        assert (await predict(DynamicBatcher(lambda items: [object()], max_wait_ms=0).app(), 1)).status == 500

    with caplog.at_level(logging.ERROR, logger="headrace.server"):
        run(body)
    assert "returned object, which is not JSON" in caplog.text


def test_a_client_that_disconnects_leaves_the_queue() -> None:
    async def body() -> None:
        batcher, gone = DynamicBatcher(doubled, max_wait_ms=3_600_000), asyncio.Event()
        asked = asyncio.ensure_future(predict(batcher.app(), 1, gone=gone))
        while not batcher.stats.num_waiting:
            await asyncio.sleep(0)
        gone.set()
        assert (await asked).status == 0
        assert (batcher.stats.num_waiting, batcher.stats.num_cancelled) == (0, 1)

    run(body)


def test_the_lifespan_answers_what_waits() -> None:
    async def body() -> None:
        batcher = DynamicBatcher(doubled, max_wait_ms=3_600_000)
        app, sent = batcher.app(), []
        messages: asyncio.Queue[Any] = asyncio.Queue()

        async def send(message: Any) -> None:
            sent.append(message["type"])

        living = asyncio.ensure_future(app({"type": "lifespan"}, messages.get, send))
        messages.put_nowait({"type": "lifespan.startup"})
        asked = asyncio.ensure_future(predict(app, 4))
        while not batcher.stats.num_waiting:
            await asyncio.sleep(0)
        messages.put_nowait({"type": "lifespan.shutdown"})
        await living
        assert json.loads((await asked).body) == {"output": 8}
        assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]

    run(body)


def test_a_wrong_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_body_bytes must be a whole number from 1, got 0"):
        DynamicBatcher(doubled).app(max_body_bytes=0)


def test_it_imports_no_torch() -> None:
    program = (
        "import sys; from headrace import DynamicBatcher; DynamicBatcher(list).app(); print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
