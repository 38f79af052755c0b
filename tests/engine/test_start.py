"""The stages of real starts, of an engine on a thread and in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.engine.start import start_engine, start_engine_process
from headrace.startup import StartupStage
from tests.engine.tiny import SHAPE

LOADED = ["load", "compile"]


def names(stages: list[StartupStage]) -> list[str]:
    """The stages in the order in which they were reported, without repetitions."""
    return [stage.name for n, stage in enumerate(stages) if n == 0 or stages[n - 1].name != stage.name]


def finished(stages: list[StartupStage]) -> tuple[StartupStage, ...]:
    return tuple(stage for stage in stages if stage.is_finished)


def assert_times_add_up(stages: tuple[StartupStage, ...], seconds: float) -> None:
    times = [stage.seconds for stage in stages if stage.seconds is not None]
    assert len(times) == len(stages) and min(times) >= 0 and sum(times) <= seconds


@pytest.mark.processes
def test_a_server_engine_reports_its_stages_in_order(tiny_directory: Path) -> None:
    stages: list[StartupStage] = []
    config = EngineConfig(model=str(tiny_directory), max_num_seqs=2, num_gpu_blocks_override=16, device="cpu")
    engine = start_engine_process(config, lambda events: None, report=stages.append)
    engine.close()
    assert names(stages) == ["import", *LOADED]
    assert engine.start_stages == finished(stages)
    assert_times_add_up(engine.start_stages, engine.start_seconds)
    weights = [stage for stage in stages if stage.name == "load"]
    assert [stage.done for stage in weights] == sorted(stage.done for stage in weights)
    assert weights[-1].done == weights[-1].total > SHAPE["vocab_size"] * SHAPE["hidden_size"] * 4
    kernels = [stage for stage in stages if stage.name == "compile"]
    assert kernels[-1].done == kernels[-1].total > 0


def test_an_engine_on_a_thread_reports_the_same_stages(tiny_directory: Path) -> None:
    stages: list[StartupStage] = []
    config = EngineConfig(model=str(tiny_directory), max_num_seqs=2, num_gpu_blocks_override=16, device="cpu")
    engine = start_engine(config, lambda events: None, report=stages.append)
    engine.close()
    assert names(stages) == LOADED  # this process has imported torch already
    assert engine.start_stages == finished(stages)
    assert_times_add_up(engine.start_stages, engine.start_seconds)
    (load, _) = engine.start_stages
    assert load.done == load.total > SHAPE["vocab_size"] * SHAPE["hidden_size"] * 4
