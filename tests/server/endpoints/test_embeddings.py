"""The embeddings endpoint: inputs and formats, the queue, keys, deadlines, disconnects, metrics and errors."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from headrace.config import EngineConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.server.endpoints import ROUTES
from headrace.server.endpoints.openapi import document
from headrace.server.options import ServerOptions
from tests.server.fake_engine import FakeEngine
from tests.server.live import until
from tests.server.serving import MODEL, Server, serving
from tests.server.whole_server import LimitedEngine, Running, waiting, with_server

PATH = "/v1/embeddings"
TEXTS = ["one", "a longer text", "one"]


def embed(server: Server, given: Any, **more: Any) -> dict[str, Any]:
    answer = server.post(PATH, {"input": given, **more})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def vectors(body: dict[str, Any]) -> np.ndarray:
    return np.array([item["embedding"] for item in body["data"]], np.float32)


def ids(text: str, server: Server) -> list[int]:
    tokens: list[int] = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    return tokens


async def ask(made: Running, given: Any = "hi", headers: dict[str, str] | None = None, **more: Any) -> httpx2.Response:
    return await made.client.post(PATH, json={"input": given, **more}, headers=headers)


@pytest.fixture(scope="module")
def engine(tiny_directory: Path) -> Iterator[LimitedEngine]:
    made = LimitedEngine.of(EngineConfig(model=str(tiny_directory), max_num_seqs=4, num_gpu_blocks_override=256))
    yield made
    asyncio.run(made.close())


# ---- answers


def test_the_answer_has_openais_shape_and_the_engines_values(server: Server) -> None:
    body = embed(server, "hello", model=MODEL)
    num_tokens = len(ids("hello", server))
    assert body.keys() == {"object", "data", "model", "usage"}
    assert (body["object"], body["model"]) == ("list", MODEL)
    assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    (item,) = body["data"]
    assert (item["object"], item["index"]) == ("embedding", 0)
    own = asyncio.run_coroutine_threadsafe(server.services.engine.embed("hello"), server.loop).result(60)
    np.testing.assert_allclose(item["embedding"], own.embedding, atol=1e-5)
    assert np.linalg.norm(item["embedding"]) == pytest.approx(1, abs=1e-5)


def test_all_forms_of_input_give_the_same_embeddings(server: Server) -> None:
    several = embed(server, TEXTS)
    assert [item["index"] for item in several["data"]] == [0, 1, 2]
    assert several["usage"]["prompt_tokens"] == sum(len(ids(text, server)) for text in TEXTS)
    found = vectors(several)
    alone = np.concatenate([vectors(embed(server, text)) for text in TEXTS])
    of_ids = np.concatenate([vectors(embed(server, ids(text, server))) for text in TEXTS])
    of_lists = vectors(embed(server, [ids(text, server) for text in TEXTS]))
    for other in (alone, of_ids, of_lists):
        np.testing.assert_allclose(found, other, atol=1e-5)
    assert not np.allclose(found[0], found[1], atol=1e-2)


def test_base64_is_the_same_as_little_endian_floats(server: Server) -> None:
    (item,) = embed(server, "hello", encoding_format="base64")["data"]
    found = np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
    np.testing.assert_allclose(found, vectors(embed(server, "hello", encoding_format="float"))[0], atol=1e-5)


def test_openais_client_reads_its_default_and_floats(server: Server, client: openai.OpenAI) -> None:
    """Without encoding_format it asks for base64, and decodes it."""
    made = client.embeddings.create(model=MODEL, input=TEXTS, user="me")
    floats = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    found = np.array([item.embedding for item in made.data])
    np.testing.assert_allclose(found, [item.embedding for item in floats.data], atol=1e-5)
    np.testing.assert_allclose(found, vectors(embed(server, TEXTS)), atol=1e-5)
    assert made.usage.prompt_tokens == made.usage.total_tokens > 0


def test_an_input_may_fill_the_whole_context(server: Server) -> None:
    assert embed(server, [5] * 512)["usage"]["prompt_tokens"] == 512
    error = server.error(PATH, {"input": [[5], [5] * 513]})
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert error["message"].startswith(
        "This model's maximum context length is 512 tokens. However, your prompt has 513"
    )


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_parameter"),
        ({"input": None}, "input", "invalid_type"),
        ({"input": []}, "input", "empty_prompt"),
        ({"input": [[]]}, "input", "empty_prompt"),
        ({"input": ["a", 1]}, "input", "invalid_type"),
        ({"input": [10**6]}, "input", "invalid_request"),
        ({"input": ["x"] * 2049}, "input", "invalid_request"),
        ({"input": "x", "prompt": "y"}, "prompt", "unknown_parameter"),
        ({"input": "x", "dimensions": 8}, "dimensions", "unsupported_parameter"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "invalid_request"),
        ({"input": "x", "cache_salt": ""}, "cache_salt", "invalid_request"),
        ({"input": "x", "request_id": "a\nb"}, "request_id", "invalid_request"),
    ],
)
def test_a_bad_body_is_refused_by_the_name_of_its_field(
    server: Server, body: dict[str, Any], param: str, code: str
) -> None:
    error = server.error(PATH, body)
    assert (error["param"], error["code"]) == (param, code)
    assert server.queue.num_open == 0


def test_another_model_is_a_404(server: Server) -> None:
    assert server.error(PATH, {"input": "x", "model": "gpt-9"}, 404)["code"] == "model_not_found"


def test_a_text_of_many_megabytes_is_refused_by_its_start(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(start=FakeEngine(tiny_directory), options=ServerOptions(max_body_bytes=2**26)) as roomy:
        lengths: list[int] = []

        def encode_batch(texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
            lengths.extend(map(len, texts))
            return [[1] * 2_000 for _ in texts]

        monkeypatch.setattr(roomy.services.engine.tokenizer, "encode_batch", encode_batch)
        error = roomy.error(PATH, {"input": ["short", "word " * 3_000_000]})
        assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
        assert lengths == [8 * 512]
        assert roomy.queue.num_open == 0


def test_the_openapi_document_describes_the_body_and_no_stream() -> None:
    described = document(ROUTES)
    operation = described["paths"][PATH]["post"]
    assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/EmbeddingRequest")
    assert operation["responses"]["200"]["content"].keys() == {"application/json"}
    assert "encoding_format" in described["components"]["schemas"]["EmbeddingRequest"]["properties"]
    assert "text/event-stream" in described["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]


# ---- the queue, keys and time limits


def test_the_largest_list_takes_no_more_places_than_the_engine_has_slots(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        engine.client.limit_running(0)
        task = asyncio.create_task(ask(made, ["hi"] * 2048))
        await until(waiting(made, 2048))
        queue = made.server.queue
        assert (queue.num_waiting, queue.num_waiting_tokens) == (4, 2048 * len("hi"))
        engine.client.limit_running(None)
        answer = await task
        assert (answer.status_code, len(answer.json()["data"])) == (200, 2048)
        await until(lambda: queue.num_in_flight == 0)

    with_server(engine, body)


def test_a_full_queue_is_a_503_with_retry_after(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        engine.client.limit_running(0)
        first = asyncio.create_task(ask(made))
        await until(waiting(made, 1))
        refused = await ask(made)
        assert refused.status_code == 503 and refused.headers["retry-after"].isdecimal()
        assert refused.json()["error"]["code"] == "queue_full"
        several = await ask(made, ["hi", "you"])
        assert (several.status_code, several.json()["error"]["param"]) == (400, "input")
        assert several.json()["error"]["code"] == "too_many_prompts"
        engine.client.limit_running(None)
        assert (await first).status_code == 200

    with_server(engine, body, max_num_queued_reqs=1)


def test_a_key_is_needed_and_has_its_own_prefix_cache(tiny_directory: Path) -> None:
    salts: list[str | None] = []

    class Noting(AsyncEngine):
        def prepare_pooling(self, *given: Any, **more: Any) -> Any:
            salts.append(more["cache_salt"])
            return super().prepare_pooling(*given, **more)

    async def body(made: Running) -> None:
        assert (await ask(made)).status_code == 401
        for salt in (None, "mine"):
            answer = await ask(made, headers={"Authorization": "Bearer sesame"}, cache_salt=salt)
            assert answer.status_code == 200

    noting = Noting(str(tiny_directory), max_num_seqs=4, num_gpu_blocks_override=64)
    with_server(noting, body, api_key="sesame")
    asyncio.run(noting.close())
    assert salts[0] is not None and salts[1] == f"{salts[0]}/mine"


def test_a_request_ends_at_its_deadline(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        engine.client.limit_running(0)
        answer = await ask(made, ["hi", "you"], {"X-Request-Timeout": "0.05"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
        await until(waiting(made, 0))
        assert made.server.queue.num_in_flight == 0

    with_server(engine, body)


def test_a_disconnect_aborts_all_inputs(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        engine.client.limit_running(0)
        task = asyncio.create_task(ask(made, ["hi", "you"]))
        await until(waiting(made, 2))
        task.cancel()
        await until(waiting(made, 0))
        await until(lambda: made.server.queue.num_in_flight == 0 and made.server.lifecycle.num_in_flight == 0)

    with_server(engine, body)


def test_a_request_id_in_use_is_refused_and_aborts_nothing(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        engine.client.limit_running(0)
        first = asyncio.create_task(ask(made, request_id="mine"))
        await until(waiting(made, 1))
        second = await ask(made, request_id="mine")
        assert (second.status_code, second.json()["error"]["param"]) == (400, "request_id")
        engine.client.limit_running(None)
        assert (await first).status_code == 200

    with_server(engine, body)


# ---- metrics and failures


def test_each_input_is_measured_as_a_request_without_tokens(server: Server) -> None:
    lengths = [len(ids(text, server)) for text in ("one", "four")]
    num_before, num_received = len(server.metrics.times), server.metrics.num_received
    embed(server, ["one", "four"])
    server.wait_until(lambda: len(server.metrics.times) == num_before + 2)
    times = server.metrics.times[num_before:]
    assert server.metrics.num_received == num_received + 2
    assert server.metrics.reasons[num_before:] == ["stop", "stop"]
    assert [one.num_prompt for one in times] == lengths
    assert [(one.num_generated, one.first_token) for one in times] == [(0, None)] * 2
    assert all(one.queued_until is not None and one.queued_until >= one.arrived for one in times)
    server.wait_until(lambda: server.metrics.statuses[-1] == (PATH, "POST", 200))
    reservation = server.queue.reservations[-1]
    assert reservation.is_started and reservation.is_released
    assert (reservation.num_requests, reservation.num_tokens) == (2, sum(lengths))


def test_metrics_have_no_length_that_nobody_asked_for(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        assert (await ask(made)).status_code == 200
        page = (await made.client.get("/metrics")).text
        lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        asked = [value for name, value in lines.items() if name.startswith("vllm:request_params_max_tokens_count")]
        ended = [value for name, value in lines.items() if 'finished_reason="stop"' in name]
        assert (asked, ended[:1]) == (["0.0"], ["1.0"])

    with_server(engine, body)


def test_a_failure_of_one_input_is_a_500_and_aborts_the_others(tiny_directory: Path) -> None:
    fake = FakeEngine(tiny_directory)

    async def fail_when_submitted(server: Server) -> None:
        while len(fake.client.requests) < 2:
            await asyncio.sleep(0)
        fake.client.send_tokens([], reason="abort", error="the model gave no valid numbers", number=0)

    with serving(start=fake) as slow:
        asyncio.run_coroutine_threadsafe(fail_when_submitted(slow), slow.loop)
        error = slow.error(PATH, {"input": ["hi", "you"]}, 500)
        assert (error["type"], error["code"]) == ("server_error", "engine_error")
        slow.wait_until(lambda: fake.client.aborted == [fake.client.requests[1].request_id])
        assert slow.metrics.reasons == ["error", "error"] and slow.queue.num_open == 0


def test_a_dead_engine_is_a_503(tiny_directory: Path) -> None:
    fake = FakeEngine(tiny_directory)

    async def die_when_submitted() -> None:
        while not fake.client.requests:
            await asyncio.sleep(0)
        fake.client.fail()

    with serving(start=fake) as slow:
        asyncio.run_coroutine_threadsafe(die_when_submitted(), slow.loop)
        error = slow.error(PATH, {"input": "hi"}, 503)
        assert error["code"] == "engine_dead" and "secret" not in error["message"]
        slow.wait_until(lambda: slow.queue.num_open == 0)
