"""Reports of sweeps and of batch sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.bench.engines.base import EngineFailure
from headrace.bench.report.batching import batching_report, batching_rows
from headrace.bench.report.document import Report, Table, text_of
from headrace.bench.report.markdown import markdown
from headrace.bench.report.page import page
from headrace.bench.report.sweep import best_settings, sweep_report
from headrace.bench.sweep import run_sweep
from tests.bench.records import level, offline_record, online_record, outcomes
from tests.bench.sweeps import FakeEngine, sweep


def section(report: Report, title: str) -> Any:
    return next(each for each in report.sections if each.title.startswith(title))


def record(path: Path, *settings: dict[str, Any], **options: Any) -> dict[str, Any]:
    return run_sweep(sweep(*settings, **options), path / "sweep.journal").as_record()


def test_a_sweep_shows_the_best_with_its_launch_command_and_settings_file(tmp_path: Path) -> None:
    found = record(
        tmp_path, {"max_num_seqs": 8}, {"name": "wide", "max_num_seqs": 64}, common={"seed": 0}, num_rounds=3
    )
    report = sweep_report(found)
    assert report.headline.startswith("Best: wide, 641 (output tokens/s).")
    codes = [part.text for part in section(report, "The best: wide").parts]
    assert codes == ["fake serve --seed 0 --max_num_seqs 64", "seed = 0\nmax_num_seqs = 64\n"]
    assert best_settings(found) == (".toml", "seed = 0\nmax_num_seqs = 64\n")


def test_failures_are_rows_with_their_class_and_the_end_of_the_log(tmp_path: Path) -> None:
    report = sweep_report(record(tmp_path, {"max_num_seqs": 8}, {"max_num_seqs": 0}, {"block_size": 7}))
    html = page(report)
    assert "failed: bad_setting" in html and "at least 1, got 0" in html
    assert "End of the log: block_size=7" in html and "Segmentation fault" in html
    ranking = next(part for part in section(report, "Ranking").parts if isinstance(part, Table))
    assert [text_of(row[0]) for row in ranking.rows] == ["max_num_seqs=8", "max_num_seqs=0", "block_size=7"]


def test_settings_are_shown_as_given(tmp_path: Path) -> None:
    report = sweep_report(record(tmp_path, {"max_num_seqs": 0}, {"enable_chunked_prefill": False}))
    (table,) = section(report, "Settings").parts
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["max_num_seqs=0"] == ["", "0"] and rows["enable_chunked_prefill=false"] == ["false", ""]


def test_hostile_names_and_logs_of_a_sweep_stay_text(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.start_error = EngineFailure("crash", "<script>1</script>", "<script>2</script>")
    found = record(tmp_path, {"name": "<script>3</script>", "max_num_seqs": 8}, engine=engine)
    assert "<script" not in page(sweep_report(found))
    assert "\\<script\\>3" in markdown(sweep_report(found))


def test_one_round_is_no_proof(tmp_path: Path) -> None:
    report = sweep_report(record(tmp_path, {"max_num_seqs": 8}, {"max_num_seqs": 9}))
    assert "One round each" in report.headline
    assert "no interval: one round" in page(report)


def test_a_tie_is_said(tmp_path: Path) -> None:
    report = sweep_report(record(tmp_path, {"max_num_seqs": 8}, {"max_num_seqs": 8}, num_rounds=3))
    assert report.headline.endswith("One other config is not shown to differ from it.")


def test_an_interrupted_sweep_says_how_to_go_on(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.interrupt_at = 4
    report = sweep_report(record(tmp_path, {"max_num_seqs": 8}, {"max_num_seqs": 9}, engine=engine))
    assert "the same command continues" in report.warnings[0]
    assert "not run" in page(report)


def test_a_sweep_in_which_all_fail_has_a_page(tmp_path: Path) -> None:
    report = sweep_report(record(tmp_path, {"max_num_seqs": 0}))
    assert report.headline == "None of 1 configs could be ranked."
    page(report)


def test_latencies_are_drawn_against_throughput(tmp_path: Path) -> None:
    def measure(engine: Any, workload: Any) -> dict[str, Any]:
        return online_record([level(4, outcomes(engine.settings["max_num_seqs"] * 10))])

    found = record(tmp_path, {"max_num_seqs": 8}, {"max_num_seqs": 16}, measure=measure)
    assert "TTFT p95 against throughput" in page(sweep_report(found))


def batch(size: int, rate: float, policy: str = "max_utilization") -> dict[str, Any]:
    record = offline_record((rate,))
    settings = {"max_num_seqs": {"value": size}, "capacity_policy": {"value": policy}}
    return record | {"engine": record["engine"] | {"settings": settings}}


def test_batch_sizes_are_compared_with_batch_1_and_with_static_batching() -> None:
    report = batching_report([batch(64, 3000), batch(1, 100), batch(64, 1500, "static_batch")])
    assert (
        report.headline
        == "Batch 64 gives 30.00x the tokens/s of batch 1, and 2.00x those of static batching at the same size."
    )
    table = next(part for part in report.sections[0].parts if isinstance(part, Table))
    assert [row[:5] for row in table.rows] == [
        ["1", "one at a time", "100", "1.00x", ""],
        ["64", "static batching", "1,500", "15.00x", ""],
        ["64", "continuous batching", "3,000", "30.00x", "2.00x"],
    ]
    page(report)


def test_levels_of_an_online_record_are_batch_sizes() -> None:
    rows = batching_rows([online_record([level(1, outcomes(20)), level(16, outcomes(200))])])
    assert [row.batch_size for row in rows] == [1, 16]
    assert rows[0].tpot_ms == pytest.approx(10, rel=0.2)


def test_rows_of_different_workloads_are_warned_about() -> None:
    other = batch(16, 900) | {"workload": {"name": "decode", "hash": "ffff"}}
    assert batching_report([batch(1, 100), other]).warnings == [
        "rows are not of the same workload: 0123456789abcdef, ffff"
    ]
    page(batching_report([]))
