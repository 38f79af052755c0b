"""Sweeps with fake engines: failures are rows, false and 0 are values, and an interrupted sweep continues."""

from __future__ import annotations

import errno
import json
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.bench.engines.base import Engine, EngineFailure, OfflineRun, RunningEngine, SettingInForce
from headrace.bench.load.null_server import Behaviour, null_server
from headrace.bench.record import read_records, write_record
from headrace.bench.sweep import Sweep, SweepConfig, SweepResult, parse_configs, run_sweep, settings_file
from headrace.bench.sweep.check import check_answer, not_in_force, not_reported
from headrace.bench.sweep.journal import Journal, JournalError
from headrace.bench.workloads import Workload, WorkloadSpec, build
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.other_settings import explanation
from tests.bench.records import level, offline_record, online_record, outcomes

KNOWN = list(EngineConfig.__dataclass_fields__)
WORKLOAD = build(WorkloadSpec(name="random", num_requests=4, input_len=8, output_len=4))


class FakeRunning(RunningEngine):
    name = "fake"
    start_s: float | None = 1.5
    model_name = "tiny"

    def __init__(self, owner: FakeEngine, settings: Mapping[str, Any]) -> None:
        self.owner = owner
        self.settings = dict(settings)

    def settings_in_force(self) -> dict[str, SettingInForce]:
        values = {**self.settings, **self.owner.overridden}
        return {name: SettingInForce(value, "given") for name, value in values.items() if name != "silent"}

    def versions(self) -> dict[str, str]:
        return {"fake": "1.0"}

    def run_offline(self, workload: Workload) -> OfflineRun:
        self.owner.event("answer")
        return OfflineRun(0.1, [0 if self.owner.is_mute else 4] * len(workload.requests), [8] * len(workload.requests))

    def reconfigure(self, settings: Mapping[str, Any]) -> bool:
        if not self.owner.can_reconfigure:
            return False
        self.owner.event("reconfigure")
        self.owner.check(settings)
        self.settings, self.start_s = dict(settings), None
        return True

    def is_alive(self) -> bool:
        return self.settings.get("block_size") != 13

    def log_tail(self) -> str:
        return "the last line of the log"

    def launch_command(self) -> str | None:
        return "fake serve " + " ".join(f"--{name} {value}" for name, value in self.settings.items())

    def stop(self) -> None:
        self.owner.event("stop")
        self.owner.running.discard(self)


class FakeEngine(Engine):
    """Refuses max_num_seqs below 1 as Headrace does, and runs out of memory above 1,000. Counts what happens."""

    name = "fake"

    def __init__(self) -> None:
        self.events: list[str] = []
        self.running: set[RunningEngine] = set()
        self.overridden: dict[str, Any] = {}
        self.start_error: Exception | None = None
        self.is_mute = False
        self.interrupt_at: int | None = None
        self.can_reconfigure = False

    def event(self, name: str) -> None:
        self.events.append(name)
        if self.interrupt_at is not None and len(self.events) > self.interrupt_at:
            self.interrupt_at = None
            raise KeyboardInterrupt

    def start(self, settings: Mapping[str, Any], *, serves: bool) -> RunningEngine:
        self.event("start")
        if self.start_error is not None:
            raise self.start_error
        self.check(settings)
        running = FakeRunning(self, settings)
        self.running.add(running)
        return running

    def check(self, settings: Mapping[str, Any]) -> None:
        value = settings.get("max_num_seqs", 64)
        if value is False or value < 1:
            message = f"max_num_seqs must be an integer of at least 1, got {value!r}"
            raise EngineFailure("bad_setting", message) if self.can_reconfigure else ConfigError(message)
        if value > 1000:
            raise EngineFailure("oom", "needs 90.0 GiB, 80.0 GiB free", "torch.OutOfMemoryError")


def measure(engine: RunningEngine, workload: Workload) -> dict[str, Any]:
    assert isinstance(engine, FakeRunning)
    engine.owner.event("measure")
    num = engine.owner.events.count("measure")
    if engine.settings.get("block_size") == 7:
        raise EngineFailure("crash", "the engine died under load", "Segmentation fault")
    return offline_record((10.0 * engine.settings.get("max_num_seqs", 64) + num % 3,))


def configs(*settings: dict[str, Any]) -> list[SweepConfig]:
    return parse_configs(json.dumps(list(settings)), "configs.json", known=[*KNOWN, "silent"])


