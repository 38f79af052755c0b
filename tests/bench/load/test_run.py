"""run_load against null servers in processes of their own, and against Headrace's own server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.bench.load import ClosedLoop, LoadError, OpenLoop, Progress, Trace, run_load
from headrace.bench.load.null_server import DEATH, Behaviour, NullServerProcess, null_server
from headrace.bench.load.run import Plan, processes_for, split
from headrace.bench.load.target import Target
from headrace.bench.workloads import Workload, WorkloadSpec, build
from headrace.errors import ConfigError
from tests.server.serving import MODEL, serving

WORKLOAD = build(WorkloadSpec(name="random", num_requests=30, input_len=6, output_len=4))
PLAN = Plan(Target("h", 80), [], 1.0)


@pytest.fixture(scope="module")
def server() -> Iterator[NullServerProcess]:
    with null_server(Behaviour()) as running:
        yield running


def test_a_closed_loop_sends_every_request_once(server: NullServerProcess) -> None:
    result = run_load(server.address, WORKLOAD, ClosedLoop(concurrency=4), model_name="null")
    assert [outcome.status for outcome in result.outcomes] == ["ok"] * 30
    assert sorted(outcome.index for outcome in result.outcomes) == list(range(30))
    assert all(0 <= at <= result.seconds for outcome in result.outcomes for at in outcome.chunk_s)
    assert [outcome.due_s for outcome in result.outcomes] == sorted(outcome.due_s for outcome in result.outcomes)
    assert len(result.client.cpu_shares) == 1
    assert result.client.send_late_ms is None
    assert result.warnings == []
    assert not result.was_interrupted and not result.server_died


def test_two_processes_share_the_requests(server: NullServerProcess) -> None:
    load = ClosedLoop(concurrency=5, num_requests=60)
    result = run_load(server.address, WORKLOAD, load, model_name="null", num_processes=2)
    assert sorted(outcome.index for outcome in result.outcomes) == sorted(list(range(30)) * 2)
    assert {outcome.status for outcome in result.outcomes} == {"ok"}
    assert len(result.client.cpu_shares) == 2
    assert all(0 <= at <= result.seconds for outcome in result.outcomes for at in outcome.chunk_s)
    assert result.warnings == ["the workload has 30 requests and 60 were sent: repeated prompts may be cached"]


def test_two_processes_share_a_schedule(server: NullServerProcess) -> None:
    load = OpenLoop(rate=1000, num_requests=21)
    result = run_load(server.address, WORKLOAD, load, model_name="null", num_processes=2)
    assert [outcome.index for outcome in result.outcomes] == list(range(21))
    found = [outcome.due_s for outcome in result.outcomes]
    assert found == pytest.approx(load.due_times(WORKLOAD), abs=1e-6)
    assert result.client.send_late_ms is not None


def test_a_trace_is_sent_in_the_order_of_its_times(server: NullServerProcess) -> None:
    requests = [
        replace_due(request, due) for request, due in zip(WORKLOAD.requests[:3], (5.0, 5.03, 5.01), strict=True)
    ]
    workload = Workload(WORKLOAD.spec, requests)
    result = run_load(server.address, workload, Trace(), model_name="null")
    assert [outcome.index for outcome in result.outcomes] == [0, 2, 1]


def replace_due(request: object, due_s: float) -> object:
    import msgspec

    return msgspec.structs.replace(request, due_s=due_s)  # type: ignore[type-var]


def test_answers_of_another_length_are_said_to_be_so() -> None:
    with null_server(Behaviour(max_len=3)) as server:
        result = run_load(server.address, WORKLOAD, ClosedLoop(concurrency=4), model_name="null")
    assert len(result.warnings) == 1
    assert result.warnings[0].startswith("30 answers do not have the length that was asked for")


def test_a_server_that_dies_in_the_middle_fails_the_rest_of_the_requests() -> None:
    with null_server(Behaviour(dies_after=10, itl_s=0.001)) as server:
        load = ClosedLoop(concurrency=2, num_requests=400)
        result = run_load(server.address, WORKLOAD, load, model_name="null")
        assert server.stop() == DEATH
    assert result.server_died
    assert sum(outcome.is_ok for outcome in result.outcomes) in (10, 11)
    assert len(result.outcomes) == 400
    assert any("count as failed" in warning for warning in result.warnings)


def test_a_server_that_dies_ends_two_client_processes() -> None:
    with null_server(Behaviour(dies_after=10, itl_s=0.001)) as server:
        load = ClosedLoop(concurrency=4, num_requests=400)
        result = run_load(server.address, WORKLOAD, load, model_name="null", num_processes=2)
    assert result.server_died
    assert len(result.outcomes) == 400


def test_an_address_where_nobody_listens_is_an_error() -> None:
    with pytest.raises(LoadError, match=r"cannot connect to http://127.0.0.1:1: Connect"):
        run_load("http://127.0.0.1:1", WORKLOAD, ClosedLoop(concurrency=2), model_name="null")
    with pytest.raises(LoadError, match="cannot connect"):  # with few requests too
        run_load("http://127.0.0.1:1", WORKLOAD, ClosedLoop(concurrency=1, num_requests=1), model_name="null")


def test_progress_is_reported() -> None:
    seen: list[Progress] = []
    with null_server(Behaviour(ttft_s=0.3)) as server:
        load = ClosedLoop(concurrency=3, num_requests=9)
        run_load(server.address, WORKLOAD, load, model_name="null", on_progress=seen.append)
    assert seen
    assert all(progress.num_requests == 9 for progress in seen)
    counts = [progress.num_done for progress in seen]
    assert counts == sorted(counts) and counts[-1] <= 9


SCRIPT = """
import sys
from headrace.bench.load import ClosedLoop, run_load
from headrace.bench.workloads import WorkloadSpec, build
if __name__ == "__main__":
    workload = build(WorkloadSpec(name="random", num_requests=30, input_len=6, output_len=4))
    said = []
    def say(progress):
        if progress.num_done >= 2 and not said:
            said.append(print("running", flush=True))
    result = run_load(sys.argv[1], workload, ClosedLoop(concurrency=2, num_requests=1_000_000), model_name="null",
                      num_processes=int(sys.argv[2]), on_progress=say)
    ok = sum(outcome.is_ok for outcome in result.outcomes)
    print(result.was_interrupted, 0 < ok == len(result.outcomes), result.warnings[-1].split(" after")[0])
