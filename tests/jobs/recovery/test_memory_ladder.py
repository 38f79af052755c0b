"""Engines that need less memory, after one that ran out of it."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.engine.start import Engine
from headrace.errors import ModelError, ResumableJobError
from headrace.jobs.recovery.memory_ladder import RUNGS, MemoryLadder, is_out_of_memory
from headrace.jobs.status.summary import plain_summary
from headrace.jobs.store.status_file import read_status
from tests.jobs.conftest import settings_of
from tests.jobs.faults import FaultyRunner, FaultyStart, OutOfMemoryError
from tests.jobs.recovery.failing_jobs import Start, WriteLines, directory_of, prompts, read, run


def test_after_out_of_memory_engines_that_need_less_are_started(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(40))
    runner = FaultyRunner(dies_at={2, 4, 6, 8}, error=lambda: OutOfMemoryError("CUDA out of memory"))
    faulty = FaultyStart(start, runner)
    report = run(source, faulty)
    assert (report.exit_code, report.failures.deaths) == (0, {})
    assert report.failures.memory_rungs == list(RUNGS)
    given = [(config.max_num_batched_tokens, config.gpu_memory_utilization) for config in faulty.configs]
    assert given == [(None, None), (None, None), (64, None), (64, 0.4), (64, 0.3)]
    assert read_status(directory_of(source) / "status.json").memory_rungs == list(RUNGS)
    assert "memory        ran out 4 times: started again, half the tokens" in plain_summary(report)


def test_the_next_run_starts_on_the_rung_of_the_last(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(40))
    runner = FaultyRunner(dies_at={2, 4}, error=lambda: OutOfMemoryError("no memory"))
    faulty = FaultyStart(start, runner)

    def only_two(*arguments: Any) -> Engine:
        if len(faulty.configs) == 2:
            raise ModelError("enough")
        return faulty(*arguments)

    with pytest.raises(ResumableJobError, match="enough"):
        run(source, only_two)
    later = FaultyStart(start, FaultyRunner())
    run(source, later)
    assert later.configs[0].max_num_batched_tokens == 64


def test_at_the_top_of_the_ladder_the_search_for_a_poison_line_starts(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(12, poison=(5,)))
    report = run(source, FaultyStart(start, FaultyRunner(error=lambda: OutOfMemoryError("no memory"))))
    assert [index for index, line in read(source).items() if "error" in line] == [5]
    assert report.failures.memory_rungs[: len(RUNGS)] == list(RUNGS)


def test_a_ladder_without_progress_ends() -> None:
    config = EngineConfig()
    settings = settings_of(config)
    ladder = MemoryLadder(config)
    rungs = [climbed.rung for _ in range(4) if (climbed := ladder.climb(settings, num_done=3))]
    assert rungs == list(RUNGS)
    assert ladder.climb(settings, num_done=3) is None
    again = ladder.climb(settings, num_done=4)
    assert again is not None and again.rung == list(RUNGS)[-1]
    assert ladder.climb(settings, num_done=4) is None


def test_settings_that_the_user_changed_restart_the_ladder() -> None:
    config = EngineConfig()
    ladder = MemoryLadder(config)
    events = [climbed for _ in range(3) if (climbed := ladder.climb(settings_of(config), num_done=0))]
    assert MemoryLadder(config, events).config.gpu_memory_utilization == 0.4
    changed = EngineConfig(gpu_memory_utilization=0.6)
    assert MemoryLadder(changed, events).config == changed


@pytest.mark.parametrize(
    "failure, expected",
    [
        (OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("OutOfMemoryError: CUDA out of memory. Tried to allocate"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_out_of_memory_errors_are_recognized(failure: BaseException, expected: bool) -> None:
    assert is_out_of_memory(failure) == expected


def test_torchs_own_out_of_memory_error_is_recognized() -> None:
    import torch

    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
