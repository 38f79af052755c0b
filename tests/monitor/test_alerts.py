"""Alerts on both sides of their thresholds: with the real Prometheus rule tester, and inside the server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable
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
WITH_BASELINE = [alert.name for alert in ALERTS if isinstance(alert.condition.threshold, Multiple)]
by_names = pytest.mark.parametrize("names", ["headrace", "vllm"])
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


def run_promtool_tests(folder: Path, made: Iterable[tuple[Scenario, dict[str, Any]]], names: Names) -> None:
    """All of them in one process. A failure names the file, and so the scenario."""
    files = []
    for scenario, test in made:
        own = folder / re.sub(r"\W+", "-", scenario.name)
        own.mkdir()
        write_rules(own / "rules.yml", alert_of(scenario), names=names)
        (own / "test.yml").write_text(json.dumps(test))
        files.append(str(own / "test.yml"))
    promtool("test", "rules", *files)


def evaluate_with_prometheus(folder: Path, scenarios: Iterable[Scenario], names: Names) -> None:
    found = [scenario for scenario in scenarios if exists(alert_of(scenario), names)]
    assert found
    run_promtool_tests(folder, [(scenario, promtool_test(scenario, names)) for scenario in found], names)


@needs_promtool
@by_names
def test_prometheus_evaluates_the_rules_as_expected(names: Names, tmp_path: Path) -> None:
    evaluate_with_prometheus(tmp_path, [s for s in SCENARIOS if s.alert not in WITH_BASELINE], names)


@needs_promtool
@pytest.mark.slow
@by_names
def test_prometheus_evaluates_rules_with_a_baseline_as_expected(names: Names, tmp_path: Path) -> None:
    evaluate_with_prometheus(tmp_path, [s for s in SCENARIOS if s.alert in WITH_BASELINE], names)


@needs_promtool
def test_prometheus_evaluates_one_rule_with_a_baseline_as_expected(tmp_path: Path) -> None:
    """A baseline needs hours of samples, which takes seconds: the other alerts are in the slow run."""
    evaluate_with_prometheus(tmp_path, [s for s in SCENARIOS if s.alert == WITH_BASELINE[0]], "headrace")


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
@pytest.mark.parametrize(
    "name", [WITH_BASELINE[0], *(pytest.param(name, marks=pytest.mark.slow) for name in WITH_BASELINE[1:])]
)
def test_both_compute_the_same_baseline(name: str, tmp_path: Path) -> None:
    scenario = next(scenario for scenario in SCENARIOS if scenario.alert == name)
    run_promtool_tests(tmp_path, [(scenario, baseline_test(scenario))], "headrace")


def baseline_test(scenario: Scenario) -> dict[str, Any]:
    """Expects the thresholds that the server computes."""
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
    assert len(tests) == 3
    made = promtool_test(scenario, "headrace")
    made["tests"][0]["promql_expr_test"] = tests
    return made


@needs_promtool
@by_names
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
