"""Inputs of every kind, and the errors of bad ones."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from headrace.errors import ConfigError, JobError
from headrace.jobs.formats import open_source, reader
from headrace.jobs.formats.file_format import format_of
from headrace.jobs.formats.line_index import Bitmap
from headrace.jobs.formats.reader import InputLine

ROWS = [{"id": i, "text": f"row {i}"} for i in range(300)]
JSONL = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def write_jsonl(path: Path) -> None:
    path.write_bytes(JSONL)


def write_gz(path: Path) -> None:
    half = len(JSONL) // 2  # two members, split within a line
    path.write_bytes(gzip.compress(JSONL[:half]) + gzip.compress(JSONL[half:]))


def write_zst(path: Path) -> None:
    half, pack = len(JSONL) // 2, zstandard.ZstdCompressor().compress
    path.write_bytes(pack(JSONL[:half]) + pack(JSONL[half:]))


def write_csv(path: Path) -> None:
    path.write_text("id,text\n" + "".join(f"{row['id']},{row['text']}\n" for row in ROWS))


def write_tsv(path: Path) -> None:
    path.write_text("id\ttext\n" + "".join(f"{row['id']}\t{row['text']}\n" for row in ROWS))


def write_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=70)


KINDS: dict[str, Callable[[Path], None]] = {
    "in.jsonl": write_jsonl,
    "in.jsonl.gz": write_gz,
    "in.jsonl.zst": write_zst,
    "in.csv": write_csv,
    "in.tsv": write_tsv,
    "in.parquet": write_parquet,
}


@pytest.fixture(params=KINDS)
def any_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / request.param
    KINDS[request.param](path)
    return path


def read(path: Path | str, **options: Any) -> list[InputLine]:
    with closing(open_source(str(path), json_columns=["id"])) as source:
        return [line for batch in source.read_batches(**options) for line in batch]


def rows(lines: list[InputLine]) -> list[Any]:
    return [json.loads(line.data) for line in lines]


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_every_format_gives_the_same_lines(any_file: Path) -> None:
    lines = read(any_file)
    assert [line.index for line in lines] == list(range(300))
    assert rows(lines) == ROWS


def test_reading_can_start_anywhere_and_skip_lines(any_file: Path) -> None:
    assert [line.index for line in read(any_file, start=140, limit=3)] == [140, 141, 142]
    done = Bitmap(range(0, 300, 2))
    assert [line.index for line in read(any_file, limit=9, skip=done.__contains__)] == [1, 3, 5, 7]
    assert read(any_file, start=300) == []


def test_a_source_can_be_read_twice(any_file: Path) -> None:
    with closing(open_source(str(any_file))) as source:
        first = [line for batch in source.read_batches() for line in batch]
        assert [line for batch in source.read_batches() for line in batch] == first
        assert source.estimate_num_lines() in (300, None)


def test_a_line_of_a_hundred_megabytes_is_marked_and_truncated(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        file.write(b"first\n")
        for _ in range(100):
            file.write(b"x" * 1_000_000)
        file.write(b"\nlast\n")
    lines = read(path)
    assert [(line.number, line.is_too_long) for line in lines] == [(1, False), (2, True), (3, False)]
    assert len(lines[1].data) <= reader.MAX_LINE_BYTES
    assert (lines[2].data, lines[2].offset) == (b"last", 100_000_007)


# Compression.


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.jsonl.zst"])
def test_a_truncated_file_is_an_error_after_its_complete_lines_were_read(tmp_path: Path, name: str) -> None:
    data = b"".join(os.urandom(500).hex().encode() + b"\n" for _ in range(2000))
    packed = gzip.compress(data) if name.endswith("gz") else zstandard.ZstdCompressor().compress(data)
    path = write(tmp_path / name, packed[: len(packed) // 2])
    batches: list[list[InputLine]] = []
    with closing(open_source(str(path))) as source, pytest.raises(JobError, match="is truncated"):
        batches.extend(source.read_batches())
    lines = [line for batch in batches for line in batch]
    assert len(lines) > 100
    assert [line.data for line in lines] == data.split(b"\n")[: len(lines)]


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.jsonl.zst"])
def test_a_file_that_is_compressed_by_name_only_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(JobError, match="cannot be decompressed past byte 0"):
        read(write(tmp_path / name, b'{"prompt": "a"}\n'))


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.jsonl.zst", "in.jsonl", "in.csv"])
def test_an_empty_file_has_no_lines(tmp_path: Path, name: str) -> None:
    assert read(write(tmp_path / name, b"")) == []


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, library in [("in.jsonl.zst", "zstandard"), ("in.parquet", "pyarrow")]:
        KINDS[name](tmp_path / name)
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(JobError, match=rf"{library}: pip install 'headrace\[files\]'"):
            read(tmp_path / name)


# CSV.


def test_quotes_line_breaks_and_delimiters_within_cells(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbfa,b\r\n"x, ""y""",1\r\n\r\n"two\nlines",2\r\nlast,3'
    lines = read(write(tmp_path / "in.csv", data))
    assert rows(lines) == [{"a": 'x, "y"', "b": "1"}, {"a": "two\nlines", "b": "2"}, {"a": "last", "b": "3"}]
    assert [line.index for line in lines] == [0, 2, 3]
    assert [data[line.offset :][:4] for line in lines] == [b'"x, ', b'"two', b"last"]


