"""A job whose engine has a process of its own, which a line kills."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.config import EngineConfig
from headrace.engine.client import Deliver
from headrace.engine.process.engine_process import EngineProcess
from headrace.engine.start import Engine
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec
from headrace.models import ModelSpec
from tests.engine.cores import EOS, EXIT, RAISE, VOCAB_SIZE
from tests.jobs.faults import AT_ONCE

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
WriteLines = Callable[..., Path]


def start(config: EngineConfig, deliver: Deliver) -> Engine:
    process = EngineProcess(deliver, lambda: deliver([]), core="tests.engine.cores:faulty")
    process.start(config)
    return Engine(
        client=process,
        settings=process.wait_until_ready().settings,
        spec=cast(ModelSpec, SimpleNamespace(vocab_size=VOCAB_SIZE, pooler=None, is_encoder=False)),
        tokenizer=None,
        eos_token_ids=(EOS,),
        model_name="fake",
        start_seconds=0.1,
    )


@pytest.mark.parametrize(
    "fault, reason", [(EXIT, "its process exited with status 3"), (RAISE, "the device is on fire")]
)
def test_a_line_that_ends_the_engines_process_is_found_and_the_job_continues(
    write_lines: WriteLines, monkeypatch: pytest.MonkeyPatch, fault: int, reason: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    prompts: list[Any] = [{"prompt": [10 + number, 7], "max_tokens": 3} for number in range(12)]
    prompts[5] = {"prompt": [fault, 7], "max_tokens": 3}
    source = write_lines(*prompts)
    job = JobSpec(input=str(source), output=str(source.parent / "out.jsonl"), config=EngineConfig(max_num_seqs=2))
    report = run_job(job, start=start, rules=AT_ONCE, quiet=True)
    lines = {line["index"]: line for line in map(json.loads, (source.parent / "out.jsonl").read_text().splitlines())}
    assert len(lines) == 12
    assert [index for index, line in lines.items() if "error" in line] == [5]
    assert lines[5]["error"]["code"] == "poison_request" and reason in lines[5]["error"]["message"]
    assert report.failures.deaths.keys() == {"engine"}
