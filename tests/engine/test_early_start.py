"""What a start begins before torch is imported: only for an engine of one GPU, and ended with a start that fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.engine import early_start, start
from headrace.engine.early_start import EarlyStart, begin_early
from headrace.errors import ConfigError
from tests.engine.test_resolve import SPEC

ROOT = Path(__file__).parents[2]


class Compiler:
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(early_start, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(early_start.compile_ahead, "begin_early", lambda config, spec: compiler)
    monkeypatch.setattr(early_start, "set_up_meanwhile", lambda done: None)
    return compiler


def test_a_machine_without_a_driver_begins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_start, "has_gpu_driver", lambda: False)
    assert begin_early(EngineConfig(), SPEC) == EarlyStart()


@pytest.mark.usefixtures("machine_with_a_gpu")
@pytest.mark.parametrize("options", [{"device": "cpu"}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_engines_on_a_cpu_or_of_several_ranks_begin_nothing(options: dict[str, Any]) -> None:
    assert begin_early(EngineConfig(**options), SPEC) == EarlyStart()


def test_a_gpu_is_initialized_and_kernels_are_compiled(
    machine_with_a_gpu: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = Thread(target=lambda: None)
    monkeypatch.setattr(early_start, "create_context_meanwhile", lambda done: thread)
    assert begin_early(EngineConfig(), SPEC).context is None  # this process has imported torch already
    monkeypatch.delitem(sys.modules, "torch")
    early = begin_early(EngineConfig(), SPEC)
    assert early.compiler is machine_with_a_gpu and early.context is thread


def test_a_start_that_fails_ends_the_compiler(
    machine_with_a_gpu: Compiler, monkeypatch: pytest.MonkeyPatch, tiny_directory: Path
) -> None:
    def refuse(*_: Any) -> None:
        raise ConfigError("not like this")

    monkeypatch.setattr(start, "resolve_here", refuse)
    with pytest.raises(ConfigError, match="not like this"):
        start.start_engine(EngineConfig(model=str(tiny_directory)), lambda events: None)
    assert machine_with_a_gpu.is_closed


def test_what_decides_on_the_compiler_imports_neither_torch_nor_triton() -> None:
    code = """
import sys
from headrace.config import EngineConfig
from headrace.engine import start
from headrace.engine.compile_notes import hint_of
from tests.engine.test_resolve import SPEC
hint_of(EngineConfig(), SPEC)
print(*sorted({"torch", "triton", "sympy", "transformers"} & set(sys.modules)))
"""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == []
