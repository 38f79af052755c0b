from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.jobs.formats import SourceIdentity, identity, open_source, what_changed

LINES = b"".join(json.dumps({"prompt": f"row {i}"}).encode() + b"\n" for i in range(200))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "CHUNK_BYTES", 1000)


def identify(path: Path | str) -> SourceIdentity:
    with closing(open_source(str(path))) as source:
        known = source.identity()
    assert known is not None
    return known


def change(path: Path | str, known: SourceIdentity) -> str | None:
    with closing(open_source(str(path))) as source:
        return what_changed(source, known)


@pytest.mark.parametrize("name", ["in.jsonl", "in.csv"])
def test_an_unchanged_file_and_one_with_added_lines_are_the_same_source(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(LINES)
    known = identify(path)
    assert change(path, known) is None
    path.write_bytes(LINES + b'{"prompt": "more"}\n' * 300)
    assert change(path, known) is None


@pytest.mark.parametrize("place", [0, 999, 1000, len(LINES) - 2])
def test_an_edited_line_is_found_and_its_place_is_reported(tmp_path: Path, place: int) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(LINES)
    known = identify(path)
    for added in (b"", b"more\n"):
        path.write_bytes(LINES[:place] + b"#" + LINES[place + 1 :] + added)
        begin = place // 1000 * 1000
        assert f"has changed between byte {begin:,} and byte" in (change(path, known) or "")


def test_a_shorter_file_is_another_source(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(LINES)
    known = identify(path)
    path.write_bytes(LINES[:-18])
    assert "bytes and has" in (change(path, known) or "")


@pytest.mark.parametrize(("added", "is_legal"), [(b"more", False), (b"\nmore\n", True), (b"\r\nmore", True)])
def test_a_last_line_without_a_line_break_must_not_grow(tmp_path: Path, added: bytes, is_legal: bool) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(LINES[:-1])
    known = identify(path)
    path.write_bytes(LINES[:-1] + added)
    assert (change(path, known) is None) == is_legal


def test_a_parquet_file_cannot_grow(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["a"] * 100}), path)
    known = identify(path)
    assert change(path, known) is None
    pq.write_table(pa.table({"prompt": ["a"] * 101}), path)
    assert change(path, known) is not None


def test_a_stream_has_no_identity() -> None:
    assert open_source("-").identity() is None
    assert "cannot be read again" in (what_changed(open_source("-"), SourceIdentity(0, 0, ())) or "")


def test_an_object_is_identified_by_its_store() -> None:
    url = "memory://identity/in.jsonl"
    with fsspec.open(url, "wb") as file:
        file.write(LINES)
    known = identify(url)
    assert change(url, known) is None
    with fsspec.open(url, "wb") as file:
        file.write(LINES.replace(b"row 7", b"row 8"))
    assert change(url, known) is not None
    fsspec.filesystem("memory").rm("/identity", recursive=True)
