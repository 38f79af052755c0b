"""Lines of a batch whose `model` names a LoRA adapter of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import transformers
from tokenizers import Tokenizer

from headrace.config import EngineConfig
from tests.engine.adapters import merged, save_adapter
from tests.engine.tiny import greedy, save_model
from tests.server.batch.batch_server import (
    BatchServer,
    config_of,
    create,
    line,
    results,
    serving_batches,
    wait_for,
)
from tests.server.whole_server import LimitedEngine

PROMPT = list(range(1, 20))
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def model(root: Path) -> transformers.PreTrainedModel:
    made = save_model(root / "model")
    for seed, name in enumerate(("sql", "chat")):
        save_adapter(root / name, made, seed=seed)
    return made


@pytest.fixture(scope="module")
def config(root: Path, model: transformers.PreTrainedModel) -> EngineConfig:
    return config_of(root / "model", max_loras=2, lora_modules={"sql": str(root / "sql")})


@pytest.fixture(scope="module")
def engine(config: EngineConfig) -> Iterator[LimitedEngine]:
    made = LimitedEngine.of(config)
    yield made
    asyncio.run(made.close())


@pytest.fixture
def server(engine: LimitedEngine, config: EngineConfig, tmp_path: Path) -> Iterator[BatchServer]:
    with serving_batches(engine, config, tmp_path / "batches", served_model_name=("tiny", "alias")) as running:
        yield running
    engine.client.limit_running(None)


def asked(name: str, custom_id: str | None = None) -> dict[str, Any]:
    given = {"prompt": PROMPT, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return line(custom_id or name, model=name, **given)


def on_loop(server: BatchServer, call: Any) -> None:
    asyncio.run_coroutine_threadsafe(call, server.loop).result()


def test_the_model_of_a_line_names_its_adapter(
    client: openai.OpenAI, root: Path, model: transformers.PreTrainedModel
) -> None:
    batch = wait_for(client, create(client, [asked("sql"), asked("tiny"), asked("alias")]).id, "completed", "failed")
    answers = results(client, batch.output_file_id)
    tokenizer = Tokenizer.from_file(str(root / "model" / "tokenizer.json"))
    expected = {"sql": merged(model, root / "sql"), "tiny": model, "alias": model}
    assert set(answers) == set(expected), (batch.errors, results(client, batch.error_file_id))
    for name, made in expected.items():
        body = answers[name]["response"]["body"]
        assert body["choices"][0]["text"] == tokenizer.decode(greedy(made, PROMPT, NUM_TOKENS))
        assert body["model"] == ("sql" if name == "sql" else "tiny")
    assert batch.model == "tiny"


def test_a_name_that_is_no_adapter_fails_the_batch_with_the_names_there_are(client: openai.OpenAI) -> None:
    (error,) = wait_for(client, create(client, [asked("sqll")]).id, "failed").errors.data
    assert (error.code, error.line, error.param) == ("model_not_found", 1, "body.model")
    assert "did you mean 'sql'" in error.message and "'tiny'" in error.message


def test_a_line_whose_adapter_is_unloaded_before_it_starts_becomes_an_error_line(
    server: BatchServer, client: openai.OpenAI, engine: LimitedEngine, root: Path
) -> None:
    on_loop(server, engine.load_adapter("chat", str(root / "chat")))
    engine.client.limit_running(0)
    prompts = [[*PROMPT, number] for number in range(1, 13)]  # more than the four that wait in the engine
    lines = [line(f"{number}", model="chat", prompt=prompt) for number, prompt in enumerate(prompts)]
    batch = create(client, lines)
    while not engine.stats.scheduler.num_waiting:
        pass
    on_loop(server, engine.unload_adapter("chat"))
    engine.client.limit_running(None)
    batch = wait_for(client, batch.id, "completed")
    answers, errors = results(client, batch.output_file_id), results(client, batch.error_file_id)
    assert answers and errors and len(answers) + len(errors) == len(lines)
    for each in errors.values():
        assert each["response"]["status_code"] == 404
        assert each["response"]["body"]["error"]["code"] == "model_not_found"


def test_after_a_restart_a_batch_waits_until_its_adapter_is_loaded_again(
    engine: LimitedEngine, config: EngineConfig, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine.client.limit_running(0)
    without = replace(config, lora_modules=None, enable_lora=True)
    with serving_batches(engine, without, tmp_path / "batches") as first, first.client() as client:
        on_loop(first, engine.load_adapter("chat", str(root / "chat")))
        batch = create(client, [asked("chat")])
        while not engine.stats.scheduler.num_waiting:
            pass
        on_loop(first, engine.unload_adapter("chat"))
    with serving_batches(engine, without, tmp_path / "batches") as second, second.client() as client:
        while "adapter 'chat'" not in caplog.text:
            pass
        assert client.batches.retrieve(batch.id).status == "in_progress"
        engine.client.limit_running(None)
        on_loop(second, engine.load_adapter("chat", str(root / "chat")))
        try:
            assert wait_for(client, batch.id, "completed").request_counts.completed == 1
        finally:
            on_loop(second, engine.unload_adapter("chat"))


def test_a_batch_whose_adapter_is_not_there_expires(
    engine: LimitedEngine, config: EngineConfig, root: Path, tmp_path: Path
) -> None:
    engine.client.limit_running(0)
    with serving_batches(engine, config, tmp_path / "batches", window_s=2) as server, server.client() as client:
        on_loop(server, engine.load_adapter("chat", str(root / "chat")))
        create(client, [asked("tiny")])  # it runs, and the other waits behind it
        waiting = wait_for(client, create(client, [asked("chat"), asked("tiny")]).id, "in_progress", "expired")
        on_loop(server, engine.unload_adapter("chat"))
        ended = wait_for(client, waiting.id, "expired", "failed", "completed")
        errors = results(client, ended.error_file_id)
        assert (ended.status, errors.keys()) == ("expired", {"chat", "tiny"})
        assert {each["error"]["code"] for each in errors.values()} == {"batch_expired"}
    engine.client.limit_running(None)
