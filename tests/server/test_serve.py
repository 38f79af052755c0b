"""The whole server over a small model: what a client sees of limits, deadlines, batching, keys and the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from headrace.config import EngineConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.engine.start import start_engine
from headrace.errors import ConfigError
from headrace.server.http.keys import Keys
from headrace.server.http.lifecycle import open_listener
from headrace.server.options import ServerOptions
from headrace.server.serve import Server, serve
from tests.server.live import run, until

PROMPT = "The same forty characters of every prompt"  # two full blocks and more


@pytest.fixture(scope="module")
def engine(tiny_directory: Path) -> Iterator[AsyncEngine]:
    config = EngineConfig(model=str(tiny_directory), max_num_seqs=4, num_gpu_blocks_override=256)
    made = AsyncEngine.over(lambda deliver: start_engine(config, deliver))
    yield made
    asyncio.run(made.close())


class Running:
    def __init__(self, server: Server, client: httpx2.AsyncClient, exit: asyncio.Task[int], told: list[str]) -> None:
        self.server, self.client, self.exit, self.told = server, client, exit, told

    async def complete(self, headers: dict[str, str] | None = None, **body: Any) -> httpx2.Response:
        asked = {"prompt": PROMPT, "max_tokens": 2, **body}
        return await self.client.post("/v1/completions", json=asked, headers=headers)


@asynccontextmanager
async def running(engine: AsyncEngine, environ: dict[str, str] | None = None, **options: Any) -> AsyncIterator[Running]:
    told: list[str] = []
    made = ServerOptions(port=0, **options)
    keys = Keys(made, environ=environ or {}, tell=told.append)
    server = Server(engine, made, keys, model_name="tiny", tell=told.append)
    listener = open_listener(made)
    exit = asyncio.create_task(server.lifecycle.run(listener))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    await until(lambda: server.lifecycle._uvicorn.started)
    async with httpx2.AsyncClient(base_url=url, timeout=60.0) as client:
        try:
            yield Running(server, client, exit, told)
        finally:
            hold(engine, None)
            if not exit.done():
                server.lifecycle.stop()
            await exit


def hold(engine: AsyncEngine, number: int | None) -> None:
    """Let only so many sequences run."""
    engine._engine.client.limit_running(number)


def with_server(engine: AsyncEngine, body: Callable[[Running], Awaitable[None]], **options: Any) -> None:
    async def call() -> None:
        async with running(engine, **options) as made:
            await body(made)

    run(call)


def waiting(made: Running, number: int) -> Callable[[], bool]:
    """Whether so many requests have reached the engine's queue."""
    return lambda: made.server._engine.stats.scheduler.num_waiting == number


