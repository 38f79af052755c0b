"""Load levels: their names, and the figures that count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.bench.levels import basis_of, figures_of, load_label, rows_of, steady_rows
from headrace.bench.record import write_record
from tests.bench.records import level, online_record, outcomes


@pytest.mark.parametrize(
    "load, label",
    [
        ({"kind": "closed_loop", "concurrency": 1024}, "1,024 concurrent"),
        ({"kind": "open_loop", "rate": 8.0, "burstiness": 1.0}, "8.00 requests/s (Poisson)"),
        (
            {"kind": "open_loop", "rate": 8.0, "burstiness": 0.25, "max_concurrency": 64},
            "8.00 requests/s (burstiness 0.25), at most 64 concurrent",
        ),
        ({"kind": "open_loop", "rate": 8.0, "burstiness": "inf"}, "8.00 requests/s (constant)"),
        ({"kind": "open_loop", "rate": "inf"}, "all at once"),
        ({"kind": "trace", "speed": 2.0}, "trace, 2 times as fast"),
        ({"kind": "trace", "speed": 1.0}, "trace"),
        (None, "the whole load"),
    ],
)
def test_a_load_is_named_by_what_was_sent(load: Any, label: str) -> None:
    assert load_label(load) == label


def test_figures_are_of_the_steady_window_or_of_the_whole_run_with_the_reason() -> None:
    rows = outcomes()
    steady, whole = level(4, rows), level(4, rows, steady=None)
    assert figures_of(steady)["seconds"] == 15.0 and figures_of(whole)["seconds"] == 20.0
    assert basis_of(whole).startswith("whole run: ")
    assert figures_of({}) == {}


def test_rows_of_the_steady_window_ended_within_it() -> None:
    rows = outcomes()
    kept = steady_rows(level(4, rows), rows)
    assert 0 < len(kept) < len(rows)
    assert len(kept) == figures_of(level(4, rows))["num_requests"]
    assert steady_rows(level(4, rows, steady=None), rows) == rows


def test_rows_are_found_beside_the_record(tmp_path: Path) -> None:
    rows = outcomes(10)
    record = online_record([level(4, rows)])
    assert rows_of(record, tmp_path) == [None]
    write_record(record, tmp_path / "record.json", [rows])
    (found,) = rows_of(record, tmp_path)
    assert found is not None and len(found) == 10
    record["levels"] = [record["levels"][0], level(8, rows)]
    first, second = rows_of(record, tmp_path)
    assert first is not None and second is None
