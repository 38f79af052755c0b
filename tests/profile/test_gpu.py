"""A profile of an engine on a GPU: every kernel has a part, and the window is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.config import EngineConfig
from headrace.profile.recording import RecordingOptions, record_run
from headrace.profile.report import Report, report_of
from headrace.profile.trace import read_profile
from headrace.profile.workload import workload_of
from headrace.runner.probe import measure_ceilings
from tests.engine.tiny import save_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_model(directory)
    return directory


def profiled(directory: Path, out: Path, params: SamplingParams) -> Report:
    with LLM(str(directory), max_num_seqs=32, num_gpu_blocks_override=512, dtype="bfloat16") as llm:
        prompts = [list(range(5 + i, 60 + i)) for i in range(32)]
        llm.generate(prompts, params, use_tqdm=False)  # compiles kernels
        llm.forget_prefixes()
        llm.start_profile("gpu", directory=out)
        llm.generate(prompts, params, use_tqdm=False)
        llm.stop_profile()
    record, trace = read_profile(out / "gpu.profile.json")
    assert record is not None and trace is not None and trace.has_kernels
    return report_of(record, trace)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=32, ignore_eos=True),
        SamplingParams(max_tokens=32, ignore_eos=True, top_p=0.9, top_k=40),
        SamplingParams(max_tokens=8, ignore_eos=True, logprobs=3, repetition_penalty=1.2, prompt_logprobs=2),
    ],
    ids=["plain", "filters", "all features"],
)
def test_every_kernel_of_ours_has_a_part(directory: Path, tmp_path: Path, params: SamplingParams) -> None:
    report = profiled(directory, tmp_path, params)
    shares = {row.part: row.share for row in report.rows}
    assert {"gemm", "prefill_attention", "decode_attention", "cache", "elementwise", "sampling"} <= set(shares)
    assert sum(shares.values()) == pytest.approx(1.0)
    ours = [name for part, name in report.timeline.us_by_name() if part == "other" and name.startswith("_")]
    assert ours == []


def test_the_window_holds_whole_steps(directory: Path, tmp_path: Path) -> None:
    report = profiled(directory, tmp_path, SamplingParams(max_tokens=32, ignore_eos=True))
    assert report.record is not None
    appended = report.timeline.us_by_name()
    assert any(name == "_append" for _, name in appended)
    record, trace = read_profile(tmp_path / "gpu.trace.json.gz")
    assert record is not None and trace is not None
    num_sampling = sum(step.num_samples > 0 for step in record.steps)
    assert sum(event.name == "_append" for event in trace.events if event.cat == "kernel") == num_sampling


def test_the_host_lane_lies_on_the_devices_clock(directory: Path, tmp_path: Path) -> None:
    report = profiled(directory, tmp_path, SamplingParams(max_tokens=32, ignore_eos=True))
    assert report.record is not None
    first, last = report.record.steps[0], report.record.steps[-1]
    base_us = report.timeline.base_ns / 1e3
    pieces = report.timeline.pieces
    assert first.started_at * 1e6 - base_us <= pieces[0].start + 1e3
    assert pieces[-1].end <= last.ended_at * 1e6 - base_us + 1e3


def test_the_ceilings_of_a_gpu_are_measured() -> None:
    probe = measure_ceilings(torch.device("cuda"), torch.bfloat16)
    assert probe.bandwidth is not None and 1e11 < probe.bandwidth < 2e13
    assert probe.gemm_rate is not None and 1e13 < probe.gemm_rate < 1e16
    if torch.cuda.get_device_capability() >= (9, 0):
        fast = measure_ceilings(torch.device("cuda"), torch.bfloat16, "fp8")
        assert fast.gemm_rate is not None and fast.gemm_rate > 1.2 * probe.gemm_rate


def test_a_run_is_recorded_with_its_overhead(directory: Path, tmp_path: Path) -> None:
    config = EngineConfig(model=str(directory), max_num_seqs=32, num_gpu_blocks_override=1024, dtype="bfloat16")
    options = RecordingOptions(directory=str(tmp_path), seconds=0.3, num_windows=1)
    report = record_run(config, workload_of("decode", 16, 200), options, commands={"nsys": "x"})
    assert report is not None and report.overhead is not None and report.overhead.share is not None
    assert report.commands == {"nsys": "x"}


def test_the_cuda_tool_marks_a_window(directory: Path, tmp_path: Path) -> None:
    """Without a tool attached the calls do nothing, but must not fail; NVTX ranges are on meanwhile."""
    config = EngineConfig(model=str(directory), max_num_seqs=8, num_gpu_blocks_override=256, dtype="bfloat16")
    options = RecordingOptions(directory=str(tmp_path), steps=4, tool="cuda")
    assert record_run(config, workload_of("decode", 16, 100), options) is None
    assert list(tmp_path.iterdir()) == []
