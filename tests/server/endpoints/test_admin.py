"""The /admin routes: who may call them, and what each does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from headrace.config import EngineConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.server.endpoints import ROUTES
from tests.server.live import until
from tests.server.serving import Server
from tests.server.whole_server import PROMPT, LimitedEngine, Running, with_server

ROOT = {"X-Api-Key": "root"}
CONTROLS = [(route.path, route.method) for route in ROUTES if route.auth == "admin"]


@pytest.fixture(scope="module")
def engine(tiny_directory: Path) -> Iterator[LimitedEngine]:
    made = LimitedEngine.of(EngineConfig(model=str(tiny_directory), max_num_seqs=4, num_gpu_blocks_override=256))
    yield made
    asyncio.run(made.close())


async def ask(made: Running, path: str, method: str = "POST", **headers: str) -> httpx2.Response:
    return await made.client.request(method, path, headers=headers)


def test_admin_routes_are_below_one_prefix() -> None:
    assert {path for path, _ in CONTROLS} >= {"/admin/drain", "/admin/reset_prefix_cache"}
    assert not [route.path for route in ROUTES if "admin" in route.path and not route.path.startswith("/admin/")]


@pytest.mark.parametrize(
    ("options", "key", "status"),
    [
        ({}, "root", 404),
        ({"api_key": "client"}, "client", 404),
        ({"admin_key": "root"}, None, 401),
        ({"admin_key": "root"}, "wrong", 401),
        ({"admin_key": "root", "api_key": "client"}, "client", 403),
    ],
)
def test_an_admin_route_needs_the_admin_key(
    engine: AsyncEngine, options: dict[str, str], key: str | None, status: int
) -> None:
    async def body(made: Running) -> None:
        for path, method in CONTROLS:
            answer = await ask(made, path, method, **({} if key is None else {"X-Api-Key": key}))
            assert answer.status_code == status, path
        assert made.server.state.is_ready

    with_server(engine, body, **options)


def test_without_a_gate_the_application_refuses_admin_routes(server: Server) -> None:
    for path, method in CONTROLS:
        assert server.http.request(method, server.url + path, headers=ROOT).status_code == 404


def test_info_shows_settings_with_their_reasons_and_no_secret(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        answer = await ask(made, "/admin/info", "GET", **ROOT)
        told = answer.json()
        assert (told["model"], told["phase"], told["engine"]["max_num_seqs"]) == ("tiny", "ready", 4)
        assert told["reasons"]["max_model_len"] and told["server"]["max_n"] == 128
        assert told["server"]["api_key"] == told["server"]["admin_key"] == "set"
        assert "root" not in answer.text.replace("root_path", "") and "sesame" not in answer.text

    with_server(engine, body, admin_key="root", api_key="sesame")


def test_an_emptied_prefix_cache_has_no_hits(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        async def num_cached() -> int:
            answer = await made.complete(prompt=f"{PROMPT} once more")
            cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            return cached

        await num_cached()
        assert await num_cached() > 0
        answer = await ask(made, "/admin/reset_prefix_cache", **ROOT)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        assert await num_cached() == 0

    with_server(engine, body, admin_key="root")


def test_keys_are_reloaded_or_kept(engine: AsyncEngine, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("first\n")

    async def body(made: Running) -> None:
        path.write_text("second\n")
        assert (await ask(made, "/admin/reload_keys", **ROOT)).status_code == 200
        assert (await ask(made, "/version", "GET", **{"X-Api-Key": "second"})).status_code == 200
        path.write_text("")
        answer = await ask(made, "/admin/reload_keys", **ROOT)
        assert answer.status_code == 500 and str(tmp_path) not in answer.text
        assert (await ask(made, "/version", "GET", **{"X-Api-Key": "second"})).status_code == 200

    with_server(engine, body, admin_key="root", api_key_file=str(path))


def test_a_repeated_drain_still_finishes_running_requests(engine: LimitedEngine) -> None:
    async def body(made: Running) -> None:
        engine.client.limit_running(0)
        running = asyncio.create_task(made.complete())
        await until(lambda: made.server.queue.num_waiting == 1)
        answers = await asyncio.gather(*(ask(made, "/admin/drain", **ROOT) for _ in range(3)))
        assert [answer.status_code for answer in answers] == [202, 202, 202]
        assert answers[0].json() == {"status": "draining", "num_in_flight": 1}
        assert (await ask(made, "/ready", "GET")).status_code == 503
        assert (await made.complete()).json()["error"]["code"] == "draining"
        engine.client.limit_running(None)
        assert (await running).status_code == 200
        assert await made.exit == 0

    with_server(engine, body, admin_key="root")


def test_another_method_is_refused(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        assert (await ask(made, "/admin/drain", "GET", **ROOT)).status_code == 405
        assert made.server.state.is_ready

    with_server(engine, body, admin_key="root")
