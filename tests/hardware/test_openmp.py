"""How long threads of OpenMP look for work."""

from __future__ import annotations

import os
import sys

import pytest

from headrace.hardware import shorten_openmp_waits


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)


def test_waits_are_short_if_torch_is_imported_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    shorten_openmp_waits()
    assert os.environ["GOMP_SPINCOUNT"] == "1000"


def test_what_the_user_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    shorten_openmp_waits()
    assert "GOMP_SPINCOUNT" not in os.environ


def test_nothing_is_set_that_would_come_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", object())
    shorten_openmp_waits()
    assert "GOMP_SPINCOUNT" not in os.environ
