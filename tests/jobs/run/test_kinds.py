"""Whole jobs from one file format to another."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from headrace.engine.start import Engine
from headrace.errors import JobError
from headrace.jobs.input.template import LineTemplate
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec
from headrace.jobs.status import report as report_module
from headrace.jobs.status.report import JobReport, Tally
from headrace.jobs.store.clean import clean
from headrace.jobs.store.job_view import find_job, view_job

Start = Callable[..., Engine]
WriteLines = Callable[..., Path]


def run(source: object, output: object, start: Start, **options: Any) -> JobReport:
    options = {"defaults": {"max_tokens": 3}, "template": LineTemplate.of(prompt="Say {text}"), **options}
    return run_job(JobSpec(input=str(source), output=str(output), **options), start=start, quiet=True)


def never(*arguments: Any, **options: Any) -> Engine:
    raise AssertionError("the model was loaded")


def test_a_csv_is_answered_into_a_parquet_file(tmp_path: Path, start: Start) -> None:
    (tmp_path / "in.csv").write_text('id,text\n1,"a,\nb"\n2,c\nbad\n')
    report = run(tmp_path / "in.csv", tmp_path / "out.parquet", start)
    assert (report.tally.num_answered, dict(report.tally.errors)) == (2, {"invalid_row": 1})
    rows = sorted(pq.read_table(tmp_path / "out.parquet").to_pylist(), key=lambda row: row["index"])
    assert [row["id"] for row in rows] == ["1", "2", None]
    assert [row["usage"]["prompt_tokens"] for row in rows[:2]] == [len("Say a,\nb"), len("Say c")]
    assert rows[2]["error"]["message"] == "line 3: 1 cell, the header has 2"


def test_parquet_to_csv_and_to_compressed_lines(tmp_path: Path, start: Start) -> None:
    pq.write_table(pa.table({"text": ["a", "b"], "score": [1.5, None]}), tmp_path / "in.parquet")
    run(tmp_path / "in.parquet", tmp_path / "out.csv", start)
    with (tmp_path / "out.csv").open(newline="") as file:
        assert sorted(row["score"] for row in csv.DictReader(file)) == ["", "1.5"]
    run(tmp_path / "in.parquet", tmp_path / "out.jsonl.gz", start)
    lines = gzip.decompress((tmp_path / "out.jsonl.gz").read_bytes()).splitlines()
    assert {json.loads(line)["score"] for line in lines} == {1.5, None}


def test_a_table_may_hold_requests(tmp_path: Path, start: Start) -> None:
    (tmp_path / "in.csv").write_text("prompt,max_tokens,id\nHello,2,007\n")
    run(tmp_path / "in.csv", tmp_path / "out.jsonl", start, template=None)
    (line,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert line["usage"]["completion_tokens"] == 2 and line["id"] == "007"


def test_cells_of_refused_parameters_are_read_as_json(tmp_path: Path, start: Start) -> None:
    (tmp_path / "in.csv").write_text("prompt,priority,echo,cache_salt\na,0,false,\nb,1,,\nc,,,tenant\n")
    report = run(tmp_path / "in.csv", tmp_path / "out.jsonl", start, template=None)
    assert (report.tally.num_answered, dict(report.tally.errors)) == (2, {"unsupported_parameter": 1})


def test_a_table_without_a_prompt_names_the_flags(tmp_path: Path, start: Start) -> None:
    (tmp_path / "in.csv").write_text("id,text\n1,a\n")
    with pytest.raises(JobError, match=r"but id, text; give the prompt with --prompt"):
        run(tmp_path / "in.csv", tmp_path / "out.jsonl", start, template=None)


def test_a_job_from_a_store_to_a_store(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the journal is kept there
    with fsspec.open("memory://kinds/in.jsonl", "wb") as file:
        file.write(b'{"text": "a"}\n{"text": "b"}\n')
    run("memory://kinds/in.jsonl", "memory://kinds/out.jsonl", start)
    with fsspec.open("memory://kinds/out.jsonl", "rb") as file:
        assert sorted(json.loads(line)["input"]["text"] for line in file) == ["a", "b"]
    (directory,) = tmp_path.iterdir()
    assert run("memory://kinds/in.jsonl", "memory://kinds/out.jsonl", never).num_before == 2
    clean(directory)
    with pytest.raises(JobError, match="exists"):
        run("memory://kinds/in.jsonl", "memory://kinds/out.jsonl", never)
    fsspec.filesystem("memory").rm("/kinds", recursive=True)
    with pytest.raises(JobError, match=r"the input .* does not exist"):
        run("memory://kinds/in.jsonl", "memory://kinds/out.jsonl", start)


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.csv.gz", "in.jsonl.zst"])
def test_every_line_of_a_truncated_input_that_can_be_read_is_answered(tmp_path: Path, start: Start, name: str) -> None:
    header, line = ("text\n", "%d\n") if ".csv" in name else ("", '{"text": "%d"}\n')
    text = (header + "".join(line % (number * 7919 % 10007) for number in range(2000))).encode()
    half = len(text) // 2
    if name.endswith(".gz"):
        data = gzip.compress(text)
        data = data[: len(data) // 2]
        readable = zlib.decompressobj(31).decompress(data)
    else:  # a second frame that is cut off in its header
        data = zstandard.compress(text[:half]) + zstandard.compress(text[half:])[:5]
        readable = text[:half]
    (tmp_path / name).write_bytes(data)
    output = tmp_path / "out.jsonl"
    with pytest.raises(JobError, match="is truncated"):
        run(tmp_path / name, output, start)
    found = view_job(find_job(str(output)))
    assert (found.state, found.committed.num_done) == ("stopped", readable.count(b"\n") - header.count("\n"))
    assert found.committed.num_done > 900
    assert not output.exists()


# --max-error-rate


def mixed(num_good: int, num_bad: int) -> list[Any]:
    return [{"text": "a"}] * num_good + ["{broken"] * num_bad


def test_a_job_stops_when_too_many_lines_are_errors(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*["{broken"] * 3000)
    output = source.parent / "out.jsonl"
    with pytest.raises(JobError, match=r"1,000 of the first 1,000 lines are errors, more than --max-error-rate 0.1"):
        run(source, output, start)
    found = view_job(find_job(str(output)))
    assert (found.state, found.committed.num_done, output.exists()) == ("stopped", 1000, False)
    report = run(source, output, start, max_error_rate=1)
    assert (report.num_before, report.tally.num_failed) == (1000, 2000)
    assert len(output.read_text().splitlines()) == 3000


def test_a_few_errors_and_a_short_file_do_not_stop_a_job(write_lines: WriteLines, start: Start) -> None:
    for lines in (mixed(1200, 120), mixed(0, 999)):
        source = write_lines(*lines)
        assert run(source, source.parent / "out.jsonl", start, overwrite=True).tally.num_done == len(lines)


def test_errors_found_while_reading_ahead_are_compared_with_all_lines_read(
    write_lines: WriteLines, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch is read as a whole before any of its lines is answered."""
    monkeypatch.setattr(report_module, "MIN_LINES_TO_JUDGE", 10)
    lines = [{"text": str(index)} for index in range(200)] + ["{broken"] * 12
    source = write_lines(*lines)
    tally = run(source, source.parent / "out.jsonl", start).tally
    assert (tally.num_answered, tally.num_failed) == (200, 12)


def test_errors_found_before_the_thousandth_line_count_too(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*["{broken"] * 400, *[{"text": "a"}] * 1600)
    with pytest.raises(JobError, match=r"400 of the first 1,0\d\d lines are errors"):
        run(source, source.parent / "out.jsonl", start)


def test_lines_that_fail_in_the_engine_are_compared_with_those_that_were_started() -> None:
    tally = Tally(num_answered=880, num_read=200_000)
    tally.errors["engine_error"] = 120
    tally.refuse_too_many_errors(0.1, num_in_flight=200)  # 120 of 1,200
    with pytest.raises(JobError, match="120 of the first 1,199 lines that were started are errors"):
        tally.refuse_too_many_errors(0.1, num_in_flight=199)
    tally.num_bad = 120  # they were never started
    tally.refuse_too_many_errors(0.1, num_in_flight=199)
