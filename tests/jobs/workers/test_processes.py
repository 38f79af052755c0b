"""Workers in processes of their own, one of which is killed."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.config import EngineConfig
from headrace.engine.client import Deliver
from headrace.engine.process.engine_process import EngineProcess
from headrace.engine.shares import shares_of
from headrace.engine.start import Engine
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec
from headrace.models import ModelSpec
from headrace.types import Request, SequenceEvent
from tests.engine.cores import EOS, EXIT, VOCAB_SIZE
from tests.jobs.faults import AT_ONCE

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
WriteLines = Callable[..., Path]


class ProcessStart:
    """Starts engine processes for one worker. The first is killed when its first answer has arrived, if asked for."""

    def __init__(self, *, kill_first: bool = False) -> None:
        self._kill_first = kill_first
        self.pids: list[int] = []
        self.submitted: list[list[str]] = []  # by process

    def __call__(self, config: EngineConfig, deliver: Deliver) -> Engine:
        process: EngineProcess

        def take(events: list[SequenceEvent]) -> None:
            deliver(events)
            if self._kill_first and any(event.finish_reason for event in events):
                self._kill_first = False
                os.kill(self.pids[0], signal.SIGKILL)

        process = EngineProcess(take, lambda: deliver([]), core="tests.engine.cores:faulty")
        process.start(config)
        settings = process.wait_until_ready().settings
        assert process.pid is not None
        self.pids.append(process.pid)
        ids: list[str] = []
        self.submitted.append(ids)
        submit = process.submit

        def record(request: Request) -> None:
            ids.append(request.request_id)
            submit(request)

        process.submit = record  # type: ignore[method-assign]
        return Engine(
            client=process,
            settings=settings,
            spec=cast(ModelSpec, SimpleNamespace(vocab_size=VOCAB_SIZE, pooler=None, is_encoder=False)),
            tokenizer=None,
            eos_token_ids=(EOS,),
            model_name="fake",
            start_seconds=0.1,
        )


def run(source: Path, starts: list[ProcessStart]) -> tuple[Any, dict[int, dict[str, Any]]]:
    output = source.parent / "out.jsonl"
    config = EngineConfig(max_num_seqs=2)
    job = JobSpec(input=str(source), output=str(output), config=config, workers=len(starts), overwrite=True)
    report = run_job(job, start=starts, rules=AT_ONCE, quiet=True)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert len({line["index"] for line in lines}) == len(lines)
    return report, {line["index"]: line for line in lines}


def test_a_killed_worker_costs_only_its_own_lines_in_flight(
    write_lines: WriteLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    source = write_lines(*({"prompt": [10 + number, 7], "max_tokens": 3} for number in range(80)))
    starts = [ProcessStart(kill_first=True), ProcessStart()]
    report, lines = run(source, starts)
    assert lines.keys() == set(range(80))
    assert all(line["finish_reason"] == "length" for line in lines.values())
    assert (report.exit_code, report.failures.deaths) == (0, {"engine": 1})
    assert len(starts[1].pids) == 1, "the other one runs from start to end"
    computed = Counter(line for start in starts for ids in start.submitted for line in ids)
    again = {line for line, count in computed.items() if count > 1}
    assert again <= set(starts[0].submitted[0]), "only lines of the killed worker are computed again"
    assert set(computed) == {str(number) for number in range(80)}


def test_a_line_that_ends_the_process_of_a_worker_is_found(
    write_lines: WriteLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    prompts: list[Any] = [{"prompt": [10 + number, 7], "max_tokens": 3} for number in range(40)]
    prompts[5] = {"prompt": [EXIT, 7], "max_tokens": 3}
    report, lines = run(write_lines(*prompts), [ProcessStart(), ProcessStart()])
    assert len(lines) == 40
    assert [index for index, line in lines.items() if "error" in line] == [5]
    assert lines[5]["error"]["code"] == "poison_request"
    assert report.failures.poison_rows == 1


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads the environment of a process from /proc")
def test_the_process_of_a_worker_gets_the_environment_of_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    share = shares_of(EngineConfig(), 2, num_cores=2, gpus=("4", "6"))[1]
    process = EngineProcess(
        lambda events: None, lambda: None, core="tests.engine.cores:faulty", environment=share.environment
    )
    try:
        process.start(share.config)
        process.wait_until_ready()
        assert b"CUDA_VISIBLE_DEVICES=6" in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    finally:
        process.close()