def sweep(*settings: dict[str, Any], engine: FakeEngine | None = None, **options: Any) -> Sweep:
    full = {"measure": measure, "serves": False, "workload": WORKLOAD, **options}
    return Sweep(configs=configs(*settings), engine=engine or FakeEngine(), **full)


def run(path: Path, *settings: dict[str, Any], **options: Any) -> SweepResult:
    return run_sweep(sweep(*settings, **options), path / "sweep.journal")


# --- the list ---------------------------------------------------------------------------------------------------


def test_false_and_zero_are_kept_as_given() -> None:
    (config,) = configs({"enable_chunked_prefill": False, "max_num_seqs": 0, "gpu_memory_utilization": 0.0})
    assert (
        json.dumps(config.settings)
        == '{"enable_chunked_prefill": false, "max_num_seqs": 0, "gpu_memory_utilization": 0.0}'
    )
    assert config.name == "enable_chunked_prefill=false, max_num_seqs=0, gpu_memory_utilization=0.0"


def test_false_and_zero_are_different_configs() -> None:
    false, zero, none = configs({"max_num_seqs": False}, {"max_num_seqs": 0}, {"max_num_seqs": None})
    assert len({false.hash, zero.hash, none.hash}) == 3


def test_names_may_have_dashes_and_configs_may_be_an_object() -> None:
    text = '{"small": {"--max-num-seqs": 4}, "plain": {}}'
    small, plain = parse_configs(text, "configs.json", known=KNOWN)
    assert (small.name, small.settings) == ("small", {"max_num_seqs": 4})
    assert (plain.name, plain.settings) == ("plain", {})


def test_unknown_names_of_all_configs_are_reported_at_once_with_suggestions() -> None:
    text = '[{"max_num_seq": 4}, {"name": "b", "enable-chunked-prefil": true, "max_batch_size": 3}]'
    with pytest.raises(ConfigError) as error:
        parse_configs(text, "configs.json", known=KNOWN, explain=explanation)
    lines = str(error.value).splitlines()
    assert lines[0] == "configs.json has 3 errors:"
    assert lines[1] == "  config 1: unknown setting 'max_num_seq', did you mean 'max_num_seqs'?"
    assert lines[2] == "  config 2 (b): unknown setting 'enable-chunked-prefil', did you mean 'enable_chunked_prefill'?"
    assert lines[3] == "  config 2 (b): unknown setting 'max_batch_size': use max_num_seqs"


def test_lists_are_expanded_only_if_asked() -> None:
    text = '[{"name": "a", "max_num_seqs": [64, 128], "block_size": [16, 32], "seed": 0}]'
    with pytest.raises(ConfigError, match="max_num_seqs is a list; --product"):
        parse_configs(text, "configs.json", known=KNOWN)
    found = parse_configs(text, "configs.json", known=KNOWN, is_product=True)
    assert [config.name for config in found] == [
        f"a, max_num_seqs={seqs}, block_size={size}" for seqs in (64, 128) for size in (16, 32)
    ]
    assert all(config.settings["seed"] == 0 for config in found)


def test_equal_configs_have_names_and_hashes_of_their_own() -> None:
    first, second = configs({"max_num_seqs": 4}, {"max_num_seqs": 4})
    assert second.name == "max_num_seqs=4 (2)"
    assert first.hash != second.hash


@pytest.mark.parametrize(
    "text, message",
    [
        ("[", "is not JSON"),
        ("3", "must be a list"),
        ("[]", "has no configs"),
        ("[3]", "entry 1 is 3"),
        ('[{"seed": 1, "seed": 2}]', "'seed' is there twice"),
        ('[{"max-num-seqs": 1, "max_num_seqs": 2}]', "max_num_seqs is set twice"),
        ('[{"name": 3}]', "must be text"),
    ],
)
def test_a_bad_list_is_one_clear_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_configs(text, "configs.json", known=KNOWN)


# --- running ----------------------------------------------------------------------------------------------------


def test_configs_are_ranked_by_output_tokens(tmp_path: Path) -> None:
    result = run(tmp_path, {"max_num_seqs": 8}, {"max_num_seqs": 64}, {"max_num_seqs": 16}, num_rounds=3)
    assert [row.settings["max_num_seqs"] for row in result.rows] == [64, 16, 8]
    assert [row.rank for row in result.rows] == [1, 2, 3]
    best = result.best
    assert best is not None and best.launch_command == "fake serve --max_num_seqs 64"
    assert best.interval is not None and best.interval[0] < best.value < best.interval[1]  # type: ignore[operator]
    assert result.rows[1].ratio == pytest.approx(0.25, abs=0.01)
    assert not result.rows[1].is_tied and result.stopped is None


