"""A machine that is the same everywhere, and a journal that does not wait for the disk."""

from __future__ import annotations

import os

import pytest

from headrace.tune import run, spec

MACHINE = {"cpu": "simulated", "num_cores": 2, "memory_bytes": 2**34, "gpus": [], "platform": "test"}


@pytest.fixture(autouse=True)
def _simulated_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "machine_facts", lambda: dict(MACHINE))
    monkeypatch.setattr(spec, "current_commit", lambda: "abc1234")
    monkeypatch.setattr(os, "fsync", lambda fd: None)
