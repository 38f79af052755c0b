from __future__ import annotations

import gzip
import json
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from headrace.errors import ConfigError
from headrace.profile.picture import page
from headrace.profile.report import Overhead, report_of
from headrace.profile.trace import read_profile
from tests.profile.builders import kernel, ranged, record_of, step, trace_of


def two_steps():  # type: ignore[no-untyped-def]
    trace = trace_of(
        kernel("nvjet_a", 0, 400),
        kernel("_decode", 400, 300),
        kernel("nvjet_a", 1000, 400),
        kernel("_decode", 1400, 600),
    )
    return record_of([step(0), step(1, at=0.001)]), trace


def test_the_rows_add_up_to_the_window() -> None:
    report = report_of(*two_steps())
    assert report.num_steps == 2
    assert sum(row.ms_per_step for row in report.rows) == pytest.approx(report.step_ms) == pytest.approx(1.0)
    assert sum(row.share for row in report.rows) == pytest.approx(1.0)
    shares = {row.part: row.share for row in report.rows}
    assert shares == pytest.approx({"gemm": 0.4, "decode_attention": 0.45, "host_gaps": 0.15, "unattributed": 0.0})
    assert report.busy_share == pytest.approx(0.85)


def test_each_part_is_held_against_its_ceiling() -> None:
    report = report_of(*two_steps())
    attention = next(row for row in report.rows if row.part == "decode_attention")
    assert attention.ceiling_ms == pytest.approx(1e3 * 800 * 256 / 1e12)
    assert attention.of_ceiling == pytest.approx(attention.ceiling_ms / 0.45)
    assert attention.gb_s == pytest.approx(2 * 800 * 256 / 900e-6 / 1e9)


def test_the_table_and_the_json_show_every_row() -> None:
    overhead = Overhead((100.0, 98.0), (101.0, 103.0))
    report = report_of(*two_steps(), overhead=overhead, commands={"nsys": "nsys profile headrace"})
    table = report.table()
    for text in ("GEMMs", "attention, decode", "host gaps", "unattributed", "overhead:", "device busy 85.0%"):
        assert text in table
    found = json.loads(msgspec.json.encode(report.as_json()))
    assert found["parts"]["gemm"]["limit"] == "bandwidth"
    assert found["overhead"]["share"] == pytest.approx(102 / 99 - 1, abs=1e-4)
    assert found["commands"] == {"nsys": "nsys profile headrace"}


def test_a_trace_of_another_engine_has_shares_but_no_ceilings() -> None:
    _, trace = two_steps()
    report = report_of(None, trace)
    assert all(row.ceiling_ms is None for row in report.rows)
    assert any("without the record" in note for note in report.notes)


def test_an_empty_window_is_said_to_be_empty() -> None:
    report = report_of(record_of([]), trace_of())
    assert any("no step" in note for note in report.notes)
    assert report.num_steps == 0 and "unattributed" in report.table()
    page(report)


def test_the_page_is_self_contained_and_its_drawings_are_well_formed() -> None:
    report = report_of(*two_steps(), commands={"nsys": "nsys <x>"})
    html = page(report)
    assert "http" not in html and "<script" not in html
    drawings = html.split("<svg")[1:]
    assert len(drawings) >= 3
    for drawing in drawings:
        ElementTree.fromstring("<svg" + drawing.partition("</svg>")[0] + "</svg>")
    assert "nsys &lt;x&gt;" in html


def test_a_record_is_read_with_the_trace_beside_it(tmp_path: Path) -> None:
    events = [{"ph": "X", "cat": "kernel", "name": "_norm", "ts": 1.5, "dur": 2, "pid": 0, "tid": 7, "args": {"a": 1}}]
    events.append({"ph": "M", "name": "process_name", "ts": 0, "pid": "Spans", "tid": "x", "args": {}})
    trace = {"schemaVersion": 1, "baseTimeNanoseconds": 5, "traceEvents": events}
    (tmp_path / "a.trace.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))
    record = msgspec.json.encode(record_of([step()], trace="a.trace.json.gz"))
    (tmp_path / "a.profile.json").write_bytes(record)
    for name in ("a.profile.json", "a.trace.json.gz"):
        found, events_found = read_profile(tmp_path / name)
        assert found is not None and found.model_name == "tiny"
        assert events_found is not None and [event.name for event in events_found.events] == ["_norm"]
        assert events_found.base_ns == 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "neither a trace nor a record"),
        (b'{"traceEvents": [3]}', "not a trace"),
        (b"\x1f\x8babc", "not complete"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_profile(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profile(tmp_path / "none.json")


def test_sampling_ranges_of_a_cpu_are_reported() -> None:
    report = report_of(
        record_of([step()], device="cpu"),
        trace_of(ranged("headrace.execute", 0, 100), ranged("headrace.sample", 10, 40)),
    )
    assert {row.part: row.share for row in report.rows} == pytest.approx({"sampling": 0.4, "unattributed": 0.6})
