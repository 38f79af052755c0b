"""A server with the Batch API on a free port, for tests on another thread: keys, gate and a real engine."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import openai
import uvicorn

from headrace.config import EngineConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.server.batch.service import BatchService
from headrace.server.batch.setup import build_service, open_store
from headrace.server.endpoints import ROUTES
from headrace.server.http.app import App
from headrace.server.http.gate import Gate
from headrace.server.http.keys import Keys
from headrace.server.http.lifecycle import uvicorn_config
from headrace.server.http.routes import Router
from headrace.server.options import ServerOptions
from headrace.server.serve import Server
from tests.server.serving import running_server

MODEL = "tiny"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
WAIT_S = 60.0  # ends a test that hangs; no result depends on it
POLL_S = 0.005  # leaves the interpreter to the server and the engine, which run in this process


@dataclass
class BatchServer:
    url: str
    service: BatchService
    server: Server
    loop: asyncio.AbstractEventLoop

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)


def config_of(directory: Path, **settings: Any) -> EngineConfig:
    given = {"max_num_seqs": 4, "num_gpu_blocks_override": 256, "scheduling_policy": "priority", **settings}
    return EngineConfig(model=str(directory), **given)


@contextmanager
def serving_batches(
    engine: AsyncEngine, config: EngineConfig, directory: Path, *, window_s: int | None = None, **given: Any
) -> Iterator[BatchServer]:
    options = ServerOptions(batch_dir=str(directory), **given)
    keys = Keys(options, environ={}, print_line=lambda line: None)
    store = open_store(options)
    assert store is not None
    server = Server(engine, options, keys, model_name=MODEL, print_line=lambda line: None, config=config)
    window = {} if window_s is None else {"window_s": window_s}
    service = build_service(store, engine, options, config=config, model_name=MODEL, **window)
    server.services.batches = service
    router = Router(ROUTES)
    gate = Gate(
        App(server.services, ROUTES),
        options,
        keys,
        public_paths=router.public_paths,
        streamed_paths=router.streamed_paths,
    )
    server.state.ready()
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    made = uvicorn.Server(uvicorn_config(gate, options, lambda reason: None))
    with service.running(), running_server(made, listener) as loop:
        yield BatchServer(url, service, server, loop)


def line(custom_id: str, *, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"model": MODEL, "max_tokens": 3}
    given |= {"prompt": f"Text {custom_id}"} if url == COMPLETIONS else {}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**given, **body}}


def as_jsonl(lines: Sequence[dict[str, Any] | str]) -> bytes:
    return "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines).encode()


def upload(client: openai.OpenAI, lines: Sequence[dict[str, Any] | str], name: str = "in.jsonl") -> str:
    return client.files.create(file=(name, as_jsonl(lines)), purpose="batch").id


def create(
    client: openai.OpenAI, lines: Sequence[dict[str, Any] | str], endpoint: Any = COMPLETIONS, **given: Any
) -> Any:
    return client.batches.create(
        input_file_id=upload(client, lines), endpoint=endpoint, completion_window="24h", **given
    )


def wait_for(client: openai.OpenAI, batch_id: str, *statuses: str) -> Any:
    """Poll, as clients do, until the batch has one of these states."""
    until = monotonic() + WAIT_S
    while (batch := client.batches.retrieve(batch_id)).status not in statuses:
        assert monotonic() < until, f"the batch is still {batch.status}: {batch}"
        sleep(POLL_S)
    return batch


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """The lines of an output or error file, by custom_id. Each id is there once."""
    if file_id is None:
        return {}
    lines = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines), "a line is there twice"
    return found
