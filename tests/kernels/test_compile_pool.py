"""Launches are compiled in forks as they are found, the slowest first, whatever happens to a fork."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytest.importorskip("triton")

from headrace.errors import ModelError
from headrace.kernels.gpu import compile_pool
from headrace.kernels.gpu.compile_pool import CompilePool
from headrace.kernels.gpu.launches import Launch

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


def launch(function: str) -> Launch:
    return Launch("a.module", function, "{}")


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled by nothing; one kills its process."""

    def compile_nothing(launch: Launch) -> None:
        if launch.function == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(compile_pool, "compile_launch", compile_nothing)
    monkeypatch.setattr(compile_pool, "prepare_to_compile", lambda: None)


def test_the_slowest_of_those_that_wait_is_compiled_first() -> None:
    names: list[str] = []
    shown: list[tuple[int, int]] = []
    with CompilePool(1, lambda done, total: shown.append((done, total)), lambda name, _: names.append(name)) as pool:
        pool._idle, idle = [], pool._idle  # busy with something else
        for name in ("_gate", "_norm", "_search_thresholds", "_prefill"):
            pool.add(launch(name))
        pool._idle = idle
        pool._assign()
        assert pool.finish() == 4
    assert names == ["_prefill", "_search_thresholds", "_gate", "_norm"]
    assert shown[-1] == (4, 4)


def compile_these(names: list[str], num_processes: int, compiled: Callable[[str, float], None]) -> None:
    with CompilePool(num_processes, compiled=compiled) as pool:
        for name in names:
            pool.add(launch(name))
        pool.finish()


def test_a_fork_that_dies_fails_its_own_launch_only() -> None:
    names: list[str] = []
    with pytest.raises(ModelError, match="1 of 6 kernels"):
        compile_these(["a", "deadly", "b", "c", "d", "e"], 2, lambda name, _: names.append(name))
    assert sorted(names) == ["a", "b", "c", "d", "e"]


def test_if_all_forks_die_the_rest_fails() -> None:
    with pytest.raises(ModelError, match="3 of 3 kernels"):
        compile_these(["deadly", "a", "b"], 1, lambda name, _: None)


def test_forks_end_with_the_pool() -> None:
    with CompilePool(3) as pool:
        forks = [psutil.Process(fork.process.pid) for fork in pool._forks]
        assert all(fork.is_running() for fork in forks)
    assert not any(fork.is_running() for fork in forks)


def test_forks_end_when_the_process_that_forked_them_is_killed() -> None:
    code = """
import time
from headrace.kernels.gpu import compile_pool
compile_pool.prepare_to_compile = lambda: None
pool = compile_pool.CompilePool(2)
print(*(fork.process.pid for fork in pool._forks), flush=True)
time.sleep(60)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    forks = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs(forks, timeout=20)
    assert len(forks) == 2
    assert all(fork.status() == psutil.STATUS_ZOMBIE for fork in alive)