def test_each_bad_row_of_csv_is_its_own_problem(tmp_path: Path) -> None:
    data = b'a,b\n1,2\n1,2,3\n"x"y,2\n\xff,2\n3,4\n"open,5\n6,7\n'
    lines = read(write(tmp_path / "in.csv", data))
    assert [line.problem for line in lines[:5]] == [
        None,
        "3 cells, the header has 2",
        """invalid CSV: ',' expected after '"' in the row that starts in line 4 of the file""",
        "invalid UTF-8",
        None,
    ]
    assert len(lines) == 6 and lines[5].problem == (
        "invalid CSV: a quote in the row that starts in line 7 of the file is not closed"
    )


@pytest.mark.parametrize(
    ("header", "reason"), [(b"a,,b\n1,2,3\n", "column 2 .* has no name"), (b"a,b,a\n", "two columns named 'a'")]
)
def test_a_header_with_missing_or_repeated_names_is_refused(tmp_path: Path, header: bytes, reason: str) -> None:
    with pytest.raises(JobError, match=reason):
        read(write(tmp_path / "in.csv", header))


def test_cells_of_parameters_are_read_as_json(tmp_path: Path) -> None:
    path = write(tmp_path / "in.csv", b'prompt,max_tokens,stop\n7,8,"[""x""]"\na,,y\n')
    with closing(open_source(str(path), json_columns=["max_tokens", "stop"])) as source:
        lines = [line for batch in source.read_batches() for line in batch]
    assert rows(lines) == [
        {"prompt": "7", "max_tokens": 8, "stop": ["x"]},
        {"prompt": "a", "max_tokens": None, "stop": "y"},
    ]


def test_a_too_long_line_of_csv_affects_only_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_LINE_BYTES", 30)
    lines = read(write(tmp_path / "in.csv", b"a,b\n1,2\n" + b"x" * 50 + b",3\n4,5\n"))
    assert [line.problem is None for line in lines] == [True, False, True]


def test_the_rows_of_a_slow_pipe_are_not_delayed() -> None:
    receiver, sender = os.pipe()
    with os.fdopen(sender, "wb", buffering=0) as target:
        target.write(b"a,b\n1,2\n3,")
        with closing(open_source(f"/dev/fd/{receiver}", format="csv")) as source:
            batches = source.read_batches()
            assert rows(next(batches)) == [{"a": "1", "b": "2"}]
            target.write(b"4\n5,6\n7,8\n")
            assert [row["a"] for row in rows(next(batches))] == ["3", "5", "7"]
    os.close(receiver)


# Parquet.


