"""LoRA adapters of a server: by the `model` of a request, listed, loaded and unloaded while it runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers

from headrace.config import EngineConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.engine.process.supervisor import Supervision
from headrace.engine.start import start_engine, start_engine_process
from tests.engine.adapters import merged, save_adapter
from tests.engine.tiny import greedy, save_model
from tests.server.live import until
from tests.server.whole_server import Running, with_server

PROMPT = list(range(1, 20))
ADMIN = {"authorization": "Bearer boss"}
OPTIONS = {"admin_key": "boss"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def model(root: Path) -> transformers.PreTrainedModel:
    made = save_model(root / "model")
    for seed, name in enumerate(("sql", "chat", "late")):
        save_adapter(root / name, made, seed=seed)
    return made


@pytest.fixture(scope="module")
def config(root: Path, model: transformers.PreTrainedModel) -> EngineConfig:
    return EngineConfig(
        model=str(root / "model"),
        max_num_seqs=4,
        num_gpu_blocks_override=128,
        max_loras=2,
        lora_modules={"sql": str(root / "sql")},
    )


@pytest.fixture(scope="module")
def engine(config: EngineConfig) -> Iterator[AsyncEngine]:
    made = AsyncEngine.over(partial(start_engine, config))
    yield made
    asyncio.run(made.close())


async def completed(made: Running, name: str | None, **more: Any) -> tuple[str, list[int]]:
    """The model that answered, and its tokens."""
    asked = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True, **more}
    answer = await made.client.post("/v1/completions", json=asked | ({} if name is None else {"model": name}))
    assert answer.status_code == 200, answer.text
    return answer.json()["model"], answer.json()["choices"][0]["token_ids"]


async def changed(made: Running, what: str, **body: Any) -> tuple[int, str]:
    answer = await made.client.post(f"/v1/{what}_lora_adapter", json=body, headers=ADMIN)
    return answer.status_code, answer.text if answer.status_code == 200 else answer.json()["error"]["message"]


def test_the_model_of_a_request_names_its_adapter(
    engine: AsyncEngine, root: Path, model: transformers.PreTrainedModel
) -> None:
    async def body(made: Running) -> None:
        assert await completed(made, "sql") == ("sql", greedy(merged(model, root / "sql"), PROMPT, 8))
        assert await completed(made, "tiny") == ("tiny", greedy(model, PROMPT, 8))
        listed = {entry["id"]: entry for entry in (await made.client.get("/v1/models")).json()["data"]}
        assert list(listed) == ["tiny", "sql"]
        assert (listed["sql"]["parent"], listed["sql"]["root"]) == ("tiny", str(root / "sql"))
        assert listed["tiny"]["parent"] is None
        assert (await made.client.get("/v1/models/sql")).json()["id"] == "sql"
        streamed = await made.client.post(
            "/v1/chat/completions",
            json={"model": "sql", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": True},
        )
        chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        assert {chunk["model"] for chunk in chunks} == {"sql"}
        unknown = await made.complete(model="sqll")
        assert unknown.status_code == 404 and "'sql'" in unknown.json()["error"]["message"]

    with_server(engine, body, **OPTIONS)


def test_adapters_are_loaded_and_unloaded_while_requests_run(
    engine: AsyncEngine, root: Path, model: transformers.PreTrainedModel
) -> None:
    async def body(made: Running) -> None:
        running = asyncio.create_task(completed(made, "sql", max_tokens=300))
        expected = "Success: LoRA adapter 'chat' added successfully."
        assert await changed(made, "load", lora_name="chat", lora_path=str(root / "chat")) == (200, expected)
        assert await completed(made, "chat") == ("chat", greedy(merged(model, root / "chat"), PROMPT, 8))
        status, message = await changed(made, "load", lora_name="chat", lora_path=str(root / "chat"))
        assert status == 400 and "has already been loaded" in message
        expected = "Success: LoRA adapter 'chat' removed successfully."
        assert await changed(made, "unload", lora_name="chat") == (200, expected)
        assert (await made.complete(model="chat")).status_code == 404
        assert await changed(made, "unload", lora_name="chat") == (404, "The lora adapter 'chat' cannot be found.")
        name, tokens = await running
        assert name == "sql" and len(tokens) == 300

    with_server(engine, body, **OPTIONS)


def test_more_adapters_than_max_loras_answer_at_the_same_time(
    engine: AsyncEngine, root: Path, model: transformers.PreTrainedModel
) -> None:
    names = ["late", "sql", "chat", "chat", "late"]

    async def body(made: Running) -> None:
        for name in ("chat", "late"):
            assert (await changed(made, "load", lora_name=name, lora_path=str(root / name)))[0] == 200
        answers = await asyncio.gather(*(completed(made, name) for name in names))
        assert answers == [(name, greedy(merged(model, root / name), PROMPT, 8)) for name in names]
        for name in ("chat", "late"):
            assert (await changed(made, "unload", lora_name=name))[0] == 200

    with_server(engine, body, **OPTIONS)


def test_a_bad_adapter_is_refused_and_harms_nobody(engine: AsyncEngine, root: Path) -> None:
    async def body(made: Running) -> None:
        wrong = ((root / "nowhere", 404, "no directory"), (root / "model", 400, "no adapter_config.json"))
        for path, expected, part in wrong:
            status, message = await changed(made, "load", lora_name="bad", lora_path=str(path))
            assert status == expected and part in message
        assert (await changed(made, "load", lora_name="bad"))[0] == 400
        assert (await changed(made, "load", lora_name="tiny", lora_path=str(root / "chat")))[0] == 400
        no_key = await made.client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "b"})
        assert no_key.status_code == 401
        await completed(made, "sql")

    with_server(engine, body, **OPTIONS)


def test_sagemaker_loads_uses_and_unloads_an_adapter(
    engine: AsyncEngine, root: Path, model: transformers.PreTrainedModel
) -> None:
    async def body(made: Running) -> None:
        client, chat = made.client, {"name": "chat 2", "src": str(root / "chat")}
        assert (await client.post("/adapters", json=chat)).status_code == 401
        assert (await client.post("/adapters", json=chat, headers=ADMIN)).status_code == 200
        asked = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
        named = {"X-Amzn-SageMaker-Adapter-Identifier": "chat 2"}
        answer = (await client.post("/invocations", json=asked | {"model": "tiny"}, headers=named)).json()
        expected = greedy(merged(model, root / "chat"), PROMPT, 8)
        assert (answer["model"], answer["choices"][0]["token_ids"]) == ("chat 2", expected)
        assert (await client.delete("/adapters/chat%202")).status_code == 401
        assert (await client.delete("/adapters/chat%202", headers=ADMIN)).status_code == 200
        assert (await client.delete("/adapters/chat%202", headers=ADMIN)).status_code == 404
        nowhere = {"name": "a", "src": str(root / "nowhere")}
        assert (await client.post("/adapters", json=nowhere, headers=ADMIN)).status_code == 404
        assert (await client.post("/adapters", json={"name": "a"}, headers=ADMIN)).status_code == 400

    with_server(engine, body, **OPTIONS)


def test_without_an_admin_key_adapters_stay_as_they_are(engine: AsyncEngine, root: Path) -> None:
    async def body(made: Running) -> None:
        status, message = await changed(made, "unload", lora_name="sql")
        assert status == 404 and "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in message
        await completed(made, "sql")

    with_server(engine, body)


def test_the_metric_of_vllm_names_running_adapters(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        running = asyncio.create_task(completed(made, "sql", max_tokens=400))

        async def is_named() -> bool:
            page = (await made.client.get("/metrics")).text
            lines = [line for line in page.splitlines() if line.startswith("vllm:lora_requests_info{")]
            assert len(lines) == 1 and 'max_lora="2"' in lines[0]
            return 'running_lora_adapters="sql"' in lines[0]

        while not running.done() and not await is_named():
            pass
        assert not running.done()
        running.cancel()

    with_server(engine, body, **OPTIONS)


@pytest.mark.slow
@pytest.mark.processes
def test_an_engine_that_is_restarted_has_its_adapters_again(
    config: EngineConfig, root: Path, model: transformers.PreTrainedModel
) -> None:
    engine = AsyncEngine.over(partial(start_engine_process, config, supervision=Supervision()))

    async def body(made: Running) -> None:
        assert (await changed(made, "load", lora_name="late", lora_path=str(root / "late")))[0] == 200
        pid, before = engine.pid, engine.num_restarts
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: engine.num_restarts > before and engine.phase == "ready")
        assert await completed(made, "late") == ("late", greedy(merged(model, root / "late"), PROMPT, 8))
        assert await completed(made, "sql") == ("sql", greedy(merged(model, root / "sql"), PROMPT, 8))
        assert (await changed(made, "unload", lora_name="late"))[0] == 200
        status, message = await changed(made, "load", lora_name="bad", lora_path=str(root / "nowhere"))
        assert status == 400 and "no directory" in message

    try:
        with_server(engine, body, **OPTIONS)
    finally:
        asyncio.run(engine.close())
