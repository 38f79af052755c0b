"""Outputs of every kind: what was appended is read back."""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.parquet as pq
import pytest
import zstandard

from headrace.errors import JobError
from headrace.jobs.formats import open_sink, table_sinks
from headrace.jobs.formats.object_store import SegmentSink

ANSWER = {
    "index": 0,
    "id": 7,
    "tags": ["a", "b"],
    "meta": {"x": 1},
    "text": 'two\nlines, "quoted"',
    "finish_reason": "stop",
    "usage": {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    },
}
ERROR = {"index": 1, "line": 2, "id": 8, "error": {"code": "invalid_json", "message": "line 2: no", "param": None}}


@pytest.fixture
def store() -> Iterator[str]:
    files = fsspec.filesystem("memory")
    yield "memory://out"
    if files.exists("/out"):
        files.rm("/out", recursive=True)


def write(path: Path | str, *rows: dict[str, Any], **options: Any) -> None:
    with open_sink(str(path), **options) as sink:
        for row in rows:
            sink.append(json.dumps(row).encode())
            sink.flush()
    assert sink.num_written == len(rows)


def objects(data: bytes) -> list[Any]:
    return [json.loads(line) for line in data.splitlines()]


def unzstd(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()


UNPACK = {"jsonl": bytes, "jsonl.gz": gzip.decompress, "jsonl.zst": unzstd}


@pytest.mark.parametrize("ending", UNPACK)
def test_lines_are_read_back(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"out.{ending}"
    write(path, ANSWER, ERROR)
    assert objects(UNPACK[ending](path.read_bytes())) == [ANSWER, ERROR]


@pytest.mark.parametrize("ending", UNPACK)
def test_lines_in_a_store_are_read_back_and_parts_are_removed(store: str, ending: str) -> None:
    url = f"{store}/out.{ending}"
    with SegmentSink(url, compression=ending[6:] or None, segment_bytes=1) as sink:  # type: ignore[arg-type]
        for row in (ANSWER, ERROR):
            sink.append(json.dumps(row).encode())
            sink.flush()
    with fsspec.open(url, "rb") as file:
        assert objects(UNPACK[ending](file.read())) == [ANSWER, ERROR]
    assert fsspec.filesystem("memory").ls("/out", detail=False) == [f"/out/out.{ending}"]


def test_gzip_has_no_timestamp(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl.gz", ANSWER)
    assert (tmp_path / "a.jsonl.gz").read_bytes()[4:8] == bytes(4)


def test_an_output_that_exists_is_kept(tmp_path: Path, store: str) -> None:
    for place in (tmp_path, store):
        for name in ("o.jsonl", "o.jsonl.gz", "o.csv", "o.parquet"):
            write(f"{place}/{name}", ANSWER)
            with pytest.raises(JobError, match=r"exists"):
                open_sink(f"{place}/{name}")
            write(f"{place}/{name}", ERROR, overwrite=True)


# Tables.


def test_a_csv_has_a_cell_for_each_field(tmp_path: Path) -> None:
    write(tmp_path / "out.csv", ANSWER, ERROR)
    with (tmp_path / "out.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["index"], first["id"], first["text"]) == ("0", "7", ANSWER["text"])
    assert json.loads(first["usage"]) == ANSWER["usage"]
    assert (first["error"], second["text"]) == ("", "")
    assert json.loads(second["error"])["code"] == "invalid_json"


@pytest.mark.parametrize("text", ["a\rb", "\r", "a\r\nb", "\n", '"\r"', ","])
def test_a_csv_cell_keeps_its_line_breaks(tmp_path: Path, text: str) -> None:
    write(tmp_path / "out.csv", {"index": 0, "text": text}, {"index": 1, "text": "next"})
    with (tmp_path / "out.csv").open(newline="") as file:
        assert [(row["index"], row["text"]) for row in csv.DictReader(file)] == [("0", text), ("1", "next")]


def test_a_tsv_is_separated_by_tabs(tmp_path: Path) -> None:
    write(tmp_path / "out.tsv.gz", {"index": 0, "text": "a"})
    assert gzip.decompress((tmp_path / "out.tsv.gz").read_bytes()) == b"index\ttext\tline\terror\textra\n0\ta\t\t\t\n"


def test_parquet_has_types(tmp_path: Path) -> None:
    write(tmp_path / "out.parquet", ANSWER, ERROR)
    table = pq.read_table(tmp_path / "out.parquet")
    first, second = table.to_pylist()
    assert {name: first[name] for name in ("index", "id", "tags", "text", "usage")} == {
        name: ANSWER[name] for name in ("index", "id", "tags", "text", "usage")
    }
    assert json.loads(first["meta"]) == {"x": 1}
    assert second["error"] == ERROR["error"] and second["line"] == 2
    assert [first["extra"], second["extra"]] == [None, None]
    assert str(table.schema.field("index").type) == "int64"


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_late_values_that_do_not_fit_are_kept_as_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(table_sinks, "GROUP_ROWS", 2)
    path = tmp_path / f"out.{ending}"
    late = {"index": 2, "id": "text now", "new": [1]}
    write(path, {"index": 0, "id": 1}, {"index": 1, "id": 2}, late, {"index": 3, "id": 4, "extra": 5})
    if ending == "csv":
        with path.open(newline="") as file:
            read = list(csv.DictReader(file))
        assert json.loads(read[2]["extra"]) == {"new": [1]}
    else:
        read = pq.read_table(path).to_pylist()
        assert json.loads(read[2]["extra"]) == {"id": "text now", "new": [1]}
        assert [row["id"] for row in read] == [1, 2, None, 4]
    assert json.loads(read[3]["extra"]) == {"extra": 5}


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_without_rows_the_table_is_empty(tmp_path: Path, store: str, name: str) -> None:
    write(tmp_path / name)
    write(f"{store}/{name}")
    if name == "out.parquet":
        assert pq.read_table(tmp_path / name).num_rows == 0


def test_a_table_in_a_store_appears_when_it_is_complete(tmp_path: Path) -> None:
    url = f"local://{tmp_path}/out.parquet"
    sink = open_sink(url)
    sink.append(json.dumps(ANSWER).encode())
    assert not (tmp_path / "out.parquet").exists()
    sink.close()
    with fsspec.open(url, "rb") as file:
        assert pq.read_table(file).num_rows == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
@pytest.mark.parametrize("format", ["jsonl.gz", "jsonl.zst", "csv", "parquet"])
def test_a_full_disk_is_reported(format: str) -> None:
    sink = open_sink("/dev/full", format=format, overwrite=True)
    sink.append(json.dumps({**ANSWER, "text": "x" * 1000}).encode())
    with pytest.raises(JobError, match=r"cannot write to /dev/full: .*No space left"):
        sink.close()


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(JobError, match="pip install"):
        open_sink(str(tmp_path / "out.parquet"))


# Segments.


def segments(url: str, **options: Any) -> SegmentSink:
    return SegmentSink(url, segment_bytes=20, **options)


def test_an_interrupted_output_resumes_from_its_manifest(store: str) -> None:
    url = f"{store}/out.jsonl"
    sink = segments(url)
    for number in range(5):
        sink.append(b'{"index": %d}' % number)
        sink.flush()
    sink.__exit__(RuntimeError, RuntimeError("interrupted"), None)
    files = fsspec.filesystem("memory")
    assert not files.exists(url)
    files.pipe_file("/out/out.jsonl.parts/part-000001-000009.jsonl", b"never committed\n")
    with pytest.raises(JobError, match="5 lines of a job that did not end"):
        segments(url)
    with segments(url, resume=True, epoch=2) as sink:
        assert [json.loads(line)["index"] for line in sink.lines()] == [0, 1, 2, 3, 4]
        assert sink.num_written == 5
        sink.append(b'{"index": 5}')
    with fsspec.open(url, "rb") as file:
        assert [row["index"] for row in objects(file.read())] == [0, 1, 2, 3, 4, 5]


def test_a_damaged_segment_is_found(store: str) -> None:
    url = f"{store}/out.jsonl"
    sink = segments(url)
    sink.append(b'{"index": 0}')
    sink.commit()
    fsspec.filesystem("memory").pipe_file("/out/out.jsonl.parts/part-000001-000000.jsonl", b'{"index": 1}\n')
    with pytest.raises(JobError, match="is damaged"):
        sink.publish()
