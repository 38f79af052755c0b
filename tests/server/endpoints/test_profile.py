"""/start_profile and /stop_profile: off by default, guarded by keys, bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.profile.remote import RemoteServer, ServerRefusedError, profile_server
from headrace.server.endpoints.profile import serve_arguments
from tests.server.whole_server import LimitedEngine, Running, with_server

ROUTES = ("/start_profile", "/stop_profile")


@pytest.fixture(scope="module")
def engine(tiny_directory: Path) -> Iterator[LimitedEngine]:
    made = LimitedEngine.of(EngineConfig(model=str(tiny_directory), max_num_seqs=4, num_gpu_blocks_override=256))
    yield made
    asyncio.run(made.close())


def test_profiling_is_refused_unless_it_is_turned_on(engine: AsyncEngine) -> None:
    async def body(made: Running) -> None:
        for path in ROUTES:
            answer = await made.client.post(path)
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "profiler_off"
            assert "--profiler-dir" in answer.json()["error"]["message"]

    with_server(engine, body)


def test_a_profile_is_started_and_stopped_as_vllms_clients_do(engine: AsyncEngine, tmp_path: Path) -> None:
    async def body(made: Running) -> None:
        started = await made.client.post("/start_profile")
        assert started.status_code == 200 and started.json()["status"] == "recording"
        await made.complete(max_tokens=20, ignore_eos=True)
        stopped = await made.client.post("/stop_profile")
        assert stopped.status_code == 200
        answer = stopped.json()
        assert answer["report"]["num_steps"] >= 20
        assert answer["report"]["parts"]["gemm"]["share"] > 0
        assert "GEMMs" in answer["table"]
        assert "steps" not in answer and "page" not in answer
        assert all(Path(path).is_file() for path in answer["files"].values())

    with_server(engine, body, profiler_dir=str(tmp_path))


def test_commands_in_the_wrong_order_are_conflicts(engine: AsyncEngine, tmp_path: Path) -> None:
    async def body(made: Running) -> None:
        answer = await made.client.post("/stop_profile")
        assert answer.status_code == 409 and answer.json()["error"]["code"] == "profiler_conflict"
        assert (await made.client.post("/start_profile", json={"name": "one"})).status_code == 200
        answer = await made.client.post("/start_profile")
        assert answer.status_code == 409 and "already being recorded (one)" in answer.json()["error"]["message"]
        assert (await made.client.post("/stop_profile", json={"analyse": False})).status_code == 200
        assert (tmp_path / "one.profile.json").is_file()

    with_server(engine, body, profiler_dir=str(tmp_path))


def test_a_profile_that_no_client_stops_ends_by_itself(engine: AsyncEngine, tmp_path: Path) -> None:
    async def body(made: Running) -> None:
        await made.client.post("/start_profile", json={"max_steps": 5})
        await made.complete(max_tokens=20, ignore_eos=True)
        answer = (await made.client.post("/stop_profile", json={"analyse": False})).json()
        assert answer["window"] == {**answer["window"], "num_steps": 5, "stopped_by": "max_steps 5"}

    with_server(engine, body, profiler_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_seconds": 61}, "max_seconds must be at most 60"),
        ({"max_steps": 10**6}, "max_steps must be at most"),
        ({"tool": "perf"}, "tool must be torch or cuda"),
        ({"name": "../../x"}, "name must be letters"),
        ({"seconds": 5}, "unknown parameter 'seconds'"),
    ],
)
def test_bad_options_are_refused(engine: AsyncEngine, tmp_path: Path, given: dict[str, object], message: str) -> None:
    async def body(made: Running) -> None:
        answer = await made.client.post("/start_profile", json=given)
        assert answer.status_code == 400 and message in answer.json()["error"]["message"]
        assert (await made.client.post("/stop_profile")).status_code == 409

    with_server(engine, body, profiler_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("options", "key", "status"),
    [
        ({"api_key": "client"}, None, 401),
        ({"api_key": "client"}, "client", 409),
        ({"api_key": "client", "admin_key": "root"}, "client", 403),
        ({"api_key": "client", "admin_key": "root"}, "root", 409),
        ({"admin_key": "root"}, None, 401),
        ({"admin_key": "root"}, "root", 409),
    ],
)
def test_a_server_with_keys_asks_for_them(
    engine: AsyncEngine, tmp_path: Path, options: dict[str, str], key: str | None, status: int
) -> None:
    """409: the key was right, and nothing is being recorded."""

    async def body(made: Running) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        answer = await made.client.post("/stop_profile", headers=headers)
        assert answer.status_code == status

    with_server(engine, body, profiler_dir=str(tmp_path), **options)


def test_the_admin_routes_do_the_same(engine: AsyncEngine, tmp_path: Path) -> None:
    async def body(made: Running) -> None:
        headers = {"Authorization": "Bearer root"}
        assert (await made.client.post("/admin/start_profile", headers=headers)).status_code == 200
        assert (await made.client.post("/admin/stop_profile", headers=headers)).status_code == 200

    with_server(engine, body, profiler_dir=str(tmp_path), admin_key="root")


@pytest.mark.slow
def test_the_command_profiles_a_live_server(engine: AsyncEngine, tmp_path: Path) -> None:
    async def body(made: Running) -> None:
        busy = asyncio.create_task(_keep_busy(made))
        server = RemoteServer(str(made.client.base_url) + "/v1/", "client")
        found = await asyncio.to_thread(profile_server, server, seconds=0.5)
        busy.cancel()
        assert found.report is not None and found.report["num_steps"] > 0
        assert found.page is not None and found.page.startswith("<!doctype html>")
        assert found.overhead is not None and found.overhead.share is not None
        with pytest.raises(ServerRefusedError, match="409"):
            await asyncio.to_thread(server.stop)

    with_server(engine, body, profiler_dir=str(tmp_path), api_key="client")


def test_the_command_of_a_server_is_told_without_its_keys() -> None:
    argv = ["/bin/headrace", "serve", "my model", "--api-key", "k", "--admin-key=a", "--port", "9"]
    assert serve_arguments(argv) == ["my model", "--port", "9"]
    assert serve_arguments(["pytest", "tests"]) is None


def test_a_window_of_no_interest_leaves_no_files(engine: AsyncEngine, tmp_path: Path) -> None:
    async def body(made: Running) -> None:
        await made.client.post("/start_profile")
        answer = await made.client.post("/stop_profile", json={"keep": False})
        assert answer.status_code == 200 and "report" not in answer.json()
        assert list(tmp_path.iterdir()) == []

    with_server(engine, body, profiler_dir=str(tmp_path))


async def _keep_busy(made: Running) -> None:
    while True:
        await made.complete({"Authorization": "Bearer client"}, max_tokens=40, ignore_eos=True)
