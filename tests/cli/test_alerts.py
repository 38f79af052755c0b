"""`headrace alerts`: formats, names, labels, thresholds, and what it imports."""

from __future__ import annotations

import json

import pytest
import yaml

from headrace.cli.main import main
from headrace.monitor.alerts import ALERTS
from tests.cli.test_main import modules_after, usage_error


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["alerts", *arguments]) == 0
    return capsys.readouterr().out


def test_rules_are_yaml_by_default_and_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    rules = yaml.safe_load(printed(capsys))
    assert [rule["alert"] for rule in rules["groups"][0]["rules"]] == [f"Headrace{alert.name}" for alert in ALERTS]
    assert json.loads(printed(capsys, "--format", "json")) == rules


def test_vllm_names_omit_what_vllm_does_not_have_and_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alerts", "--names", "vllm"]) == 0
    shown = capsys.readouterr()
    names = [rule["alert"] for rule in yaml.safe_load(shown.out)["groups"][0]["rules"]]
    assert "VllmKvCacheNearlyFull" in names
    assert "VllmEngineDown" not in names
    assert "EngineDown" in shown.err


def test_labels_are_added_and_thresholds_changed(capsys: pytest.CaptureFixture[str]) -> None:
    rules = yaml.safe_load(printed(capsys, "--label", "team=ml", "--threshold", "RequestsWaiting=50"))
    waiting = next(rule for rule in rules["groups"][0]["rules"] if rule["alert"] == "HeadraceRequestsWaiting")
    assert waiting["labels"] == {"severity": "warning", "team": "ml"}
    assert waiting["expr"] == "headrace:num_requests_waiting > 50"


@pytest.mark.parametrize("label", ["team", "a-b=c", "severity=page", "=x"])
def test_a_bad_label_is_refused(label: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--label" in usage_error(capsys, "alerts", "--label", label)


@pytest.mark.parametrize("threshold", ["RequestsWaiting", "RequestsWaiting=many", "RequestsWaiting=nan"])
def test_a_bad_threshold_is_refused(threshold: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--threshold" in usage_error(capsys, "alerts", "--threshold", threshold)


def test_an_unknown_alert_is_an_error_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alerts", "--threshold", "RequestWaiting=3"]) == 2
    assert "did you mean 'RequestsWaiting'" in capsys.readouterr().err


def test_the_table_names_every_alert(capsys: pytest.CaptureFixture[str]) -> None:
    table = printed(capsys, "--format", "markdown")
    assert all(f"| `{alert.name}` |" in table for alert in ALERTS)


def test_it_imports_no_torch() -> None:
    assert not modules_after("alerts") & {"torch", "numba", "transformers", "huggingface_hub"}
