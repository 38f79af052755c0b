from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.config import EngineConfig, Quantization
from headrace.engine import profiler as profiler_module
from headrace.engine.client import EngineClient
from headrace.engine.fake_settings import fake_settings
from headrace.engine.profiler import ProfileOptions, model_numbers
from headrace.errors import ConfigError, EngineDeadError, ProfilerError
from headrace.profile.parts import TITLES
from headrace.profile.report import report_of
from headrace.profile.trace import read_profile
from headrace.runner.probe import measure_ceilings
from headrace.startup import ignore_stage
from tests.engine.cores import faulty
from tests.engine.small_spec import SMALL_SPEC


def generate(llm: LLM, num_tokens: int = 6) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0, detokenize=False)
    outputs = llm.generate([[5, 6, 7, 8 + i] for i in range(4)], params, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def test_a_profile_of_a_run_is_split_into_its_parts(llm: LLM, tmp_path: Path) -> None:
    llm.start_profile("mine", directory=tmp_path)
    generate(llm)
    record = llm.stop_profile()
    assert record["trace"] == "mine.trace.json.gz"
    found, trace = read_profile(tmp_path / "mine.profile.json")
    assert found is not None and trace is not None
    assert {path.name for path in tmp_path.iterdir()} == {"mine.profile.json", "mine.trace.json.gz"}
    report = report_of(found, trace)
    shares = {row.part: row.share for row in report.rows}
    for part in ("gemm", "decode_attention", "cache", "elementwise", "sampling", "inputs"):
        assert shares[part] > 0, part  # type: ignore[index]
    assert sum(shares.values()) == pytest.approx(1.0)
    assert report.num_steps == sum(event.name == "headrace.execute" for event in trace.events)
    assert found.ceilings.bandwidth and found.ceilings.gemm_rate
    assert set(shares) <= set(TITLES)


def test_the_log_has_the_work_of_each_step(llm: LLM, tmp_path: Path) -> None:
    llm.forget_prefixes()
    llm.start_profile(directory=tmp_path)
    generate(llm, num_tokens=10)
    llm.stop_profile()
    (path,) = tmp_path.glob("*.profile.json")
    found, _ = read_profile(path)
    assert found is not None
    steps = [step for step in found.steps if step.num_tokens]
    assert sum(step.num_tokens for step in steps) == 4 * 4 + 4 * 9
    assert sum(step.num_samples for step in steps) == 4 * 10
    assert sum(step.pairs for step in steps) == 4 * (4 * 5 // 2)
    assert sum(step.kv_tokens for step in steps) == 4 * sum(range(5, 14))
    assert found.steps[-1].is_last


def test_answers_are_the_same_while_a_profile_is_recorded(llm: LLM, tmp_path: Path) -> None:
    plain = generate(llm)
    llm.start_profile(directory=tmp_path)
    assert generate(llm) == plain
    llm.stop_profile()
    assert generate(llm) == plain


def test_stopping_makes_no_object_of_each_event(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take seconds in which no step runs."""

    def refuse(*_: Any) -> None:
        raise AssertionError("events were processed")

    monkeypatch.setattr("torch.autograd.profiler.profile._ensure_function_events", refuse)
    llm.start_profile(directory=tmp_path)
    generate(llm)
    assert llm.stop_profile()["trace_bytes"] > 0


def test_a_second_start_and_a_stop_without_a_start_are_refused(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ProfilerError, match="no profile is being recorded"):
        llm.stop_profile()
    llm.start_profile(directory=tmp_path)
    with pytest.raises(ProfilerError, match="already being recorded"):
        llm.start_profile(directory=tmp_path)
    llm.stop_profile()
    with pytest.raises(ProfilerError, match="no profile is being recorded"):
        llm.stop_profile()


def test_a_profile_that_nobody_stops_ends_at_its_limit(llm: LLM, tmp_path: Path) -> None:
    llm.start_profile("limited", directory=tmp_path, max_steps=3)
    generate(llm)
    record = llm.stop_profile()
    assert record["window"]["stopped_by"] == "max_steps 3"
    assert record["window"]["num_steps"] == 3
    with pytest.raises(ProfilerError, match="no profile"):
        llm.stop_profile()


def test_a_profiler_that_fails_at_its_limit_does_not_end_the_engine(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(profiler: object) -> None:
        stop(profiler)
        raise RuntimeError("no more memory")

    stop = profiler_module._stop_torch
    monkeypatch.setattr(profiler_module, "_stop_torch", fail)
    llm.start_profile(directory=tmp_path, max_steps=3)
    assert generate(llm)
    with pytest.raises(ProfilerError, match="no more memory"):
        llm.stop_profile()
    monkeypatch.undo()
    llm.start_profile(directory=tmp_path)
    assert generate(llm)
    llm.stop_profile()


def test_nothing_is_left_on_after_a_profile(llm: LLM, tmp_path: Path) -> None:
    from headrace.kernels.ops import dispatch

    llm.start_profile(directory=tmp_path)
    generate(llm)
    llm.stop_profile()
    generate(llm)
    core = llm._engine.client._core  # type: ignore[attr-defined]
    assert core.on_step is None
    assert dispatch._ranges is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tool": "perf"}, "tool must be torch or cuda"),
        ({"max_seconds": 0}, "max_seconds must be above 0"),
        ({"max_steps": 0}, "max_steps must be"),
        ({"profile_prefix": "../x"}, "name must be letters"),
    ],
)
def test_bad_options_are_refused(llm: LLM, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        llm.start_profile(directory=tmp_path, **options)


def test_the_cuda_tool_needs_a_gpu(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ProfilerError, match="needs a GPU"):
        llm.start_profile(directory=tmp_path, tool="cuda")


def test_a_directory_that_cannot_be_made_is_refused(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfilerError, match="cannot be used"):
        llm.start_profile(directory=tmp_path / "file" / "below")


def test_a_trace_that_cannot_be_written_is_an_error_and_the_engine_goes_on(llm: LLM, tmp_path: Path) -> None:
    directory = tmp_path / "gone"
    llm.start_profile(directory=directory)
    directory.rmdir()
    with pytest.raises(ProfilerError, match="could not be written"):
        llm.stop_profile()
    assert generate(llm)


def test_an_engine_without_a_profiler_says_so() -> None:
    client = EngineClient(faulty(EngineConfig(model="none"), ignore_stage).core, lambda events: None)
    with pytest.raises(ProfilerError, match="no profiler"):
        client.start_profile(ProfileOptions(directory="x")).result(timeout=10)
    client.close()
    with pytest.raises(EngineDeadError):
        client.stop_profile()


def test_closing_an_engine_ends_its_profile(tiny_directory: Path, tmp_path: Path) -> None:
    with LLM(str(tiny_directory), max_num_seqs=8, num_gpu_blocks_override=256) as llm:
        llm.start_profile(directory=tmp_path)
        generate(llm)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_ceilings_of_a_cpu_are_measured(quantization: Quantization | None) -> None:
    import torch

    probe = measure_ceilings(torch.device("cpu"), torch.float32, quantization)
    assert ("float32" if quantization is None else "INT8") in probe.note
    assert probe.bandwidth is not None and 1e8 < probe.bandwidth < 1e13
    assert probe.gemm_rate is not None and 1e8 < probe.gemm_rate < 1e15


def test_layers_that_fp8_leaves_in_16_bits_count_with_16() -> None:
    spec = SMALL_SPEC
    plain, fp8 = (fake_settings(dtype="bfloat16", quantization=kind) for kind in (None, "fp8"))
    saved = model_numbers(spec, plain)["weight_bytes"] - model_numbers(spec, fp8)["weight_bytes"]
    down = spec.hidden_size * spec.intermediate_size
    packed = {name: shape for name, shape in spec.tensor_shapes().items() if name.endswith("_proj.weight")}
    scales = 4 * (sum(shape[0] for shape in packed.values()) - spec.hidden_size)
    assert saved == spec.num_linear_params - down - scales  # the last layer's down projection stays as it is


def test_options_and_answers_cross_the_wire() -> None:
    from headrace.engine.process import wire

    command = wire.StartProfile(3, ProfileOptions(directory="d", max_steps=7))
    assert wire.decode_command(wire.encode(command)) == command
    answer = wire.Profiled(3, {"steps": [[1, 2.5]]}, None)
    assert wire.decode_message(wire.encode(answer)) == answer
