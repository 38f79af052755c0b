"""An engine on two nodes, which are two process trees of this machine: answers, and what happens when one ends."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace import LLM
from headrace.engine.nodes.handshake import SECRET_VARIABLE
from tests.engine.process.process_tools import MAX_WAIT_S, wait_until
from tests.engine.ranks.test_failures import failure_during, has_answers, has_gone, ranks_of
from tests.engine.ranks.test_ranks import GREEDY, SMALL, running, tokens

pytestmark = pytest.mark.processes

ENGINE = """
import sys
from headrace import LLM, SamplingParams
model, port = sys.argv[1:]
llm = LLM(model, device="cpu", max_num_seqs=8, num_gpu_blocks_override=256, pipeline_parallel_size=2, nnodes=2,
          master_port=int(port))
print("ready", flush=True)
while True:
    llm.generate("endless", SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
"""


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, secrets.token_hex(16))


@pytest.fixture
def port() -> int:
    """A free port, below those that the system gives to other tests until it is listened on."""
    while True:
        found = 20_000 + secrets.randbelow(12_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", found)):
            return found


def flags(port: int, *sizes: str) -> list[str]:
    return [*(sizes or ("-pp", "2")), "--nnodes", "2", "--master-port", str(port), "--device", "cpu"]


@contextmanager
def node_1(model: Path, port: int, *sizes: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "headrace", "serve", str(model), "--headless", "--node-rank", "1"]
    process = subprocess.Popen([*command, *flags(port, *sizes)], stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def two_nodes(port: int, **settings: Any) -> dict[str, Any]:
    return {"pipeline_parallel_size": 2, "nnodes": 2, "master_port": port} | settings


@pytest.mark.slow
def test_two_nodes_answer_as_one_process_and_the_other_one_ends_with_the_engine(
    tiny_directory: Path, port: int
) -> None:
    with running(tiny_directory) as llm:
        expected = tokens(llm, GREEDY)
    with node_1(tiny_directory, port) as node, running(tiny_directory, **two_nodes(port)) as llm:
        assert tokens(llm, GREEDY) == expected
        (rank,) = ranks_of(node.pid)
        llm.close()
        assert node.wait(MAX_WAIT_S) == 0
        assert has_gone(rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 1},
    ],
    ids=["a stage on each node", "a tensor group over both"],
)
def test_tensor_ranks_on_two_nodes_answer_as_one_process(
    tiny_directory: Path, port: int, sizes: dict[str, int]
) -> None:
    with running(tiny_directory) as llm:
        expected = tokens(llm, GREEDY)
    words = ["-tp", str(sizes["tensor_parallel_size"]), "-pp", str(sizes["pipeline_parallel_size"])]
    with node_1(tiny_directory, port, *words), running(tiny_directory, **two_nodes(port, **sizes)) as llm:
        assert tokens(llm, GREEDY) == expected
        is_warned = any("over several nodes" in warning for warning in llm.settings.warnings)
        assert is_warned == (sizes["pipeline_parallel_size"] == 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "expected"),
    [("host", "node 1 .* has ended the connection"), ("rank", "rank 1 of 2 on node 1 .*SIGKILL")],
)
def test_a_node_that_is_killed_ends_the_engine_with_its_name(
    tiny_directory: Path, port: int, victim: str, expected: str
) -> None:
    settings = SMALL | two_nodes(port, max_model_len=512)
    with node_1(tiny_directory, port) as node:
        llm = LLM(str(tiny_directory), **settings)
        (rank,) = ranks_of(node.pid)
        message = failure_during(rank.kill if victim == "rank" else node.kill, llm)
        assert re.search(expected, message)
        wait_until(lambda: has_gone(rank))
        llm.close()


@pytest.mark.slow
def test_a_killed_node_0_leaves_nothing_running(tiny_directory: Path, port: int) -> None:
    with node_1(tiny_directory, port) as node:
        command = [sys.executable, "-c", ENGINE, str(tiny_directory), str(port)]
        engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert engine.stdout is not None and "ready" in engine.stdout.readline()
        (rank,) = ranks_of(node.pid)
        engine.kill()
        engine.communicate()
        wait_until(lambda: has_gone(rank))
        os.kill(node.pid, signal.SIGTERM)  # it would join a restarted engine
        assert node.wait(MAX_WAIT_S) == 0


@pytest.mark.slow
def test_a_node_that_cannot_be_reached_any_more_is_noticed(tiny_directory: Path, port: int) -> None:
    with node_1(tiny_directory, port) as node:
        llm = LLM(str(tiny_directory), **SMALL | two_nodes(port, max_model_len=512))
        host = psutil.Process(node.pid)
        assert "node 1" in failure_during(host.suspend, llm)
        llm.close()
        host.resume()


@pytest.mark.slow
def test_a_job_restarts_its_engine_with_the_same_nodes(tiny_directory: Path, port: int, tmp_path: Path) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"line {number}"}) + "\n" for number in range(60)))
    command = ["run", str(prompts), "-o", str(answers), "--model", str(tiny_directory), *flags(port)]
    sizes = ["--max-num-seqs", "4", "--max-tokens", "200", "--ignore-eos", "--num-gpu-blocks-override", "99"]
    with node_1(tiny_directory, port) as node:
        job = subprocess.Popen([sys.executable, "-m", "headrace", *command, *sizes], stderr=subprocess.PIPE, text=True)
        try:
            wait_until(lambda: job.poll() is not None or (bool(ranks_of(node.pid)) and has_answers(tmp_path)))
            assert job.poll() is None, job.communicate()
            ranks_of(node.pid)[0].kill()
            _, log = job.communicate(timeout=MAX_WAIT_S)
        finally:
            job.kill()
        assert job.returncode == 0, log
        assert node.wait(MAX_WAIT_S) == 0
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(lines) == 60 and all(not line.get("error") for line in lines), log