def test_a_request_passes_all_parts_and_leaves_nothing_behind(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        answer = await made.complete()
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 2
        await until(lambda: made.server.queue.num_in_flight == 0)
        assert engine.stats.scheduler.num_running == engine.stats.scheduler.num_waiting == 0

    with_server(engine, body)


def test_the_automatic_settings_are_told_with_their_reasons(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        made.server.tell_settings()
        assert "max_num_queued_reqs = 16 (4 x max_num_seqs)" in made.told
        assert "max_num_queued_tokens = 16,384 (4 x the tokens of the KV cache)" in made.told
        assert [line for line in made.told if line.startswith("max_model_len = 512 (")]

    with_server(engine, body)


# ---- limits


def test_a_full_queue_is_503_with_the_time_to_come_back(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        hold(engine, 0)
        first = asyncio.create_task(made.complete())
        await until(lambda: made.server.queue.num_waiting == 1)
        refused = await made.complete()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "60")
        assert refused.json()["error"]["code"] == "queue_full"
        hold(engine, None)
        assert (await first).status_code == 200
        assert (
            'requests_refused_total{engine="0",model_name="tiny",reason="queue_full"} 1.0'
            in (await made.client.get("/metrics")).text
        )

    with_server(engine, body, max_num_queued_reqs=1)


@pytest.mark.parametrize(("options", "status"), [({"request_timeout_s": 0.05}, 504), ({}, 504)])
def test_a_request_is_given_up_at_its_deadline(engine: AsyncEngine, options: dict[str, Any], status: int) -> None:
    async def body(made: Running) -> None:
        hold(engine, 0)
        headers = {} if options else {"X-Request-Timeout": "0.05"}
        answer = await made.complete(headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, "request_timeout")
        await until(waiting(made, 0))
        assert made.server.queue.num_in_flight == 0

    with_server(engine, body, **options)


def test_a_client_that_leaves_gives_everything_back(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        hold(engine, 0)
        asking = [asyncio.create_task(made.complete(stream=stream)) for stream in (True, False)]
        await until(waiting(made, 2))
        for task in asking:
            task.cancel()
        await until(waiting(made, 0))
        await until(lambda: made.server.queue.num_in_flight == 0 and made.server.lifecycle.num_in_flight == 0)

    with_server(engine, body)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"n": 10**9}, "n"), ({"n": 65}, "n"), ({"logprobs": 21}, "logprobs"), ({"max_tokens": 10**6}, "max_tokens")],
)
def test_every_multiplier_is_bounded_and_named(engine: AsyncEngine, fields: dict[str, Any], param: str) -> None:
    """CVE-2026-34756: an `n` without a bound stopped the event loop and took all memory."""

    async def body(made: Running) -> None:
        answer = await made.complete(**fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

    with_server(engine, body)


def test_errors_tell_nothing_of_the_machine(engine: AsyncEngine, tiny_directory: Path) -> None:
    """CVE-2026-22778, CVE-2025-23320: addresses and internal names in error texts were the first step of attacks."""

    async def body(made: Running) -> None:
        bodies = [b"{", b"[]", b'{"prompt": 1e999}', b'{"prompt": null}', b'{"prompt": {"a": ' * 2000, b"\xff\xfe"]
        bodies += [json.dumps({"prompt": "x", "structured_outputs": {"regex": "("}}).encode()]
        answers = [
            await made.client.post(path, content=content, headers={"Content-Type": "application/json"})
            for content in bodies
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize")
        ]
        answers += [await made.client.get(path) for path in ("/nowhere", "/v1/models/none", "/admin/x")]
        for answer in answers:
            assert 400 <= answer.status_code < 500
            for secret in (str(tiny_directory), "Traceback", " at 0x", ".py", "site-packages"):
                assert secret not in answer.text

    with_server(engine, body)


# ---- batching


def test_requests_wait_for_company_as_the_policy_says(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        first = asyncio.create_task(made.complete())
        await until(lambda: made.server.dispatcher.num_waiting == 1)
        answers = await asyncio.gather(first, made.complete())
        assert {answer.status_code for answer in answers} == {200}
        assert made.server.dispatcher.batch_sizes == [2]

    with_server(engine, body, max_queue_delay_us=3_600_000_000, preferred_batch_size="2")


def test_a_queue_timeout_is_503_and_may_be_shortened_only_if_that_is_allowed(engine: AsyncEngine) -> None:
    slow = {"queue_timeout_us": 3_600_000_000}

    async def allowed(made: Running) -> None:
        hold(engine, 0)
        running = [asyncio.create_task(made.complete(n=4))]
        await until(waiting(made, 4))
        answer = await made.complete({"X-Queue-Timeout": "0.05"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_timeout")
        hold(engine, None)
        await asyncio.gather(*running)

    async def refused(made: Running) -> None:
        answer = await made.complete({"X-Queue-Timeout": "0.05"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Queue-Timeout")

    with_server(engine, allowed, **slow, allow_timeout_override=True)
    with_server(engine, refused, **slow)


# ---- keys


def test_keys_do_not_share_cached_prefixes(engine: AsyncEngine) -> None:
    """CVE-2025-46570: the time of a prefix that hits tells what others have asked."""

    async def body(made: Running) -> None:
        async def num_cached(key: str, **fields: Any) -> int:
            answer = await made.complete({"Authorization": f"Bearer {key}"}, prompt=PROMPT + " of keys", **fields)
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert await num_cached("one") == 0
        assert await num_cached("one") > 0
        assert await num_cached("two") == 0
        assert await num_cached("one", cache_salt="mine") == 0
        assert await num_cached("two", cache_salt="mine") == 0
        assert (await made.complete()).status_code == 401

    with_server(engine, body, environ={"HEADRACE_API_KEY": "one", "VLLM_API_KEY": "two"})


# ---- the end


def test_a_drain_finishes_what_runs_and_refuses_what_comes(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        hold(engine, 0)
        running = asyncio.create_task(made.complete(stream=True))
        await until(waiting(made, 1))
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: made.server.state.phase == "draining")
        ready = await made.client.get("/ready")
        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "draining")
        assert (await made.client.get("/health")).status_code == 200
        refused = await made.complete()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "30")
        hold(engine, None)
        text = (await running).text
        assert text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in text
        assert await made.exit == 0

    with_server(engine, body)


def test_what_is_aborted_at_the_end_gets_a_last_chunk(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        hold(engine, 0)
        streaming = asyncio.create_task(made.complete(stream=True))
        await until(waiting(made, 1))
        os.kill(os.getpid(), signal.SIGTERM)
        text = (await streaming).text
        assert text.endswith("data: [DONE]\n\n") and '"finish_reason":"abort"' in text
        assert await made.exit == 1
        assert waiting(made, 0)()

    with_server(engine, body, shutdown_timeout_s=0.05)


# ---- the start


def test_what_can_be_refused_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path / "no-such-model"))
    for options in ({"api_key_file": str(tmp_path / "none")}, {"ssl_certfile": str(tmp_path / "none")}):
        with pytest.raises(ConfigError, match="cannot be"):
            serve(config, ServerOptions(port=0, **options), tell=lambda line: None)  # type: ignore[arg-type]
    with open_listener(ServerOptions(port=0)) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="cannot listen"):
            serve(config, ServerOptions(port=taken.getsockname()[1]), tell=lambda line: None)


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ({}, None),
        ({"host": "localhost"}, None),
        ({"host": "::1"}, None),
        ({"host": "0.0.0.0"}, "everybody who can reach 0.0.0.0"),
        ({"host": "0.0.0.0", "api_key": "k"}, "travel unencrypted"),
    ],
)
def test_an_open_server_is_warned_about(options: dict[str, Any], warning: str | None) -> None:
    from headrace.server.serve import _warn

    told: list[str] = []
    made = ServerOptions(**options)
    _warn(made, Keys(made, environ={}, tell=told.append), told.append)
    assert len(told) == (warning is not None)
    assert warning is None or warning in told[0]
