"""The whole server with a small model, as clients see it: limits, deadlines, batching, keys, shutdown."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.monitor.alerts import FAILED, OVERLOAD
from headrace.server.endpoints.prompting import tokenize
from headrace.server.http.keys import Keys
from headrace.server.http.lifecycle import open_listener
from headrace.server.options import ServerOptions
from headrace.server.serve import serve
from tests.server.live import until
from tests.server.whole_server import PROMPT, LimitedEngine, Running, waiting, with_server


@pytest.fixture(scope="module")
def engine(tiny_directory: Path) -> Iterator[LimitedEngine]:
    made = LimitedEngine.of(EngineConfig(model=str(tiny_directory), max_num_seqs=4, num_gpu_blocks_override=256))
    yield made
    asyncio.run(made.close())


def test_a_finished_request_leaves_nothing_behind(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        answer = await made.complete()
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 2
        await until(lambda: made.server.queue.num_in_flight == 0)
        assert engine.stats.scheduler.num_running == engine.stats.scheduler.num_waiting == 0

    with_server(engine, body)


def test_warnings_about_settings_are_printed_first(engine: LimitedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    warned = replace(engine.settings, warnings=("max_num_seqs=4 is odd",))
    monkeypatch.setattr(type(engine), "settings", property(lambda self: warned))

    async def body(made: Running) -> None:
        made.printed.clear()
        made.server.print_settings()
        assert made.printed[0] == "warning: max_num_seqs=4 is odd"
        told = (await made.client.get("/server_info")).json()
        assert told["warnings"] == ["max_num_seqs=4 is odd"]

    with_server(engine, body)


def test_automatic_settings_are_printed_with_their_reasons(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        made.server.print_settings()
        assert "max_num_queued_reqs = 1,024 (4 x max_num_seqs, at least 1,024)" in made.printed
        reason = "4 x the tokens of the KV cache, at least 1,048,576"
        assert f"max_num_queued_tokens = 1,048,576 ({reason})" in made.printed
        assert [line for line in made.printed if line.startswith("max_model_len = 512 (")]

    with_server(engine, body)


def test_the_request_id_of_a_header_is_part_of_the_answers_id(engine: LimitedEngine) -> None:
    """Two requests may have the same: a proxy sends one again."""

    async def body(made: Running) -> None:
        header = {"X-Request-Id": "trace-7"}
        engine.client.limit_running(0)
        tasks = [asyncio.create_task(made.complete(headers=header)) for _ in range(2)]
        await until(waiting(made, 2))
        engine.client.limit_running(None)
        for answer in await asyncio.gather(*tasks):
            assert (answer.status_code, answer.json()["id"]) == (200, "cmpl-trace-7")
        named = await made.complete(headers=header, request_id="mine")
        assert named.json()["id"] == "cmpl-mine"
        unnamed = await made.complete()
        assert unnamed.json()["id"] == f"cmpl-{unnamed.headers['x-request-id']}"
        messages = [{"role": "user", "content": "hi"}]
        for path, asked, prefix in (
            ("/v1/chat/completions", {"messages": messages, "max_tokens": 2}, "chatcmpl-"),
            ("/v1/responses", {"input": "hi", "max_output_tokens": 2}, "resp_"),
        ):
            answer = await made.client.post(path, json=asked, headers=header)
            assert answer.json()["id"] == f"{prefix}trace-7"

    with_server(engine, body)


# ---- limits


def test_a_full_queue_is_a_503_with_retry_after(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        engine.client.limit_running(0)
        first = asyncio.create_task(made.complete())
        await until(lambda: made.server.queue.num_waiting == 1)
        refused = await made.complete()
        assert refused.status_code == 503 and refused.headers["retry-after"].isdecimal()
        assert refused.json()["error"]["code"] == "queue_full"
        engine.client.limit_running(None)
        assert (await first).status_code == 200
        assert (
            'requests_refused_total{engine="0",model_name="tiny",reason="queue_full"} 1.0'
            in (await made.client.get("/metrics")).text
        )

    with_server(engine, body, max_num_queued_reqs=1)


@pytest.mark.parametrize(("num_characters", "num_counted"), [(8_000, 512), (100_000, 0)])
def test_a_prompt_that_is_too_long_does_not_keep_others_out(
    engine: LimitedEngine, monkeypatch: pytest.MonkeyPatch, num_characters: int, num_counted: int
) -> None:
    is_tokenized = asyncio.Event()

    async def slow(reader: Any, prompts: Any, **options: Any) -> Any:
        if len(prompts[0]) > 1000:
            await is_tokenized.wait()
        return await tokenize(reader, prompts, **options)

    monkeypatch.setattr("headrace.server.endpoints.completions.tokenize", slow)

    async def body(made: Running) -> None:
        long = asyncio.create_task(made.complete(prompt="x" * num_characters))
        await until(lambda: made.server.queue.num_waiting == 1)
        assert made.server.queue.num_waiting_tokens == num_counted
        assert (await made.complete()).status_code == 200
        engine.client.limit_running(0)
        other = asyncio.create_task(made.complete())
        await until(waiting(made, 1))
        is_tokenized.set()
        refused = await long
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        engine.client.limit_running(None)
        assert (await other).status_code == 200

    with_server(engine, body)


@pytest.mark.parametrize(("options", "status"), [({"request_timeout_s": 0.05}, 504), ({}, 504)])
def test_a_request_ends_at_its_deadline(engine: LimitedEngine, options: dict[str, Any], status: int) -> None:
    async def body(made: Running) -> None:
        engine.client.limit_running(0)
        headers = {} if options else {"X-Request-Timeout": "0.05"}
        answer = await made.complete(headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, "request_timeout")
        assert "after its 0.05 seconds" in answer.json()["error"]["message"]
        await until(waiting(made, 0))
        assert made.server.queue.num_in_flight == 0

    with_server(engine, body, **options)


def test_a_disconnect_frees_everything(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        engine.client.limit_running(0)
        asking = [asyncio.create_task(made.complete(stream=stream)) for stream in (True, False)]
        await until(waiting(made, 2))
        for task in asking:
            task.cancel()
        await until(waiting(made, 0))
        await until(lambda: made.server.queue.num_in_flight == 0 and made.server.lifecycle.num_in_flight == 0)

    with_server(engine, body)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"n": 10**9}, "n"), ({"n": 129}, "n"), ({"logprobs": 21}, "logprobs"), ({"max_tokens": 10**6}, "max_tokens")],
)
def test_every_multiplier_is_bounded(engine: LimitedEngine, fields: dict[str, Any], param: str) -> None:
    """CVE-2026-34756: an unbounded `n` blocked the event loop and took all memory."""

    async def body(made: Running) -> None:
        answer = await made.complete(**fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

    with_server(engine, body)


def test_errors_reveal_nothing_about_the_machine(engine: LimitedEngine, tiny_directory: Path) -> None:
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


def test_requests_wait_for_a_batch_of_a_preferred_size(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        first = asyncio.create_task(made.complete())
        await until(lambda: made.server.dispatcher.num_waiting == 1)
        answers = await asyncio.gather(first, made.complete())
        assert {answer.status_code for answer in answers} == {200}
        assert made.server.dispatcher.batch_sizes == [2]

    with_server(engine, body, max_queue_delay_us=3_600_000_000, preferred_batch_size="2")


def test_a_queue_timeout_is_a_503_and_may_be_shortened_only_if_allowed(engine: LimitedEngine) -> None:
    slow = {"queue_timeout_us": 3_600_000_000}

    async def allowed(made: Running) -> None:
        engine.client.limit_running(0)
        running = [asyncio.create_task(made.complete(n=4))]
        await until(waiting(made, 4))
        answer = await made.complete({"X-Queue-Timeout": "0.05"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_timeout")
        failed, refused = made.server.metrics.read((FAILED, OVERLOAD)).values()
        assert (failed, refused) == (0, 1)  # a refusal is not an error
        engine.client.limit_running(None)
        await asyncio.gather(*running)

    async def refused(made: Running) -> None:
        answer = await made.complete({"X-Queue-Timeout": "0.05"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Queue-Timeout")

    with_server(engine, allowed, **slow, allow_timeout_override=True)
    with_server(engine, refused, **slow)


# ---- keys


def test_keys_do_not_share_cached_prefixes(engine: LimitedEngine) -> None:
    """CVE-2025-46570: the latency of a prefix hit reveals what others have asked."""

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


# ---- shutdown


def test_a_drain_finishes_running_requests_and_refuses_new_ones(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        engine.client.limit_running(0)
        running = asyncio.create_task(made.complete(stream=True))
        await until(waiting(made, 1))
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: made.server.state.phase == "draining")
        ready = await made.client.get("/ready")
        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "draining")
        assert (await made.client.get("/health")).status_code == 200
        refused = await made.complete()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "30")
        engine.client.limit_running(None)
        text = (await running).text
        assert text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in text
        assert await made.exit == 0

    with_server(engine, body)


def test_requests_aborted_at_shutdown_get_a_last_chunk(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        engine.client.limit_running(0)
        streaming = asyncio.create_task(made.complete(stream=True))
        await until(waiting(made, 1))
        os.kill(os.getpid(), signal.SIGTERM)
        text = (await streaming).text
        assert text.endswith("data: [DONE]\n\n") and '"finish_reason":"abort"' in text
        assert await made.exit == 1
        assert waiting(made, 0)()

    with_server(engine, body, shutdown_timeout_s=0.05)


# ---- start


def test_invalid_options_are_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path / "no-such-model"))
    for options in ({"api_key_file": str(tmp_path / "none")}, {"ssl_certfile": str(tmp_path / "none")}):
        with pytest.raises(ConfigError, match="cannot be"):
            serve(config, ServerOptions(port=0, **options), print_line=lambda line: None)  # type: ignore[arg-type]
    with open_listener(ServerOptions(port=0)) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="cannot listen"):
            serve(config, ServerOptions(port=taken.getsockname()[1]), print_line=lambda line: None)


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ({}, None),
        ({"host": "localhost"}, None),
        ({"host": "::1"}, None),
        ({"host": "0.0.0.0"}, "anyone who can reach 0.0.0.0"),
        ({"host": "0.0.0.0", "api_key": "k"}, "sent unencrypted"),
    ],
)
def test_an_exposed_server_gives_a_warning(options: dict[str, Any], warning: str | None) -> None:
    from headrace.server.serve import print_warnings

    printed: list[str] = []
    made = ServerOptions(**options)
    print_warnings(made, Keys(made, environ={}, print_line=printed.append), printed.append)
    assert len(printed) == (warning is not None)
    assert warning is None or warning in printed[0]
