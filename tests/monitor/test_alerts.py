"""Alerts on both sides of their thresholds: with the real Prometheus rule tester, and inside the server."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.errors import ConfigError
from headrace.monitor.alerts import ALERTS, Alert, with_thresholds
from headrace.monitor.conditions import Multiple
from headrace.monitor.evaluation import AlertStates
from headrace.monitor.promql import (
    PREFIXES,
    Names,
    as_yaml,
    baseline_expression,
    exists,
    expression,
    rule_file,
    value_expression,
)
from tests.monitor.scenarios import (
    BY_NAME,
    SCENARIOS,
    STEP_S,
    Scenario,
    alert_of,
    history_of,
    promtool_series,
    readings_at,
)

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: package prometheus)")
by_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)


def promtool(*arguments: str) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def write_rules(path: Path, *alerts: Alert, names: Names = "headrace") -> None:
    path.write_text(as_yaml(rule_file(alerts, names, {})), encoding="utf-8")


def expects(second: int, query: str, value: float | None) -> dict[str, Any]:
    samples = [] if value is None else [{"labels": "{}", "value": value}]
    return {"expr": query, "eval_time": f"{second}s", "exp_samples": samples}


def is_near(query: str, value: float) -> str:
    """A query that returns 1 if the other returns about this value. Prometheus 3 extrapolates by one interval more."""
    return f"sum(abs(({query}) - {value!r}) < bool {abs(value) * 0.02!r})"


def promtool_test(scenario: Scenario, names: Names) -> dict[str, Any]:
    alert = alert_of(scenario)
    name = PREFIXES[names] + alert.name
    tests = []
    for second, state in scenario.states.items():
        for each in ("pending", "firing"):
            query = f'count(ALERTS{{alertname="{name}", alertstate="{each}"}})'
            tests.append(expects(second, query, 1 if each == state else None))
    for second, value in scenario.values.items():
        tests.append(expects(second, is_near(value_expression(alert.condition.value, names), value), 1))
    return {
        "rule_files": ["rules.yml"],
        "evaluation_interval": f"{STEP_S}s",
        "tests": [
            {
                "interval": f"{STEP_S}s",
                "input_series": promtool_series(scenario, names),
                "promql_expr_test": tests,
            }
        ],
    }


@needs_promtool
@by_scenario
def test_prometheus_evaluates_the_rule_as_expected(scenario: Scenario, tmp_path: Path) -> None:
    write_rules(tmp_path / "rules.yml", alert_of(scenario))
    (tmp_path / "test.yml").write_text(json.dumps(promtool_test(scenario, "headrace")))
    promtool("test", "rules", str(tmp_path / "test.yml"))


@needs_promtool
@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if exists(alert_of(s), "vllm")], ids=lambda s: s.name)
def test_prometheus_evaluates_the_rule_under_vllm_names(scenario: Scenario, tmp_path: Path) -> None:
    write_rules(tmp_path / "rules.yml", alert_of(scenario), names="vllm")
    (tmp_path / "test.yml").write_text(json.dumps(promtool_test(scenario, "vllm")))
    promtool("test", "rules", str(tmp_path / "test.yml"))


@by_scenario
def test_the_server_evaluates_the_alert_as_expected(scenario: Scenario) -> None:
    alert = alert_of(scenario)
    history = history_of(alert.condition)
    states = AlertStates([alert], history)
    found: dict[int, str] = {}
    for step in range(scenario.num_steps):
        second = step * STEP_S
        history.record(readings_at(scenario, step, history.sources), now=second, wall_time=1e9 + second)
        states.evaluate(now=second, wall_time=1e9 + second)
        (status,) = states.statuses
        found[second] = status.state
        if second in scenario.values:
            assert status.judgement.value == pytest.approx(scenario.values[second], rel=1e-3)
    assert {second: found[second] for second in scenario.states} == scenario.states


@needs_promtool
@pytest.mark.parametrize("name", ["TimeToFirstTokenHigh", "InterTokenLatencyHigh", "EndToEndLatencyHigh"])
def test_both_compute_the_same_baseline(name: str, tmp_path: Path) -> None:
    scenario = next(s for s in SCENARIOS if s.alert == name)
    condition = alert_of(scenario).condition
    assert isinstance(condition.threshold, Multiple)
    history = history_of(condition)
    states = AlertStates([alert_of(scenario)], history)
    tests = []
    for step in range(scenario.num_steps):
        second = step * STEP_S
        history.record(readings_at(scenario, step, history.sources), now=second, wall_time=second)
        if second in (3600, 5400, 6600):
            states.evaluate(now=second, wall_time=second)
            threshold = states.statuses[0].judgement.threshold
            assert threshold is not None
            tests.append(
                expects(second, is_near(f"2 * {baseline_expression(condition.threshold.baseline)}", threshold), 1)
            )
    write_rules(tmp_path / "rules.yml", alert_of(scenario))
    made = promtool_test(scenario, "headrace")
    made["tests"][0]["promql_expr_test"] = tests
    (tmp_path / "test.yml").write_text(json.dumps(made))
    promtool("test", "rules", str(tmp_path / "test.yml"))


@needs_promtool
@pytest.mark.parametrize("names", ["headrace", "vllm"])
def test_promtool_accepts_all_rules(names: Names, tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(as_yaml(rule_file(ALERTS, names, {"team": 'a "b": c'})), encoding="utf-8")
    promtool("check", "rules", str(tmp_path / "rules.yml"))


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_alert_has_scenarios_on_both_sides(alert: Alert) -> None:
    states = [set(s.states.values()) for s in SCENARIOS if s.alert == alert.name]
    assert any("firing" in found for found in states)
    assert any("firing" not in found for found in states)


def test_the_yaml_is_the_data() -> None:
    rules = rule_file(ALERTS, "headrace", {"team": 'a "b": c'})
    assert yaml.safe_load(as_yaml(rules)) == rules


def test_rules_under_vllm_names_use_no_other_series() -> None:
    text = "".join(rule["expr"] for rule in rule_file(ALERTS, "vllm", {})["groups"][0]["rules"])
    assert "headrace" not in text
    assert 'reason=~"max_num_queued_reqs|max_num_queued_tokens"' in text
    assert 'finished_reason="error"' in text


def test_a_threshold_can_be_changed() -> None:
    changed = {
        alert.name: alert for alert in with_thresholds(ALERTS, {"RequestsWaiting": 50, "TimeToFirstTokenHigh": 3})
    }
    assert expression(changed["RequestsWaiting"].condition).endswith("> 50")
    assert "> 3 * quantile_over_time" in expression(changed["TimeToFirstTokenHigh"].condition)
    assert changed["EngineDown"] is BY_NAME["EngineDown"]
    with pytest.raises(ConfigError, match="did you mean 'RequestsWaiting'"):
        with_thresholds(ALERTS, {"RequestWaiting": 50})
