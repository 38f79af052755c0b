"""A test's random numbers come from the run's seed and its name, and a failure says how to repeat it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

from tests import seeds

ROOT = Path(__file__).parents[1]

FAILS = """
import random, numpy, torch
from hypothesis import given, strategies

def test_fails():
    print("numbers", random.random(), numpy.random.random(), torch.rand(1).item())
    assert False

@given(strategies.integers(0, 2**60))
def test_has_examples(number):
    print("example", number)
    assert number < 2**50
"""


def numbers() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), torch.rand(1).item()


def test_a_seed_gives_the_same_numbers_again() -> None:
    seeds.seed_all(5)
    once = numbers()
    seeds.seed_all(5)
    assert numbers() == once
    seeds.seed_all(6)
    assert not set(numbers()) & set(once)


def test_tests_differ_and_seeds_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(seeds.VARIABLE, "1")
    first = seeds.seed_of("a"), seeds.seed_of("b")
    monkeypatch.setenv(seeds.VARIABLE, "2")
    assert len({*first, seeds.seed_of("a"), seeds.seed_of("b")}) == 4


def test_an_invalid_seed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(seeds.VARIABLE, "x7")
    with pytest.raises(ValueError, match="HEADRACE_TEST_SEED must be a whole number from 0, got 'x7'"):
        seeds.run_seed()


def test_a_slow_machine_fails_no_example() -> None:
    current = hypothesis.settings()
    assert current.deadline is None
    assert hypothesis.HealthCheck.too_slow in current.suppress_health_check


def run_failing(directory: Path, seed: int) -> tuple[str, list[str]]:
    """What pytest prints for a file of failing tests, under the conftest of all tests; and the numbers in it."""
    directory.mkdir()
    (directory / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (directory / "test_it.py").write_text(FAILS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(directory), str(directory)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", seeds.VARIABLE: str(seed)}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout, [line for line in done.stdout.splitlines() if line.startswith(("numbers", "example"))]


@pytest.mark.slow
@pytest.mark.processes
def test_a_failure_names_its_seed_and_the_seed_repeats_it(tmp_path: Path) -> None:
    printed, found = run_failing(tmp_path / "once", 41)
    assert "HEADRACE_TEST_SEED=41 pytest 'test_it.py::test_fails'" in printed
    assert {line.split()[0] for line in found} == {"numbers", "example"}
    assert run_failing(tmp_path / "again", 41)[1] == found
    assert not set(run_failing(tmp_path / "other", 42)[1][:1]) & set(found)
