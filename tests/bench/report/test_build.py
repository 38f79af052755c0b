"""The report of a record is chosen by its kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.bench.record import RecordError, read_records, write_record
from headrace.bench.report.build import build_report
from headrace.bench.report.page import page
from tests.bench.records import base_record, level, offline_record, online_record, outcomes


def test_a_record_read_from_disk_has_its_report(tmp_path: Path) -> None:
    rows = outcomes(50)
    write_record(offline_record(), tmp_path / "offline.json")
    write_record(online_record([level(4, rows)]), tmp_path / "online.json", [rows])
    offline, online = read_records([tmp_path])
    assert build_report(offline).title == "Offline benchmark: chat on headrace 0.1.0"
    assert "Distribution of time to first token" in page(build_report(online, tmp_path))
    assert "Distribution of time to first token" not in page(build_report(online))


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(RecordError, match="no report for a record of kind 'dance'"):
        build_report(base_record("dance"))
