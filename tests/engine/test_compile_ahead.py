"""Kernels that are compiled ahead are those that a start looks up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.config import EngineConfig
from headrace.engine import compile_ahead, compile_notes
from headrace.engine.compile_ahead import CompileAhead
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


MIXTURE = MODEL | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
IN_BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


@pytest.fixture(autouse=True)
def as_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests compile nothing ahead (`conftest.py`), except these."""
    monkeypatch.setenv(compile_ahead.PROCESSES_VARIABLE, compile_ahead.AUTOMATIC)


class Child:
    """In place of the process."""

    def __init__(self) -> None:
        self.order: compile_ahead.Order | None = None
        self.is_closed = False

    def compile(self, order: compile_ahead.Order) -> None:
        self.order = order

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_ahead, "CompileAhead", Child)


def begin(machine: MachineFacts, early: Any = None) -> Any:
    """What compiles, if anything does."""
    return compile_ahead.begin(early, EngineConfig(), SPEC, on_gpu(), machine)


def write_note() -> None:
    note = compile_notes.note_of(SPEC, on_gpu(), GPU)
    note.parent.mkdir()
    note.touch()


MACHINE = replace(facts(), gpu=GPU)


def test_a_start_that_is_noted_as_complete_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert begin(MACHINE).order.gpu.name == GPU.name
    write_note()
    assert begin(MACHINE) is None
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    assert begin(MACHINE) is not None


def test_few_cores_and_a_variable_keep_kernels_from_being_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert begin(replace(MACHINE, num_cores=2)) is None
    monkeypatch.setenv(compile_ahead.PROCESSES_VARIABLE, "0")
    assert begin(MACHINE) is None
    assert compile_ahead.begin_early(EngineConfig(), SPEC) is None


def test_a_cpu_compiles_nothing_ahead() -> None:
    early = Child()
    assert compile_ahead.begin(early, EngineConfig(), SPEC, settings(), facts()) is None  # type: ignore[arg-type]
    assert early.is_closed


def test_a_child_that_began_early_gets_the_order() -> None:
    early = Child()
    assert begin(MACHINE, early) is early
    assert early.order is not None and early.order.num_processes > 0 and not early.is_closed


def test_a_child_that_is_not_needed_is_ended_and_not_started_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compile_ahead.PROCESSES_VARIABLE, "8")
    write_note()
    early: Any = compile_ahead.begin_early(EngineConfig(), SPEC)
    assert begin(MACHINE, early) is None and early.is_closed
    assert compile_ahead.begin_early(EngineConfig(), SPEC) is None
    assert compile_ahead.begin_early(EngineConfig(max_num_seqs=7), SPEC) is not None
    assert compile_ahead.begin_early(EngineConfig(), replace(SPEC, num_layers=1)) is not None


def test_a_process_that_cannot_be_started_does_not_stop_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(compile_ahead, "CompileAhead", refuse)
    assert begin(MACHINE) is None and "no more processes" in caplog.text


def test_the_note_depends_on_settings_and_architecture_and_not_on_free_memory() -> None:
    first = compile_notes.note_of(SPEC, on_gpu(), GPU)
    assert compile_notes.note_of(SPEC, on_gpu(replace(GPU, free_memory=50 << 30)), GPU) == first
    assert compile_notes.note_of(SPEC, on_gpu(max_num_seqs=7), GPU) != first
    assert compile_notes.note_of(SPEC, on_gpu(), replace(GPU, capability=(10, 0))) != first


@pytest.mark.processes
def test_a_child_that_fails_is_reported_and_does_not_stop_the_start(caplog: pytest.LogCaptureFixture) -> None:
    ahead = CompileAhead()
    ahead.compile(compile_ahead.Order(EngineConfig(model="/no/such/model"), GPU, 1))
    ahead.wait(lambda name, done=0, total=0: None)
    assert "kernels were not compiled ahead" in caplog.text and "/no/such/model" in caplog.text


@pytest.mark.processes
def test_a_child_that_was_killed_does_not_stop_the_start(caplog: pytest.LogCaptureFixture) -> None:
    ahead = CompileAhead()
    ahead._process.kill()
    ahead._process.wait()
    ahead.compile(compile_ahead.Order(EngineConfig(), GPU, 1))
    ahead.wait(lambda name, done=0, total=0: None)
    assert "kernels were not compiled ahead" in caplog.text


@pytest.mark.processes
def test_a_child_without_an_order_ends_at_once() -> None:
    ahead = CompileAhead()
    ahead.close()
    assert ahead._process.returncode == -signal.SIGKILL
    ahead.close()


@pytest.mark.processes
def test_a_child_ends_when_its_parent_is_killed() -> None:
    code = "import time; from headrace.engine.compile_ahead import CompileAhead as C; c = C(); "
    code += "print(c._process.pid, flush=True); time.sleep(60)"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([child], timeout=20)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_dry_start_keeps_layers_of_every_kind() -> None:
    windows = (None, 64, None, 64, None, 64, None, 64)
    spec = replace(SPEC, num_layers=8, windows=windows)
    assert with_few_layers(spec).num_layers == 4
    assert with_few_layers(spec, at_least=5).num_layers == 7
    assert with_few_layers(replace(spec, windows=(None,) * 7 + (64,))).num_layers == 8


@pytest.mark.interpreted  # where there is a GPU, its driver would be used
@pytest.mark.parametrize("quantization", ["none", "fp8", "int8", "int4", "stored"])
@pytest.mark.parametrize("model", [MODEL, MIXTURE], ids=["dense", "mixture"])
def test_a_dry_start_imports_neither_sympy_nor_dynamo(model: dict[str, Any], quantization: str, tmp_path: Path) -> None:
    config = model | IN_BLOCKS if quantization == "stored" else model
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = """
import sys
from headrace.config import EngineConfig
from headrace.engine.dry_start import DryStart
from headrace.hardware import GpuFacts
quantization = None if sys.argv[2] in ("none", "stored") else sys.argv[2]
config = EngineConfig(model=sys.argv[1], load_format="random", max_model_len=512, quantization=quantization)
found = []
launches = DryStart.of(config, GpuFacts("H200", 1 << 37, 1 << 37, (9, 0))).launches(found.append)
assert found == launches and len(found) > 20, len(found)
print(*sorted({"sympy", "torch._dynamo"} & set(sys.modules)))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", code, str(tmp_path), quantization]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


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
