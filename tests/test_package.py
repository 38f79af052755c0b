"""Importing Headrace is cheap, and its public names are there."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

import headrace

HEAVY = {"torch", "numba", "transformers"}


def modules_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `statement`."""
    code = f"{statement}; import sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return set(done.stdout.split())


def test_importing_headrace_loads_nothing_heavy() -> None:
    loaded = modules_after("import headrace")
    assert "headrace" in loaded
    assert not loaded & (HEAVY | {"numpy"})


def test_importing_the_command_loads_nothing_heavy() -> None:
    assert not modules_after("import headrace.cli.main") & HEAVY


def test_the_batcher_comes_without_torch_and_numpy() -> None:
    assert not modules_after("from headrace import DynamicBatcher") & (HEAVY | {"numpy"})


@pytest.mark.parametrize("module", ["headrace.kv", "headrace.sched", "headrace.engine.core"])
def test_the_engine_core_runs_without_torch(module: str) -> None:
    assert not modules_after(f"import {module}") & HEAVY


@pytest.mark.parametrize("name", headrace.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(headrace, name) is not None
    assert name in dir(headrace)


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        headrace.Engine  # noqa: B018


def test_the_installed_version_is_the_packages_own() -> None:
    assert metadata.version("headrace") == headrace.__version__
