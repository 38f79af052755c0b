"""Doctor on the real engine: the staged situations of benchmarks/doctor_situations.py, and their committed record."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "doctor_situations.py"
RECORD = ROOT / "benchmarks" / "results" / "doctor-situations.json"
MIN_CAUSES, MIN_DOUBLE, MIN_HEALTHY = 12, 2, 4  # that run on the engine


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The benchmark, imported with its directory in the path, as Python runs it."""
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec = importlib.util.spec_from_file_location("doctor_situations", SCRIPT)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(SCRIPT.parent))


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(RECORD.read_text())["situations"]
    return found


def test_the_record_is_of_these_situations_and_doctor_was_right(script: ModuleType, rows: list[dict[str, Any]]) -> None:
    staged = {each.name: each for each in script.SITUATIONS}
    assert [row["name"] for row in rows] == list(staged)
    assert [row["name"] for row in rows if not row["is_right"]] == []
    for row in rows:
        situation = staged[row["name"]]
        recorded = (row["injected"], row["how"], row["causes"])
        assert recorded == (situation.injected, situation.how, list(situation.causes))


def test_the_record_has_enough_of_each_kind(rows: list[dict[str, Any]]) -> None:
    on_engine = [row for row in rows if row["source"] != "command"]
    assert sum(bool(row["causes"]) for row in on_engine) >= MIN_CAUSES
    assert sum(len(row["causes"]) >= 2 for row in on_engine) >= MIN_DOUBLE
    assert sum(not row["causes"] for row in on_engine) >= MIN_HEALTHY


def test_the_documentation_has_the_recorded_headlines(script: ModuleType, rows: list[dict[str, Any]]) -> None:
    assert script.markdown(rows) in (ROOT / "docs" / "doctor.md").read_text()


def test_commands_are_judged_as_recorded(script: ModuleType) -> None:
    situations = [each for each in script.SITUATIONS if each.how == "command"]
    assert len(situations) == 3
    assert all(script.judged(each)["is_right"] for each in situations)


@pytest.mark.slow
@pytest.mark.embedded
@pytest.mark.processes
def test_doctor_names_the_cause_of_every_situation(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    command = [sys.executable, str(SCRIPT), "--json", str(record)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