def test_nested_columns_become_nested_json(tmp_path: Path) -> None:
    from datetime import UTC, datetime
    from decimal import Decimal

    row = {
        "messages": [{"role": "user", "content": "Hi"}],
        "meta": {"tags": ["a", "b"], "score": None},
        "when": datetime(2026, 1, 2, tzinfo=UTC),
        "price": Decimal("1.50"),
        "raw": b"ab",
        "nan": float("nan"),
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "in.parquet")
    (line,) = rows(read(tmp_path / "in.parquet"))
    assert line == {
        **row,
        "when": "2026-01-02T00:00:00Z",
        "price": "1.50",
        "raw": "YWI=",
        "nan": None,
    }


def test_times_that_python_does_not_have_become_text(tmp_path: Path) -> None:
    second, nano = 10**9, 1_700_000_000 * 10**9 + 1
    columns = {
        "at": pa.array([nano, nano - 1, None], pa.timestamp("ns")),
        "zoned": pa.array([nano, nano, None], pa.timestamp("ns", "UTC")),
        "clock": pa.array([1, second, None], pa.time64("ns")),
        "took": pa.array([-second - 1, 1, None], pa.duration("ns")),
        "far": pa.array([4 * 10**11, 0, None], pa.timestamp("s")),
        "nested": pa.array([[{"at": nano}], [], None], pa.list_(pa.struct([("at", pa.timestamp("ns"))]))),
        "prompt": pa.array(["a", "b", "c"]),
    }
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    first, second_row, third = (json.loads(line.data) for line in read(tmp_path / "in.parquet"))
    assert first == {
        "at": "2023-11-14T22:13:20.000000001",
        "zoned": "2023-11-14T22:13:20.000000001Z",
        "clock": "00:00:00.000000001",
        "took": "-PT1.000000001S",
        "far": "14645-06-30T15:06:40.000",
        "nested": [{"at": "2023-11-14T22:13:20.000000001"}],
        "prompt": "a",
    }
    assert (second_row["at"], second_row["clock"], second_row["prompt"]) == ("2023-11-14T22:13:20", "00:00:01", "b")
    assert third == {**dict.fromkeys(columns), "prompt": "c"}


def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="not a readable Parquet file"):
        read(write(tmp_path / "in.parquet", b"PAR1 but no more"))
    with pytest.raises(JobError, match="can only be read from a file"):
        open_source("-", format="parquet")
    with pytest.raises(ConfigError, match="compressed inside"):
        open_source("in.parquet.gz")


# Names and stores.


@pytest.mark.parametrize("name", ["x.xlsx", "x.XLSX", "dir.csv/x.jsonl.bz2", "x.feather", "x.xml.gz", "s3://b/x.zip"])
def test_the_name_of_another_format_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"\.\w+ is not supported; known are jsonl, .* name it with --input-format"):
        format_of(name)
    assert str(format_of(name, "csv")) == "csv"


@pytest.mark.parametrize("name", ["answers", "answers.txt", "answers.v2", "/dev/null", "-", "x.log.gz"])
def test_other_names_are_json_lines(name: str) -> None:
    assert format_of(name).kind == "jsonl"


def test_the_format_can_be_given(tmp_path: Path) -> None:
    path = write(tmp_path / "data.txt", b"a,b\n1,2\n")
    with closing(open_source(str(path), format="csv")) as source:
        assert source.columns == ("a", "b")
    with pytest.raises(ConfigError, match="unknown format 'cvs', did you mean 'csv'"):
        open_source(str(path), format="cvs")


@pytest.fixture
def store() -> Iterator[str]:
    files = fsspec.filesystem("memory")
    yield "memory://jobs"
    files.rm("/jobs", recursive=True)


def test_every_format_can_be_read_from_a_store(any_file: Path, store: str) -> None:
    url = f"{store}/{any_file.name}"
    with fsspec.open(url, "wb") as file:
        file.write(any_file.read_bytes())
    assert rows(read(url)) == ROWS
    assert [line.index for line in read(url, start=290)] == list(range(290, 300))


def test_an_unknown_store_names_the_missing_library() -> None:
    with pytest.raises(JobError, match="pip install s3fs"):
        open_source("s3://bucket/in.jsonl")
    with pytest.raises(JobError, match="fsspec does not know nowhere://"):
        open_source("nowhere://bucket/in.jsonl")