def test_one_round_has_no_interval(tmp_path: Path) -> None:
    row = run(tmp_path, {"max_num_seqs": 8}).rows[0]
    assert row.interval is None and row.ratio_interval is None and not row.is_tied


def test_the_same_config_twice_is_tied(tmp_path: Path) -> None:
    result = run(tmp_path, {"max_num_seqs": 8}, {"max_num_seqs": 8}, num_rounds=3)
    assert [row.is_tied for row in result.rows] == [True, True]


def test_failures_are_rows_with_their_class_and_log(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        {"max_num_seqs": 0},
        {"max_num_seqs": 2000},
        {"max_num_seqs": 8},
        {"block_size": 7},
        {"block_size": 13},
    )
    assert result.rows[0].status == "ok" and result.rows[0].settings == {"max_num_seqs": 8}
    failures = {row.name: row.failure for row in result.rows[1:]}
    zero, memory = failures["max_num_seqs=0"], failures["max_num_seqs=2000"]
    crash, death = failures["block_size=7"], failures["block_size=13"]
    assert zero is not None and (zero.stage, zero.kind) == ("start", "bad_setting")
    assert "at least 1, got 0" in zero.message
    assert memory is not None and (memory.kind, memory.log_tail) == ("oom", "torch.OutOfMemoryError")
    assert crash is not None and (crash.stage, crash.kind) == ("measurement", "crash")
    assert death is not None and (death.kind, death.log_tail) == ("crash", "the last line of the log")


def test_an_engine_that_can_tell_why_it_died_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = EngineFailure("oom", "killed by signal 9", "Out of memory")
    monkeypatch.setattr(FakeRunning, "failure", lambda self: reason, raising=False)
    (row,) = run(tmp_path, {"block_size": 13}).rows
    assert row.failure is not None
    assert (row.failure.stage, row.failure.kind, row.failure.log_tail) == ("measurement", "oom", "Out of memory")
    assert row.failure.message == "died under load: killed by signal 9"


def test_every_engine_that_started_is_stopped(tmp_path: Path) -> None:
    engine = FakeEngine()
    run(tmp_path, {"block_size": 7}, {"block_size": 13}, {"max_num_seqs": 8}, engine=engine, num_rounds=2)
    assert not engine.running