"""


@pytest.mark.parametrize("num_processes", [1, 2])
def test_ctrl_c_keeps_what_was_measured(num_processes: int, tmp_path: Path) -> None:
    (tmp_path / "load.py").write_text(SCRIPT)
    with null_server(Behaviour(itl_s=0.001)) as server:
        client = subprocess.Popen(
            [sys.executable, str(tmp_path / "load.py"), server.address, str(num_processes)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        )
        assert client.stdout is not None
        assert client.stdout.readline() == "running\n"
        os.killpg(client.pid, signal.SIGINT)  # as a terminal does: to all processes
        rest, _ = client.communicate(timeout=60)
    assert rest == "True True interrupted\n"
    assert client.returncode == 0


def test_clients_are_dealt_out_to_processes() -> None:
    assert [plan.concurrency for plan in split(ClosedLoop(concurrency=7), WORKLOAD, PLAN, 3)] == [3, 2, 2]
    assert [plan.concurrency for plan in split(ClosedLoop(concurrency=2), WORKLOAD, PLAN, 3)] == [1, 1]
    assert len(split(ClosedLoop(concurrency=64, num_requests=1), WORKLOAD, PLAN, 3)) == 1
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        split(ClosedLoop(concurrency=2), WORKLOAD, PLAN, 0)


def test_a_schedule_is_dealt_out_with_its_limit() -> None:
    plans = split(OpenLoop(rate=2, num_requests=5, max_concurrency=3), WORKLOAD, PLAN, 2)
    assert [plan.concurrency for plan in plans] == [2, 1]
    assert [[number for number, _ in plan.schedule or ()] for plan in plans] == [[0, 2, 4], [1, 3]]


def test_a_limit_below_the_number_of_processes_uses_fewer() -> None:
    plans = split(OpenLoop(rate=2, num_requests=5, max_concurrency=1), WORKLOAD, PLAN, 2)
    assert [[number for number, _ in plan.schedule or ()] for plan in plans] == [[0, 1, 2, 3, 4]]


def test_many_clients_get_more_processes_where_there_are_cores() -> None:
    assert processes_for(ClosedLoop(concurrency=2048), 2) == 1
    assert processes_for(ClosedLoop(concurrency=2048), 64) == 4
    assert processes_for(ClosedLoop(concurrency=16), 64) == 1


@pytest.mark.parametrize("name", ["random", "uniform"])
def test_headrace_itself_answers(name: str, tiny_directory: Path) -> None:
    spec = WorkloadSpec(name=name, num_requests=6, input_len=12, output_len=5, temperature=0.0)
    workload = build(spec.for_vocabulary(256))
    with serving(str(tiny_directory), max_num_seqs=8, num_gpu_blocks_override=256) as server:
        result = run_load(server.url, workload, ClosedLoop(concurrency=3), model_name=MODEL)
        wrong = run_load(server.url, workload, ClosedLoop(concurrency=1, num_requests=1), model_name="other")
    assert [outcome.error for outcome in result.outcomes] == [None] * 6
    assert [outcome.num_output_tokens for outcome in result.outcomes] == [5] * 6
    assert all(outcome.num_prompt_tokens > 0 for outcome in result.outcomes)
    assert all(outcome.first_s is not None for outcome in result.outcomes)
    assert wrong.outcomes[0].status == "failed"
    assert wrong.outcomes[0].http_status == 404
