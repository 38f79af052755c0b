"""Sweeps with fake engines: failures are rows, false and 0 are values, and an interrupted sweep continues."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.engines.base import EngineFailure, RunningEngine
from headrace.bench.workloads import Workload
from headrace.errors import ConfigError
from tests.bench.records import level, online_record, outcomes
from tests.bench.sweeps import FakeEngine, FakeRunning, measure, run, sweep

# Running.


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


# Ranking.


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