def test_a_setting_that_is_not_in_force_is_a_failure(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.overridden = {"max_num_seqs": 32}
    result = run(tmp_path, {"max_num_seqs": 64}, {"max_num_seqs": 32}, engine=engine)
    failed = result.rows[1]
    assert failed.failure is not None and failed.failure.kind == "not in force"
    assert "max_num_seqs: asked for 64, in force is 32" in failed.failure.message
    assert result.rows[0].settings == {"max_num_seqs": 32}


def test_an_engine_that_does_not_answer_is_a_failure(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.is_mute = True
    (row,) = run(tmp_path, {}, engine=engine).rows
    assert row.failure is not None and row.failure.stage == "answer"
    assert "no tokens" in row.failure.message
    assert "measure" not in engine.events


def test_a_measurement_without_answers_is_a_failure(tmp_path: Path) -> None:
    def refused(engine: RunningEngine, workload: Workload) -> dict[str, Any]:
        return online_record([level(4, outcomes(0, num_refused=20))])

    (row,) = run(tmp_path, {}, measure=refused).rows
    assert row.failure is not None
    assert (row.failure.kind, row.failure.message) == ("no answers", "no request was answered: 503 queue is full")


def test_an_unexpected_error_of_one_config_does_not_end_the_sweep(tmp_path: Path) -> None:
    def breaks(engine: RunningEngine, workload: Workload) -> dict[str, Any]:
        if engine.settings_in_force()["max_num_seqs"].value == 8:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        return measure(engine, workload)

    result = run(tmp_path, {"max_num_seqs": 8}, {"max_num_seqs": 16}, measure=breaks)
    assert result.rows[0].settings == {"max_num_seqs": 16}
    assert result.rows[1].failure is not None and result.rows[1].failure.kind == "oom"


def test_a_config_that_dies_in_a_later_round_has_no_rank_but_keeps_its_rounds(tmp_path: Path) -> None:
    def dies_later(engine: RunningEngine, workload: Workload) -> dict[str, Any]:
        record = measure(engine, workload)
        if isinstance(engine, FakeRunning) and engine.owner.events.count("measure") == 2:
            raise EngineFailure("crash", "gone")
        return record

    (row,) = run(tmp_path, {"max_num_seqs": 8}, measure=dies_later, num_rounds=3).rows
    assert (row.status, row.rank, len(row.rounds)) == ("failed", None, 1)


def test_interleaved_rounds_alternate_and_go_back(tmp_path: Path) -> None:
    order: list[int] = []

    def noted(engine: RunningEngine, workload: Workload) -> dict[str, Any]:
        order.append(engine.settings_in_force()["max_num_seqs"].value)
        return measure(engine, workload)

    engine = FakeEngine()
    run(
        tmp_path,
        {"max_num_seqs": 1},
        {"max_num_seqs": 2},
        num_rounds=3,
        is_interleaved=True,
        measure=noted,
        engine=engine,
    )
    assert order == [1, 2, 2, 1, 1, 2]
    assert engine.events.count("start") == 6


def test_an_engine_that_can_is_reconfigured_between_interleaved_rounds(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.can_reconfigure = True
    settings = [{"max_num_seqs": count} for count in (8, 0, 16, 2000)]
    result = run(tmp_path, *settings, num_rounds=2, is_interleaved=True, engine=engine)
    assert [(row.settings["max_num_seqs"], row.status) for row in result.rows] == [
        (16, "ok"),
        (8, "ok"),
        (0, "failed"),
        (2000, "failed"),
    ]
    kept = [event for event in engine.events if event != "answer"]
    # 8; 0 is refused, and the engine goes on; 16; 2,000 fails in a fresh start too; then backwards.
    first = ["start", "measure", "reconfigure", "reconfigure", "measure", "reconfigure", "stop", "start"]
    assert kept == [*first, "start", "measure", "reconfigure", "measure", "stop"]
    assert not engine.running
    starts = [each["start_s"] for each in (json.loads(line) for line in lines_of(tmp_path)) if "failure" not in each]
    assert starts == [1.5, None, 1.5, None]
    assert result.rows[0].start_s == 1.5
    assert {row.failure.kind for row in result.rows if row.failure} == {"bad_setting", "oom"}


def lines_of(path: Path) -> list[str]:
    return (path / "sweep.journal").read_text().splitlines()


def test_an_engine_that_dies_is_started_anew_and_not_reconfigured(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.can_reconfigure = True
    result = run(tmp_path, {"block_size": 13}, {"block_size": 16}, num_rounds=2, is_interleaved=True, engine=engine)
    assert [row.status for row in result.rows] == ["ok", "failed"]
    assert engine.events.count("start") == 2 and not engine.running


def test_rounds_one_after_the_other_have_a_start_for_each_config(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.can_reconfigure = True
    run(tmp_path, {"max_num_seqs": 8}, {"max_num_seqs": 16}, num_rounds=2, engine=engine)
    assert engine.events.count("start") == 2 and "reconfigure" not in engine.events


def test_rows_keep_the_counters_of_their_rounds(tmp_path: Path) -> None:
    def counted(engine: RunningEngine, workload: Workload) -> dict[str, Any]:
        record = measure(engine, workload)
        record["rounds"][0]["counters"] = {"num_steps": 7, "num_preemptions": 2, "host_ms_per_step": 0.5}
        return record

    (row,) = run(tmp_path, {"max_num_seqs": 8}, num_rounds=2, measure=counted).as_record()["configs"]
    assert row["counters"] == [{"num_steps": 7.0, "num_preemptions": 2.0, "host_ms_per_step": 0.5}] * 2


def test_counters_of_a_curve_are_those_of_the_ranked_level(tmp_path: Path) -> None:
    low, high = (level(count, outcomes(100 * count), counters={"num_steps": count}) for count in (1, 4))
    result = run(tmp_path, {"max_num_seqs": 8}, measure=lambda *_: online_record([high, low]), rank_by="requests_per_s")
    assert result.as_record()["configs"][0]["counters"] == [{"num_steps": 4.0}]


def test_settings_that_the_engine_does_not_report_are_named(tmp_path: Path) -> None:
    (row,) = run(tmp_path, {"silent": 3, "max_num_seqs": 8}).rows
    assert row.status == "ok" and list(row.not_reported) == ["silent"]


@pytest.mark.parametrize("kind", ["not_installed", "crash", "timeout", "unreachable"])
def test_two_failures_alike_stop_a_sweep_in_which_nothing_works(tmp_path: Path, kind: Any) -> None:
    engine = FakeEngine()
    engine.start_error = EngineFailure(kind, "vllm serve (pid 4711) ended")
    result = run(tmp_path, *({"max_num_seqs": n} for n in range(1, 6)), engine=engine)
    assert engine.events == ["start", "start"]
    assert result.stopped is not None and "failed to start for the same reason" in result.stopped
    assert [row.status for row in result.rows] == ["failed", "failed", "not run", "not run", "not run"]


def test_failures_that_depend_on_the_config_do_not_stop_a_sweep(tmp_path: Path) -> None:
    result = run(tmp_path, {"max_num_seqs": 2000}, {"max_num_seqs": 3000}, {"max_num_seqs": 0}, {"max_num_seqs": 8})
    assert result.stopped is None
    assert result.rows[0].settings == {"max_num_seqs": 8}


def test_two_failures_after_a_success_do_not_stop_a_sweep(tmp_path: Path) -> None:
    class Flaky(FakeEngine):
        def start(self, settings: Mapping[str, Any], *, serves: bool) -> RunningEngine:
            if 1 <= self.events.count("start") <= 2:
                self.event("start")
                raise EngineFailure("crash", "gone")
            return super().start(settings, serves=serves)

    result = run(tmp_path, *({"max_num_seqs": n} for n in range(1, 5)), engine=Flaky())
    assert sorted(row.status for row in result.rows) == ["failed", "failed", "ok", "ok"]


# --- ranking ----------------------------------------------------------------------------------------------------


def by_slowness(engine: RunningEngine, workload: Workload) -> dict[str, Any]:
    """More sequences: more tokens/s, later first tokens."""
    seqs = engine.settings_in_force()["max_num_seqs"].value
    levels = [
        level(load, outcomes(20 * load, ttft_s=0.01 * seqs * load), slo="ttft:p95<400ms", steady=None)
        for load in (1, 4)
    ]
    return online_record(levels)


def test_a_latency_is_ranked_lowest_first_under_the_highest_load(tmp_path: Path) -> None:
    options: dict[str, Any] = {"measure": by_slowness, "rank_by": "ttft_p95"}
    result = run(tmp_path, {"max_num_seqs": 20}, {"max_num_seqs": 2}, **options)
    assert [row.settings["max_num_seqs"] for row in result.rows] == [2, 20]
    assert result.rows[0].level == "4 concurrent"


def test_goodput_is_the_best_level_under_the_slo(tmp_path: Path) -> None:
    options: dict[str, Any] = {"measure": by_slowness, "rank_by": "goodput_requests_per_s"}
    result = run(tmp_path, {"max_num_seqs": 20}, {"max_num_seqs": 2}, **options)
    fast, slow = result.rows
    assert (fast.settings["max_num_seqs"], fast.level) == (2, "4 concurrent")
    assert (slow.settings["max_num_seqs"], slow.level) == (20, "1 concurrent")


def test_a_config_without_the_figure_is_not_ranked(tmp_path: Path) -> None:
    (row,) = run(tmp_path, {}, rank_by="ttft_p95").rows  # an offline record has no latencies
    assert (row.status, row.rank, row.value) == ("ok", None, None)


def test_an_unknown_figure_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'output_tokens_per_s'"):
        sweep({}, rank_by="output_tokens_per_sec")


# --- the journal ------------------------------------------------------------------------------------------------

SETTINGS = ({"max_num_seqs": 8}, {"max_num_seqs": 0}, {"max_num_seqs": 16})


def rows_without_reuse(result: SweepResult) -> list[Any]:
    return [(row.name, row.status, row.rank, len(row.rounds), row.failure) for row in result.rows]


@pytest.mark.parametrize(("is_interleaved", "can_reconfigure"), [(False, False), (True, False), (True, True)])
def test_a_sweep_continues_after_an_interruption_at_every_point(
    tmp_path: Path, is_interleaved: bool, can_reconfigure: bool
) -> None:
    options: dict[str, Any] = {"num_rounds": 2, "is_interleaved": is_interleaved}
    whole = FakeEngine()
    whole.can_reconfigure = can_reconfigure
    expected = run(tmp_path / "whole", *SETTINGS, engine=whole, **options)
    for point in range(len(whole.events)):
        path = tmp_path / str(point)
        engine = FakeEngine()
        engine.can_reconfigure = can_reconfigure
        engine.interrupt_at = point
        first = run(path, *SETTINGS, engine=engine, **options)
        assert first.stopped is not None and "the same command continues" in first.stopped
        assert not engine.running
        second = run(path, *SETTINGS, engine=engine, **options)
        assert second.stopped is None
        assert rows_without_reuse(second) == rows_without_reuse(expected)
        lines = [json.loads(line) for line in (path / "sweep.journal").read_text().splitlines()]
        keys = [(line["config_hash"], line["round"]) for line in lines]
        assert len(keys) == len(set(keys)) == 5  # two configs of two rounds, and one failure
        # At most the round that was interrupted is measured again.
        assert engine.events.count("measure") <= whole.events.count("measure") + 1


def test_what_is_in_the_journal_is_not_run_again(tmp_path: Path) -> None:
    run(tmp_path, *SETTINGS, num_rounds=2)
    engine = FakeEngine()
    said: list[str] = []
    result = run_sweep(sweep(*SETTINGS, num_rounds=2, engine=engine), tmp_path / "sweep.journal", said.append)
    assert engine.events == []
    assert [row.num_reused for row in result.rows] == [2, 2, 0]
    assert said[0].startswith("4 of 6 rounds and 1 failed configs are in") and "--retry-failed" in said[0]


def test_a_changed_list_reuses_what_is_equal(tmp_path: Path) -> None:
    run(tmp_path, {"max_num_seqs": 8}, {"max_num_seqs": 16})
    engine = FakeEngine()
    result = run(tmp_path, {"name": "renamed", "max_num_seqs": 16}, {"max_num_seqs": 32}, engine=engine)
    assert engine.events.count("measure") == 1
    assert [(row.name, row.num_reused) for row in result.rows] == [("max_num_seqs=32", 0), ("renamed", 1)]


def test_more_rounds_add_to_those_that_are_there(tmp_path: Path) -> None:
    run(tmp_path, {"max_num_seqs": 8}, num_rounds=1)
    engine = FakeEngine()
    (row,) = run(tmp_path, {"max_num_seqs": 8}, num_rounds=3, engine=engine).rows
    assert engine.events.count("measure") == 2 and len(row.rounds) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"workload": build(WorkloadSpec(name="random", num_requests=5, input_len=8, output_len=4))},
        {"identity": {"model": "another digest"}},
        {"common": {"seed": 1}},
    ],
    ids=["workload", "model", "common settings"],
)
def test_rounds_of_something_else_are_not_reused(tmp_path: Path, change: dict[str, Any]) -> None:
    run(tmp_path, {"max_num_seqs": 8})
    engine = FakeEngine()
    run(tmp_path, {"max_num_seqs": 8}, engine=engine, **change)
    assert engine.events.count("measure") == 1


def test_failed_configs_are_run_again_if_asked(tmp_path: Path) -> None:
    run(tmp_path, *SETTINGS)
    engine = FakeEngine()
    run(tmp_path, *SETTINGS, engine=engine, retries_failed=True)
    assert engine.events == ["start"]  # of the one that failed


def test_an_engine_that_was_not_installed_is_tried_again(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.start_error = EngineFailure("not_installed", "vllm is not installed")
    run(tmp_path, {"max_num_seqs": 8}, engine=engine)
    (row,) = run(tmp_path, {"max_num_seqs": 8}).rows
    assert row.status == "ok"


def test_a_line_that_was_cut_off_is_removed(tmp_path: Path) -> None:
    run(tmp_path, {"max_num_seqs": 8}, {"max_num_seqs": 16})
    path = tmp_path / "sweep.journal"
    whole = path.read_bytes()
    for cut in (1, 30, len(whole.splitlines()[1])):
        path.write_bytes(whole[:-cut])
        engine = FakeEngine()
        result = run(tmp_path, {"max_num_seqs": 8}, {"max_num_seqs": 16}, engine=engine)
        assert engine.events.count("measure") == 1
        assert [row.status for row in result.rows] == ["ok", "ok"]
        assert len(path.read_bytes().splitlines()) == 2


def test_a_damaged_journal_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "sweep.journal"
    path.write_text("not a journal\n")
    with pytest.raises(JournalError, match="line 1"):
        run(tmp_path, {})
    assert path.read_text() == "not a journal\n"


def test_two_sweeps_do_not_share_a_journal(tmp_path: Path) -> None:
    with Journal(tmp_path / "sweep.journal"), pytest.raises(JournalError, match="another sweep"):
        run(tmp_path, {})


def test_a_full_disk_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., int] = os.pwrite
    calls = 0

    def full_later(file: int, data: bytes, place: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            return real(file, data, place)
        if calls == 2:
            return real(file, data[:20], place)  # a part of the line still fits
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full_later)
    engine = FakeEngine()
    result = run(tmp_path, {"max_num_seqs": 8}, {"max_num_seqs": 16}, {"max_num_seqs": 32}, engine=engine)
    assert result.stopped is not None and "No space left on device" in result.stopped
    assert "1 of 3 rounds are kept" in result.stopped
    assert [row.status for row in result.rows] == [
        "ok",
        "ok",
        "not run",
    ]  # the second is in the report, though not on disk
    assert not engine.running
    assert (tmp_path / "sweep.journal").read_bytes().count(b"\n") == 1
    monkeypatch.undo()
    assert [row.status for row in run(tmp_path, *({"max_num_seqs": n} for n in (8, 16, 32))).rows] == ["ok"] * 3


def test_the_result_is_a_record(tmp_path: Path) -> None:
    result = run(tmp_path, *SETTINGS, num_rounds=2)
    write_record(result.as_record(), tmp_path / "sweep.json")
    (record,) = read_records([tmp_path / "sweep.json"])
    assert record["kind"] == "sweep" and record["best"]["name"] == "max_num_seqs=16"
    assert [row["status"] for row in record["configs"]] == ["ok", "ok", "failed"]
    assert record["configs"][2]["settings"] == {"max_num_seqs": 0}


# --- checks and files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked, used, is_same",
    [
        (False, False, True),
        (False, 0, False),
        (0, False, False),
        (0, 0, True),
        (0, 64, False),
        (0.9, 0.9000000001, True),
        (None, 64, True),
        ("auto", "bfloat16", True),
        ("bfloat16", "torch.bfloat16", True),
        ("fp8", "fp8_e4m3", True),
        ("fp8", "auto", False),
        (64, "64", False),
    ],
)
def test_a_setting_is_in_force_only_with_the_value_that_was_asked_for(asked: Any, used: Any, is_same: bool) -> None:
    assert (not_in_force({"x": asked}, {"x": SettingInForce(used, "reported")}) == []) == is_same


def test_a_setting_that_is_not_reported_is_neither_right_nor_wrong() -> None:
    assert not_in_force({"x": 1}, {}) == []
    assert not_reported({"x": 1, "y": None}, {}) == ["x"]


def test_the_first_request_is_sent_to_an_engine_with_an_address() -> None:
    engine = FakeRunning(FakeEngine(), {})
    with null_server() as server:
        engine.address = server.address
        check_answer(engine, WORKLOAD)
    with pytest.raises(EngineFailure, match="did not answer the first request"):
        check_answer(engine, WORKLOAD)
    with null_server(Behaviour(refused_share=1.0)) as server:
        engine.address = server.address
        with pytest.raises(EngineFailure, match="its first request was refused"):
            check_answer(engine, WORKLOAD)


def test_a_settings_file_keeps_false_and_zero() -> None:
    settings = {"max_num_seqs": 0, "enable_chunked_prefill": False, "dtype": 'a "b"\n', "max_model_len": None, "x": 0.5}
    suffix, text = settings_file("headrace", settings)
    assert suffix == ".toml"
    assert tomllib.loads(text) == {name: value for name, value in settings.items() if value is not None}
    assert "# max_model_len: automatic" in text


def test_a_settings_file_of_vllm_turns_switches_off_by_their_opposite() -> None:
    suffix, text = settings_file(
        "vllm", {"enable_chunked_prefill": False, "enable_prefix_caching": True, "max_num_seqs": 0}
    )
    assert suffix == ".yaml"
    assert yaml.safe_load(text) == {
        "no-enable-chunked-prefill": True,
        "enable-prefix-caching": True,
        "max-num-seqs": 0,
    }
