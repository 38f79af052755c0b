from __future__ import annotations

import os
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest

from headrace.jobs.formats import jsonl, open_source, reader
from headrace.jobs.formats.reader import BATCH_LINES, InputLine, read_batches


def read(path: Path, limit: int | None = None) -> list[InputLine]:
    with path.open("rb", buffering=0) as source:
        return [line for batch in read_batches(source, limit=limit) for line in batch]


def write(directory: Path, data: bytes) -> Path:
    path = directory / "in.jsonl"
    path.write_bytes(data)
    return path


def test_a_line_has_its_index_and_offset(tmp_path: Path) -> None:
    data = b'{"a":1}\n{"b":2}\n{"c":3}'
    lines = read(write(tmp_path, data))
    assert [(line.index, line.number) for line in lines] == [(0, 1), (1, 2), (2, 3)]
    assert [data[line.offset : line.offset + len(line.data)] for line in lines] == [line.data for line in lines]


def test_blank_lines_are_left_out_and_still_counted(tmp_path: Path) -> None:
    lines = read(write(tmp_path, b"\n  \n{1}\n\t\n{2}\n\n"))
    assert [(line.number, line.data) for line in lines] == [(3, b"{1}"), (5, b"{2}")]


def test_a_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path: Path) -> None:
    lines = read(write(tmp_path, b"\xef\xbb\xbf{1}\r\n{2}\r\n"))
    assert [line.data for line in lines] == [b"{1}", b"{2}"]
    assert [line.offset for line in lines] == [0, 8]


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 7, 1000])
def test_the_size_of_a_chunk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    path = write(tmp_path, b"\xef\xbb\xbfone\r\n\ntwo\nthree\n\nfour")
    expected = read(path)
    monkeypatch.setattr(reader, "CHUNK_BYTES", chunk_bytes)
    assert read(path) == expected
    assert [line.data for line in expected] == [b"one", b"two", b"three", b"four"]


def test_a_limit_counts_lines_that_are_not_blank(tmp_path: Path) -> None:
    assert [line.number for line in read(write(tmp_path, b"\n1\n\n2\n3\n"), limit=2)] == [2, 4]


def test_a_too_long_line_is_marked_and_the_next_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_LINE_BYTES", 10)
    monkeypatch.setattr(reader, "CHUNK_BYTES", 4)
    data = b"short\n" + b"x" * 50 + b"\nlast\n"
    lines = read(write(tmp_path, data))
    assert [line.is_too_long for line in lines] == [False, True, False]
    assert len(lines[1].data) <= 10
    assert lines[2].data == b"last"
    assert lines[2].offset == data.index(b"last")


def test_batches_are_bounded(tmp_path: Path) -> None:
    path = write(tmp_path, b"1\n" * (3 * BATCH_LINES + 1))
    with path.open("rb", buffering=0) as source:
        assert [len(batch) for batch in read_batches(source)] == [BATCH_LINES] * 3 + [1]


def test_the_lines_of_a_slow_pipe_are_not_delayed() -> None:
    receiver, sender = os.pipe()
    with os.fdopen(receiver, "rb", buffering=0) as source, os.fdopen(sender, "wb", buffering=0) as target:
        batches = read_batches(source)
        target.write(b"first\nsec")
        assert [line.data for line in next(batches)] == [b"first"]
        target.write(b"ond\n")
        assert [line.data for line in next(batches)] == [b"second"]


def test_a_large_file_is_never_in_memory(tmp_path: Path) -> None:
    line = b'{"prompt": "' + b"x" * 2000 + b'"}\n'
    path = write(tmp_path, line * 10_000)
    tracemalloc.start()
    try:
        with path.open("rb", buffering=0) as source:
            num_lines = sum(len(batch) for batch in read_batches(source))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_lines == 10_000
    assert peak < path.stat().st_size / 10


def test_the_number_of_lines_is_exact_for_a_small_file_and_close_for_a_large_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, b"12345\n\n" * 1000)
    with closing(open_source(str(path))) as source:
        assert source.estimate_num_lines() == 1000
        monkeypatch.setattr(jsonl, "ESTIMATE_BYTES", 700)
        monkeypatch.setattr(reader, "CHUNK_BYTES", 700)
        assert source.estimate_num_lines() == pytest.approx(1000, rel=0.01)
    assert open_source("-").estimate_num_lines() is None
