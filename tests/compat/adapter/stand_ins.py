"""Modules that stand for those of another project, and the pytest hooks that note what each test did.

A module of the project has the names that a plugin gives it; every other name in it is a placeholder. A test that uses
a placeholder is about the project's own code, and is skipped with that reason.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import compat_server
import pytest

RESULTS = "HEADRACE_COMPAT_RESULTS"
OWN_CODE = "uses the project's own code: "


def skip(name: str) -> Any:
    return pytest.skip(OWN_CODE + name)


class _Placeholder(type):
    """A name of the project's code. It can be imported and named in an annotation; using it skips the test."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return skip(cls.__qualname__)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return skip(f"{cls.__qualname__}.{name}")


def _placeholder(module: str, name: str) -> type:
    if name.endswith("Error"):
        return type(name, (Exception,), {"__module__": module})
    return _Placeholder(name, (), {"__module__": module, "__qualname__": f"{module}.{name}"})


class StandIn(types.ModuleType):
    """A module in which every name is a placeholder unless it is set."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _placeholder(self.__name__, name)
        setattr(self, name, found)
        return found


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of these packages here, and not in the checkout. `from_files`: modules that are tests too."""

    def __init__(
        self,
        packages: Sequence[str],
        known: Mapping[str, Mapping[str, Any]],
        from_files: Mapping[str, Path],
    ) -> None:
        self._packages = packages
        self._known = known
        self._from_files = from_files

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not any(fullname == name or fullname.startswith(name + ".") for name in self._packages):
            return None
        folder, _, name = fullname.rpartition(".")
        if folder in self._from_files:
            return importlib.util.spec_from_file_location(fullname, self._from_files[folder] / f"{name}.py")
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        for name, value in self._known.get(module.__name__, {}).items():
            setattr(module, name, value)


def install(
    packages: Sequence[str],
    known: Mapping[str, Mapping[str, Any]],
    *,
    from_files: Mapping[str, Path] | None = None,
) -> None:
    """`known`: the names that modules have. `from_files`: packages that are read from a folder of the checkout."""
    sys.meta_path.insert(0, Finder(packages, known, from_files or {}))


def tokenizer(*args: Any, **kwargs: Any) -> Any:
    """The tokenizer of the model that stands for the test's."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(compat_server.settings()["tokenizer"])


def replace_tokenizers() -> None:
    """Give the same one to tests that ask transformers for the tokenizer of their model."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained = tokenizer


def _note(**entry: Any) -> None:
    with open(os.environ[RESULTS], "a", encoding="utf-8") as results:
        results.write(json.dumps(entry) + "\n")


def _message(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message)
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    return str(report.longrepr or "").strip()


@pytest.hookimpl(tryfirst=True)
def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.outcome != "passed":
        _note(test=report.nodeid, outcome=report.outcome, line=None, message=_message(report)[-600:])


_running: list[str] = [""]  # the id of the test; one with subtests reports each under an id of its own


def pytest_runtest_logstart(nodeid: str, location: tuple[str, int | None, str]) -> None:
    """Noted too, so that a test that does not end is not forgotten."""
    _running[0] = nodeid
    _note(test=nodeid, outcome="started", line=(location[1] or 0) + 1, message="")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test with subtests is one test: it fails if one of them does."""
    if report.when == "call" or report.outcome != "passed":
        line = (report.location[1] or 0) + 1
        _note(test=_running[0], outcome=report.outcome, line=line, message=_message(report)[:600])
