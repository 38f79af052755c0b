"""The grid of settings that `headrace tune` is compared with: what it measures, how it continues, how it judges."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from benchmarks import tune_grid
from benchmarks.tune_grid import WORKLOADS, Grid, JudgeError, Lane, confirmed, judged, visits, workload_of

from headrace.bench.engines import Engine, EngineFailure, OfflineRun, RunningEngine, SettingInForce
from headrace.bench.sweep.journal import Journal
from headrace.bench.workloads import Workload, build
from headrace.cli.bench.flags import add_workload_flags, workload_spec_of
from headrace.cli.parser import CommandParser
from headrace.config import EngineConfig
from headrace.engine.fake_settings import fake_settings
from headrace.engine.in_force import settings_in_force

SMALL = WORKLOADS["short-prompts"]
FACTS: dict[str, Any] = {
    "commit": "abc",
    "versions": {"headrace": "1"},
    "machine": {"cpu": "a CPU", "num_cores": 2},
    "cores": {"num_cores": 2, "allowed": [0, 1], "num_of_machine": 8, "num_beside": 3},
}


class FakeRunning(RunningEngine):
    name = "fake"
    start_s: float | None = 2.0
    model_name = "m"

    def __init__(self, owner: FakeEngine, settings: Mapping[str, Any]) -> None:
        self.owner = owner
        self.settings = dict(settings)
        self.is_stopped = False

    def settings_in_force(self) -> dict[str, SettingInForce]:
        config = EngineConfig(**self.settings)
        names = ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "enable_chunked_prefill")
        given = {name: value for name in names if (value := getattr(config, name)) is not None}
        return settings_in_force(fake_settings(**{"max_num_seqs": 128, "max_num_batched_tokens": 512, **given}), config)

    def versions(self) -> dict[str, str]:
        return {}

    def reconfigure(self, settings: Mapping[str, Any]) -> bool:
        self.owner.check(settings)
        self.settings = dict(settings)
        return True

    def run_offline(self, workload: Workload) -> OfflineRun:
        lens = [request.output_len for request in workload.requests]
        self.owner.runs.append((self.settings.get("max_num_seqs"), len(lens)))
        seconds = self.owner.seconds(self.settings)
        return OfflineRun(seconds, lens, [request.num_prompt_tokens or 1 for request in workload.requests])

    def reset_prefix_cache(self) -> bool:
        return True

    def stop(self) -> None:
        self.is_stopped = True


class FakeEngine(Engine):
    name = "fake"

    def __init__(self, seconds: Callable[[Mapping[str, Any]], float] = lambda settings: 1.0) -> None:
        self.seconds = seconds
        self.runs: list[tuple[int | None, int]] = []
        self.started: list[FakeRunning] = []

    def start(self, settings: Mapping[str, Any], *, serves: bool) -> RunningEngine:
        self.check(settings)
        self.started.append(FakeRunning(self, settings))
        return self.started[-1]

    def check(self, settings: Mapping[str, Any]) -> None:
        if settings.get("max_num_seqs") == 16:
            raise EngineFailure("bad_setting", "no 16")


def small_workload() -> Workload:
    return workload_of(SMALL, 49_152)


def measured(
    tmp_path: Path, engine: FakeEngine, *, num_configs: int = 60, num_rounds: int = 2, max_seconds: float | None = None
) -> dict[str, Any]:
    configs = SMALL.configs()[:num_configs]
    with Journal(tmp_path / "grid.journal") as journal:
        grid = Grid(SMALL, small_workload(), journal, facts=FACTS)
        lane = Lane(engine, small_workload(), SMALL.common)
        grid.run(lane, configs, num_rounds, max_seconds=max_seconds)
        lane.stop()
        return grid.record(configs, num_rounds, {"name": "m"})


@pytest.mark.parametrize("name", WORKLOADS)
def test_each_grid_has_at_least_forty_valid_configs_and_the_default(name: str) -> None:
    grid = WORKLOADS[name]
    configs = grid.configs()
    assert 40 <= len(configs) <= 61
    assert configs[0].settings == {}
    assert len({config.hash for config in configs}) == len(configs)
    for config in configs[1:]:
        EngineConfig(**grid.common, **config.settings)
        assert config.settings["max_num_batched_tokens"] >= config.settings["max_num_seqs"]
        if not config.settings.get("enable_chunked_prefill", True):
            assert config.settings["max_num_batched_tokens"] >= grid.common["max_model_len"]


@pytest.mark.parametrize("name", WORKLOADS)
def test_requests_fit_into_the_context(name: str) -> None:
    grid = WORKLOADS[name]
    workload = workload_of(grid, 49_152)
    assert workload.facts["longest_request"] <= grid.common["max_model_len"]


@pytest.mark.parametrize("name", WORKLOADS)
def test_flags_give_the_same_workload(name: str) -> None:
    """What `headrace tune` is given in order to see the workload of the grid."""
    grid = WORKLOADS[name]
    parser = CommandParser(prog="bench")
    add_workload_flags(parser)
    own = grid.flags[: grid.flags.index("--max-model-len")]
    spec = workload_spec_of(parser.parse_args(own), "smollm2").for_vocabulary(49_152)
    assert build(spec).spec.hash == workload_of(grid, 49_152).spec.hash


def test_rounds_go_forwards_and_backwards() -> None:
    assert list(visits(3, 2)) == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 1), (1, 0)]


def test_a_grid_is_measured_with_one_engine_and_keeps_everything(tmp_path: Path) -> None:
    engine = FakeEngine(lambda settings: 100 / settings.get("max_num_seqs", 128))
    record = measured(tmp_path, engine, num_rounds=3)
    assert len(engine.started) == 1 and engine.started[0].is_stopped
    assert record["is_complete"] and record["num_rounds"] == 3
    assert record["num_starts"] == 1 and record["wall_s"] > 0
    first = record["configs"][0]
    assert first["settings"].get("max_num_seqs", 128) == 128 and record["best"] == first["name"]
    assert [each["round"] for each in first["rounds"]] == [0, 1, 2]
    assert first["effective"]["max_num_seqs"] == 128 and first["effective"]["max_model_len"] == 512
    failed = [row for row in record["configs"] if row["settings"].get("max_num_seqs") == 16]
    assert failed and all(row["failure"]["kind"] == "bad_setting" and not row["rounds"] for row in failed)
    order = [each["config"] for each in record["order"] if each["round"] == 1]
    assert order == [each["config"] for each in record["order"] if each["round"] == 2][::-1]
    assert record["cores"]["num_beside"] == 3 and record["workload"]["hash"] and record["commit"] == "abc"


def test_a_grid_continues_where_it_was(tmp_path: Path) -> None:
    stopped = measured(tmp_path, FakeEngine(), num_configs=4, max_seconds=-1.0)
    assert not stopped["is_complete"] and stopped["order"] == []
    one = measured(tmp_path, FakeEngine(), num_configs=4, num_rounds=1)
    engine = FakeEngine()
    both = measured(tmp_path, engine, num_configs=4, num_rounds=2)
    assert both["is_complete"]
    assert both["order"][:4] == one["order"] and len(both["order"]) == 8
    assert sum(count == len(small_workload().requests) for _, count in engine.runs) == 4 + 1  # and one to warm up
    assert both["wall_s"] > one["wall_s"]


def test_rounds_of_another_commit_are_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(tmp_path, FakeEngine(), num_configs=2, num_rounds=1)
    monkeypatch.setitem(FACTS, "commit", "def")
    assert len(measured(tmp_path, FakeEngine(), num_configs=2, num_rounds=1)["order"]) == 2


def test_an_engine_that_fails_is_started_again(tmp_path: Path) -> None:
    def seconds(settings: Mapping[str, Any]) -> float:
        if settings.get("max_num_seqs") == 32:
            raise EngineFailure("crash", "dead")
        return 1.0

    engine = FakeEngine(seconds)
    record = measured(tmp_path, engine, num_rounds=1)
    assert len(engine.started) > 1 and all(each.is_stopped for each in engine.started)
    assert {row["failure"]["kind"] for row in record["configs"] if row["failure"]} == {"crash", "bad_setting"}
    assert record["is_complete"]


# --- judging ----------------------------------------------------------------------------------------------------


def tune_record(settings: dict[str, Any], effective: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "workload": {"hash": small_workload().spec.hash},
        "machine": FACTS["machine"],
        "commit": "abc",
        "spent_s": 30.0,
        "common_settings": {"model": "smollm2", **SMALL.common},
        "decision": {"chosen": "tuned", "verdict": "tuned"},
        "configs": [{"name": "default", "settings": {}}, {"name": "tuned", "settings": settings}],
        "settings_in_force": {name: {"value": value, "source": "given"} for name, value in effective.items()},
        **changes,
    }


@pytest.fixture
def grid(tmp_path: Path) -> dict[str, Any]:
    """128 sequences are best, 64 are 2 % slower and 32 are half as fast."""
    rates = {128: 100.0, 64: 98.0, 32: 50.0, 8: 20.0}
    record = measured(tmp_path, FakeEngine(lambda settings: 100 / rates[settings.get("max_num_seqs", 128)]))
    return {**record, "wall_s": 300.0}


def effective_of(grid: dict[str, Any], num_seqs: int) -> tuple[dict[str, Any], dict[str, Any]]:
    row = next(row for row in grid["configs"] if row["settings"].get("max_num_seqs") == num_seqs)
    return row["settings"], row["effective"]


def test_the_choice_is_found_by_its_effective_settings(grid: dict[str, Any]) -> None:
    found = judged(tune_record(*effective_of(grid, 64)), grid)
    assert found["ratio_to_best"]["value"] == pytest.approx(0.98)
    assert found["in_grid"].startswith("max_num_seqs=64")
    assert (found["is_near"], found["is_cheap"], found["cost_share"]) == (True, True, 0.1)
    assert found["remarks"] == []
    slow = judged(tune_record(*effective_of(grid, 32), spent_s=90.0), grid)
    assert (slow["is_near"], slow["is_cheap"]) == (False, False)
    assert "0.500 [0.500, 0.500] of the best, at 30.0% of the cost" in tune_grid.shown_judgment(slow)


def test_a_choice_that_the_grid_does_not_have_must_be_measured(grid: dict[str, Any]) -> None:
    _, effective = effective_of(grid, 64)
    found = judged(tune_record({"max_num_seqs": 48}, effective | {"max_num_seqs": 48}), grid)
    assert found["ratio_to_best"] is None and found["is_near"] is None
    assert found["remarks"] == ["the grid does not have tune's choice: --confirm measures both"]


def test_another_workload_is_refused_and_another_machine_is_named(grid: dict[str, Any]) -> None:
    settings, effective = effective_of(grid, 64)
    with pytest.raises(JudgeError, match=r"tune it with --workload random --num-requests 48"):
        judged(tune_record(settings, effective, workload={"hash": "other"}), grid)
    other = tune_record(settings, effective, machine={"cpu": "another CPU", "num_cores": 2}, commit="def")
    assert [text.split(":")[0] for text in judged(other, grid)["remarks"]] == ["other machines", "other commits"]


def test_choice_and_best_are_measured_again_in_turn(grid: dict[str, Any]) -> None:
    judgment = judged(tune_record({"max_num_seqs": 48}, {}), grid)
    engine = FakeEngine(lambda settings: 1.25 if settings.get("max_num_seqs") == 48 else 1.0)
    found = confirmed(Lane(engine, small_workload(), SMALL.common), judgment, grid, 3, commit="abc")
    whole = [num_seqs for num_seqs, count in engine.runs if count == len(small_workload().requests)]
    assert [num_seqs == 48 for num_seqs in whole[1:]] == [False, True, True, False, False, True]
    assert found["ratio_to_best"]["value"] == pytest.approx(0.8) and not found["is_near"]


def test_judgments_of_all_workloads_are_in_one_file(grid: dict[str, Any], tmp_path: Path) -> None:
    paths = []
    for name, record in (("tune", tune_record(*effective_of(grid, 64))), ("grid", grid)):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(tune_grid.dumped(record))
    summary = tmp_path / "summary.json"
    summary.write_text(json.dumps({"workloads": {"other": {}}}))
    tune_grid.judge(Namespace(judge=paths, confirm=False, summary=summary))
    assert json.loads(summary.read_text())["workloads"].keys() == {"other", "short-prompts"}


def test_records_are_written_with_one_line_for_each_config() -> None:
    record = {"a": 1, "configs": [{"b": [1, 2]}, {"c": None}], "empty": []}
    text = tune_grid.dumped(record)
    assert json.loads(text) == record
    assert text.splitlines()[2:5] == [' "configs": [', '  {"b": [1, 2]},', '  {"c": null}']
