from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.profile.recording import RecordingOptions, loaded_engine, record_run
from headrace.profile.workload import WORKLOADS, workload_of


def config(directory: Path) -> EngineConfig:
    return EngineConfig(model=str(directory), max_num_seqs=4, num_gpu_blocks_override=256, num_threads=1)


@pytest.mark.slow
def test_a_run_is_recorded_in_its_steady_state(tiny_directory: Path, tmp_path: Path) -> None:
    options = RecordingOptions(directory=str(tmp_path), steps=12, num_windows=2)
    report = record_run(config(tiny_directory), workload_of("decode", 8, 400), options)
    assert report is not None and report.record is not None and report.overhead is not None
    assert report.num_steps >= 12
    assert report.seqs_per_step == pytest.approx(4, abs=0.5)
    assert len(report.overhead.steps_per_s_on) == 2 and len(report.overhead.steps_per_s_off) == 3
    assert report.overhead.share is not None
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {report.record.trace, report.record.trace.replace(".trace.json.gz", ".profile.json")}


@pytest.mark.slow
def test_a_mixed_workload_has_prefills_in_its_window(tiny_directory: Path, tmp_path: Path) -> None:
    options = RecordingOptions(directory=str(tmp_path), steps=40, num_windows=1)
    report = record_run(config(tiny_directory), workload_of("prefill", 40, 4), options)
    assert report is not None and report.record is not None
    assert sum(step.pairs for step in report.record.steps) > 0
    assert any(row.part == "prefill_attention" for row in report.rows)


def test_a_run_that_never_becomes_steady_is_an_error(tiny_directory: Path) -> None:
    with loaded_engine(config(tiny_directory), workload_of("chat")) as loaded:
        loaded._num_finished = -(10**9)
        with pytest.raises(ConfigError, match="not steady after"):
            loaded.wait_until_steady(0.1)


def test_sequences_that_do_not_fit_the_cache_are_not_run(tiny_directory: Path) -> None:
    few = EngineConfig(model=str(tiny_directory), max_num_seqs=8, num_gpu_blocks_override=40, num_threads=1)
    with loaded_engine(few, workload_of("decode", 100, 100)) as loaded:
        assert loaded.num_seqs == int(0.95 * 40 * 16) // 200


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_requests_fit_the_context(name: str) -> None:
    workload = workload_of(name).fitting(256)
    for request in islice(workload.requests(vocab_size=100, max_model_len=256), 200):
        assert len(request.prompt_token_ids) + (request.params.max_tokens or 0) <= 256
        assert request.prompt_token_ids.max() < 100


def test_the_workload_is_checked() -> None:
    with pytest.raises(ConfigError, match="one of decode, prefill, chat"):
        workload_of("nothing")
    with pytest.raises(ConfigError, match="input_len"):
        workload_of("chat", 0)
