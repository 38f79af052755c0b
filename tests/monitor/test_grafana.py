"""The dashboard for Grafana: every query selects series that exist, and the file has the form that Grafana imports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from headrace.monitor.grafana import SECTIONS, dashboard, expression, omitted
from headrace.monitor.promql import Names
from headrace.monitor.table import SERIES
from tests.monitor.test_alerts import needs_promtool, promtool

BOTH: tuple[Names, ...] = ("headrace", "vllm")
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
EXPORTED = {
    f"{alias.name}{suffix}"
    for series in SERIES
    for alias in (series.as_alias, *series.aliases)
    for suffix in SUFFIXES[series.kind]
}
COMMITTED = Path(__file__).parents[2] / "examples/grafana-dashboard.json"


def panels(names: Names) -> list[dict[str, Any]]:
    return [panel for panel in dashboard(names)["panels"] if panel["type"] != "row"]


def queries(names: Names) -> Iterator[str]:
    for panel in panels(names):
        for target in panel["targets"]:
            yield target["expr"]


@pytest.mark.parametrize("names", BOTH)
def test_every_query_selects_series_that_the_server_exports(names: Names) -> None:
    text = json.dumps(dashboard(names))
    used = set(re.findall(r"\b(?:headrace|vllm):\w+", text))
    assert used <= EXPORTED
    assert {name.partition(":")[0] for name in used} == {names}


@needs_promtool
@pytest.mark.parametrize("names", BOTH)
def test_every_query_is_valid_for_prometheus(tmp_path: Path, names: Names) -> None:
    rules = [
        {"record": f"panel:number{number}", "expr": _without_variables(query)}
        for number, query in enumerate([*queries(names), dashboard(names)["annotations"]["list"][0]["expr"]])
    ]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", str(path))


def _without_variables(query: str) -> str:
    query = query.replace("$__rate_interval", "1m").replace("$model", ".*").replace("$instance", ".*")
    assert "$" not in query
    return query


@pytest.mark.parametrize("names", BOTH)
def test_panels_have_their_own_numbers_and_places(names: Names) -> None:
    found = dashboard(names)["panels"]
    assert len({panel["id"] for panel in found}) == len(found)
    for panel in found:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24 and place["h"] > 0
    for one, other in combinations((panel["gridPos"] for panel in found), 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_below


@pytest.mark.parametrize("names", BOTH)
def test_the_data_source_is_a_variable_everywhere(names: Names) -> None:
    made = dashboard(names)
    variables = {variable["name"]: variable for variable in made["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables.keys() == {"datasource", "model", "instance"}
    users = [*panels(names), *made["annotations"]["list"], *(variables[name] for name in ("model", "instance"))]
    users += [target for panel in panels(names) for target in panel["targets"]]
    assert {user["datasource"]["uid"] for user in users} == {"${datasource}"}


@pytest.mark.parametrize("names", BOTH)
def test_targets_have_letters_and_legends(names: Names) -> None:
    for panel in panels(names):
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == list("ABC"[: len(letters)])
        assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
        if panel["type"] == "timeseries":
            assert all(target["legendFormat"] for target in panel["targets"])
        for target in panel["targets"]:
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            kept = re.search(r"by \(([\w, ]+)\)", target["expr"])
            assert shown <= (set(kept.group(1).split(", ")) if kept else set())


def test_quantiles_are_over_all_servers_and_shares_over_rates() -> None:
    lines = {panel.title: panel.lines for section in SECTIONS for panel in section.panels}
    where = '{model_name=~"$model", instance=~"$instance"}'
    assert expression(lines["Time to first token"][1]) == (
        "histogram_quantile(0.95, sum by (le) "
        f"(rate(headrace:time_to_first_token_seconds_bucket{where}[$__rate_interval])))"
    )
    assert expression(lines["Prefix cache hits, share of prompt tokens"][0], "vllm") == (
        f"sum(rate(vllm:prefix_cache_hits_total{where}[$__rate_interval])) / "
        f"sum(rate(vllm:prefix_cache_queries_total{where}[$__rate_interval]))"
    )
    finished = lines["Finished requests/s, by reason"][0]
    assert expression(finished, "vllm").startswith("sum by (finished_reason) (rate(vllm:request_success_total{")


def test_what_vllm_does_not_have_is_left_out() -> None:
    assert omitted("headrace") == []
    assert {"GPU power", "Engines up"} <= set(omitted("vllm"))
    assert not set(omitted("vllm")) & {panel["title"] for panel in panels("vllm")}
    assert "GPU" not in {panel["title"] for panel in dashboard("vllm")["panels"]}  # nor an empty section


def test_the_file_in_the_repository_is_up_to_date() -> None:
    assert json.loads(COMMITTED.read_text(encoding="utf-8")) == dashboard(), "run `make tables`"
