"""Kernels of the CPU on the disk, and the process that helps to compile them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace.kernels.cpu
from headrace.kernels.cpu import launch


class Process:
    """Stands in for the helper."""

    def __init__(self, started: list[list[str]], command: list[str], **_: Any) -> None:
        started.append(command)
        self.calls: list[str] = []

    def kill(self) -> None:
        self.calls.append("kill")

    def wait(self) -> None:
        assert self.calls == ["kill"]
        self.calls.append("wait")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    found: list[list[str]] = []
    monkeypatch.setattr(launch.subprocess, "Popen", lambda command, **options: Process(found, command, **options))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    return found


def test_a_start_with_compiled_kernels_starts_no_process(started: list[list[str]]) -> None:
    headrace.kernels.cpu.warm_up()  # compiles what is missing
    started.clear()
    headrace.kernels.cpu.warm_up()
    assert started == []


def test_a_process_helps_where_kernels_are_missing_and_ends_with_the_others(
    started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headrace.kernels.cpu.warm_up()  # so that none has to be compiled in this test
    started.clear()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    headrace.kernels.cpu.warm_up()
    assert [command[0] for command in started] == [sys.executable]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    headrace.kernels.cpu.warm_up()
    assert len(started) == 1


def test_a_start_goes_on_where_no_process_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    headrace.kernels.cpu.warm_up()
    assert all(each.entry for each in launch._kernels)


@pytest.mark.slow
def test_the_helper_compiles_the_last_kernels_into_the_cache(tmp_path: Path) -> None:
    code = launch._HELPER.replace("launch.compile_from_the_last()", "launch._kernels[:] = launch._kernels[-2:]")
    code += "; launch.compile_from_the_last(); launch.compile_from_the_last()"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-P", "-c", code], env=environment, check=True)
    names = {path.name.partition("-")[0] for path in tmp_path.glob("*/*.nbi")}
    expected = launch._kernels[-2:]
    assert names == {f"{each._function.__module__.rpartition('.')[2]}.{each._function.__name__}" for each in expected}
