"""A rank that dies or hangs ends the engine with an error that names it, and nothing is left running."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace import LLM, SamplingParams
from headrace.errors import EngineDeadError
from headrace.jobs.store.status_file import STATUS_NAME
from tests.engine.process.process_tools import MAX_WAIT_S, wait_until

pytestmark = pytest.mark.processes

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
SMALL: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8, "num_gpu_blocks_override": 256}
ENGINE = """
import sys
from headrace import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", max_num_seqs=8, num_gpu_blocks_override=256, tensor_parallel_size=2)
print("ready", flush=True)
while True:
    llm.generate("endless", SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
"""


def ranks_of(pid: int) -> list[psutil.Process]:
    """The processes of other ranks that this process has started, directly or not."""
    return [each for each in psutil.Process(pid).children(recursive=True) if is_rank(each)]


def is_rank(process: psutil.Process) -> bool:
    try:
        return "headrace.engine.ranks.child" in process.cmdline()
    except psutil.Error:
        return False


def has_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@contextmanager
def two_ranks(model: Path) -> Iterator[tuple[LLM, psutil.Process]]:
    llm = LLM(str(model), tensor_parallel_size=2, **SMALL)
    try:
        (rank,) = ranks_of(os.getpid())
        yield llm, rank
    finally:
        llm.close()


def failure_during(act: Callable[[], None], llm: LLM) -> str:
    """The error of a call that runs while `act` is executed, once it has made steps."""

    def act_after_steps() -> None:
        wait_until(lambda: llm.stats.scheduler.num_generated_tokens > 20)
        act()

    thread = threading.Thread(target=act_after_steps)
    thread.start()
    with pytest.raises(EngineDeadError) as caught:
        answer_for_ever(llm)
    thread.join()
    return str(caught.value)


def answer_for_ever(llm: LLM) -> None:
    while True:
        llm.generate(["one", "two"], LONG, use_tqdm=False)


def test_a_rank_that_is_killed_ends_the_engine_with_its_name(tiny_directory: Path) -> None:
    with two_ranks(tiny_directory) as (llm, rank):
        message = failure_during(rank.kill, llm)
        assert re.search(rf"rank 1 of 2 \(process {rank.pid}\).*SIGKILL", message)
        with pytest.raises(EngineDeadError):
            llm.generate("more", LONG, use_tqdm=False)
    assert has_gone(rank)


@pytest.mark.slow
def test_a_rank_that_dies_while_the_engine_is_idle_is_noticed(tiny_directory: Path) -> None:
    with two_ranks(tiny_directory) as (llm, rank):
        rank.kill()
        wait_until(lambda: "rank 1 of 2" in str(llm._engine.client.failure))


@pytest.mark.slow
def test_a_rank_that_dies_while_the_others_wait_for_it_in_a_collective(tiny_directory: Path) -> None:
    with two_ranks(tiny_directory) as (llm, rank):

        def stop_then_kill() -> None:
            rank.suspend()
            steps = llm.stats.scheduler.num_generated_tokens
            wait_until(lambda: rank.status() == psutil.STATUS_STOPPED)
            threading.Event().wait(1.0)  # rank 0 is in its next sum by then; if not, the test is only weaker
            assert llm.stats.scheduler.num_generated_tokens - steps < 8
            rank.kill()

        assert "rank 1 of 2" in failure_during(stop_then_kill, llm)


@pytest.mark.slow
def test_a_rank_that_hangs_is_noticed_by_its_silence_and_killed(tiny_directory: Path) -> None:
    with two_ranks(tiny_directory) as (llm, rank):
        assert re.search(r"rank 1 of 2 .* hangs: .* no heartbeat", failure_during(rank.suspend, llm))
        wait_until(lambda: has_gone(rank))


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_loads_fails_the_start(tiny_directory: Path) -> None:
    def kill_first_rank() -> None:
        wait_until(lambda: bool(ranks_of(os.getpid())))
        ranks_of(os.getpid())[0].kill()

    thread = threading.Thread(target=kill_first_rank)
    thread.start()
    with pytest.raises(EngineDeadError, match="rank 1 of 4"):
        LLM(str(tiny_directory), tensor_parallel_size=4, **SMALL)
    thread.join()
    wait_until(lambda: not ranks_of(os.getpid()))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a rank ends with the socket")
def test_no_rank_outlives_a_killed_engine(tiny_directory: Path) -> None:
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, str(tiny_directory)], stdout=subprocess.PIPE, text=True)
    try:
        assert engine.stdout is not None and "ready" in engine.stdout.readline()
        (rank,) = ranks_of(engine.pid)
    finally:
        engine.kill()
        engine.wait()
        if engine.stdout is not None:
            engine.stdout.close()
    wait_until(lambda: has_gone(rank))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "job"])
def test_a_job_that_loses_a_rank_or_is_killed_answers_every_line_once(
    victim: str, tiny_directory: Path, tmp_path: Path
) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"line {number}"}) + "\n" for number in range(60)))
    command = ["run", str(prompts), "-o", str(answers), "--model", str(tiny_directory), "--device", "cpu"]
    flags = [
        "-tp",
        "2",
        "--max-num-seqs",
        "4",
        "--max-tokens",
        "200",
        "--ignore-eos",
        "--num-gpu-blocks-override",
        "99",
    ]
    whole = [sys.executable, "-m", "headrace", *command, *flags]
    job = subprocess.Popen(whole, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: job.poll() is not None or (bool(ranks_of(job.pid)) and has_answers(tmp_path)))
        assert job.poll() is None, job.communicate()
        rank = ranks_of(job.pid)[0]
        os.kill(rank.pid if victim == "rank" else job.pid, signal.SIGKILL)
        _, log = job.communicate(timeout=MAX_WAIT_S)
    finally:
        job.kill()
    if victim == "rank":
        assert job.returncode == 0, log
    else:  # the engine of a single worker runs in the job's process
        subprocess.run(whole, stderr=subprocess.DEVNULL, check=True)
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(lines) == 60 and all(not line.get("error") for line in lines), log
    wait_until(lambda: has_gone(rank))


def has_answers(directory: Path) -> bool:
    """Whether the job has answered some lines."""
    for path in directory.rglob(STATUS_NAME):
        status = json.loads(path.read_text() or "{}")
        return bool(status.get("lines_done", 0) > 4)
    return False
