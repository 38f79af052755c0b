"""A job whose GPU really runs out of memory: another user takes all free memory while the job runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headrace.config import EngineConfig
from headrace.engine.client import Deliver
from headrace.engine.start import Engine, start_engine
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec
from headrace.types import SequenceEvent
from tests.engine.tiny import save_model
from tests.jobs.faults import AT_ONCE

pytestmark = pytest.mark.gpu

GIB = 2**30
CACHE_BYTES = 4 * GIB
NUM_LINES = 200
MIN_BYTES = 512  # that torch hands out: what it keeps for small tensors is taken too


class Hog:
    """Starts engines. Takes all free memory when the first of them delivers events, until the next one starts."""

    def __init__(self) -> None:
        self._taken: list[torch.Tensor] = []
        self.allocated_at_start: list[int] = []

    def start(self, config: EngineConfig, deliver: Deliver) -> Engine:
        self.give_back()
        self.allocated_at_start.append(torch.cuda.memory_allocated())

        def take_all_first(events: list[SequenceEvent]) -> None:
            if len(self.allocated_at_start) == 1 and not self._taken:
                self.take_all()
            deliver(events)

        return start_engine(config, take_all_first)

    def give_back(self) -> None:
        self._taken.clear()
        torch.cuda.empty_cache()

    def take_all(self) -> None:
        torch.cuda.empty_cache()
        size = torch.cuda.mem_get_info()[0]
        while size >= MIN_BYTES:
            try:
                self._taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                size //= 2


def test_a_job_continues_after_its_gpu_ran_out_of_memory(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": f"line {number}, " * 5, "max_tokens": 16, "ignore_eos": True} for number in range(NUM_LINES)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = EngineConfig(
        model=str(tmp_path / "model"), dtype="bfloat16", max_num_seqs=16, kv_cache_memory_bytes=CACHE_BYTES
    )
    hog = Hog()
    job = JobSpec(input=str(source), output=str(output), config=config)
    try:
        report = run_job(job, start=hog.start, rules=AT_ONCE, quiet=True)
    finally:
        hog.give_back()
    assert report.exit_code == 0
    assert report.failures.memory_rungs == ["started again"]
    before, then = hog.allocated_at_start
    assert then < before + CACHE_BYTES // 4  # nothing of the dead engine is left
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(answer["index"] for answer in answers) == list(range(NUM_LINES))
