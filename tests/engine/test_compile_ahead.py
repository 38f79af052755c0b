"""Kernels that are compiled ahead are those that a start looks up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.engine import compile_ahead
from headrace.engine.dry_start import with_few_layers
from headrace.hardware import MachineFacts
from tests.engine.test_resolve import GPU, SPEC, facts, on_gpu, settings

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def as_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests compile nothing ahead (`conftest.py`), except these."""
    monkeypatch.setenv(compile_ahead.PROCESSES_VARIABLE, compile_ahead.AUTOMATIC)


def begin(machine: MachineFacts, monkeypatch: pytest.MonkeyPatch, cache: Path) -> bool:
    """Whether a child would be started."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setattr(compile_ahead, "CompileAhead", lambda order: order)
    return compile_ahead.begin(EngineConfig(), SPEC, on_gpu(), machine) is not None


def test_a_start_that_is_noted_as_complete_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(facts(), gpu=GPU)
    assert begin(machine, monkeypatch, tmp_path)
    note = compile_ahead.note_of(SPEC, on_gpu(), GPU)
    note.parent.mkdir()
    note.touch()
    assert not begin(machine, monkeypatch, tmp_path)
    assert begin(machine, monkeypatch, tmp_path / "other")


def test_few_cores_and_a_variable_keep_kernels_from_being_compiled_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not begin(replace(facts(), gpu=GPU, num_cores=2), monkeypatch, tmp_path)
    monkeypatch.setenv(compile_ahead.PROCESSES_VARIABLE, "0")
    assert not begin(replace(facts(), gpu=GPU), monkeypatch, tmp_path)


def test_a_cpu_compiles_nothing_ahead() -> None:
    assert compile_ahead.begin(EngineConfig(), SPEC, settings(), facts()) is None


def test_the_note_depends_on_settings_and_architecture_and_not_on_free_memory() -> None:
    first = compile_ahead.note_of(SPEC, on_gpu(), GPU)
    assert compile_ahead.note_of(SPEC, on_gpu(replace(GPU, free_memory=50 << 30)), GPU) == first
    assert compile_ahead.note_of(SPEC, on_gpu(max_num_seqs=7), GPU) != first
    assert compile_ahead.note_of(SPEC, on_gpu(), replace(GPU, capability=(10, 0))) != first


def test_a_child_that_fails_is_reported_and_does_not_stop_the_start(caplog: pytest.LogCaptureFixture) -> None:
    order = compile_ahead.Order(EngineConfig(model="/no/such/model"), GPU, 1, os.getpid())
    ahead = compile_ahead.CompileAhead(order)
    ahead.wait(lambda name, done=0, total=0: None)
    assert "kernels were not compiled ahead" in caplog.text and "/no/such/model" in caplog.text


def test_a_dry_start_keeps_layers_of_every_kind() -> None:
    windows = (None, 64, None, 64, None, 64, None, 64)
    spec = replace(SPEC, num_layers=8, windows=windows)
    assert with_few_layers(spec).num_layers == 4
    assert with_few_layers(spec, at_least=5).num_layers == 7
    assert with_few_layers(replace(spec, windows=(None,) * 7 + (64,))).num_layers == 8


@pytest.mark.slow
@pytest.mark.interpreted  # where there is a GPU, its driver would be used
def test_triton_finds_every_kernel_of_a_start_in_the_directory_that_compile_wrote(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "kernels"), "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    flags = ["--load-format", "random", "--max-model-len", "512", "--processes", "2"]
    command = ["-m", "headrace", "compile", str(tmp_path), "--gpu", "H200", "-o", str(tmp_path / "kernels"), *flags]
    written = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=True)
    looked_up = subprocess.run(
        [sys.executable, "tests/engine/launch_all.py", str(tmp_path)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    num_kernels, *compiled = looked_up.stdout.split()
    assert int(num_kernels) > 20 and compiled == []
    assert f"{num_kernels} kernels" in written.stdout


@pytest.mark.gpu
def test_a_first_start_finds_every_kernel_compiled() -> None:
    environment = {name: value for name, value in os.environ.items() if name != compile_ahead.PROCESSES_VARIABLE}
    paths = [str(ROOT / "src"), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), compile_ahead.PROCESSES_VARIABLE: "8"}
    command = [sys.executable, "benchmarks/first_start.py", "--model", "llama-3.2-1b", "--kind", "ahead"]
    command += ["--num-gpu-blocks-override", "4096"]  # other tests use the GPU at the same time
    run = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.stdout.strip().endswith("compiled 0"), run.stdout + run.stderr[-2000:]
