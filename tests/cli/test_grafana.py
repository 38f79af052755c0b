"""`headrace grafana`: what it prints, and what it imports."""

from __future__ import annotations

import json

import pytest

from headrace.cli.main import main
from headrace.monitor.grafana import dashboard
from tests.cli.test_main import modules_after


def test_it_prints_the_dashboard(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grafana"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == dashboard("headrace")
    assert printed.err == ""


def test_it_says_which_panels_vllm_cannot_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grafana", "--names", "vllm"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == dashboard("vllm")
    assert "GPU power" in printed.err


def test_it_imports_no_torch() -> None:
    assert not modules_after("grafana") & {"torch", "numba", "transformers", "huggingface_hub"}
