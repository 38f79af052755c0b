"""What a sweep keeps on disk, and reuses."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.engines.base import EngineFailure
from headrace.bench.record import read_records, write_record
from headrace.bench.sweep import SweepResult, run_sweep
from headrace.bench.sweep.journal import Journal, JournalError
from headrace.bench.workloads import WorkloadSpec, build
from tests.bench.sweeps import FakeEngine, run, sweep

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
