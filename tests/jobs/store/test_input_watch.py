"""Inputs that change while they are read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import JobError
from headrace.jobs.formats import open_source
from headrace.jobs.formats.reader import BATCH_LINES, InputLine
from headrace.jobs.store import input_watch
from headrace.jobs.store.input_watch import InputWatch

LINE = b'{"prompt": "a"}\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two batches. Their time is in the past: a time stamp does not distinguish changes within a few milliseconds."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(LINE * 2 * BATCH_LINES)
    os.utime(path, (1, 1))
    return path


def read_and_change(path: Path, change: Callable[[Path], Any]) -> Iterator[list[InputLine]]:
    """Yields the first batch, changes the input, and reads on."""
    source = open_source(str(path))
    watch = InputWatch(source)
    try:
        watch.begin(source.identity())
        batches = watch.checked(source.read_batches())
        yield next(batches)
        change(path)
        yield from batches
    finally:
        watch.close()
        source.close()


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(LINE.replace(b"a", b"b"))


def replace_file(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(LINE.replace(b"a", b"b") * 2 * BATCH_LINES)
    os.replace(other, path)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(LINE)


def rewrite_longer(path: Path) -> None:
    path.write_bytes(LINE.replace(b"a", b"b") * 3 * BATCH_LINES)


def overwrite_and_remove(path: Path) -> None:
    overwrite(path)
    path.unlink()


@pytest.mark.parametrize(
    "change",
    [lambda path: os.truncate(path, 100), overwrite, replace_file, rewrite_longer, overwrite_and_remove],
    ids=["truncated", "overwritten", "replaced", "rewritten longer", "overwritten, then removed"],
)
def test_no_batch_is_used_that_was_read_after_a_change(path: Path, change: Callable[[Path], Any]) -> None:
    batches = read_and_change(path, change)
    assert len(next(batches)) == BATCH_LINES
    with pytest.raises(JobError, match="the input has changed while the job was running"):
        next(batches)


@pytest.mark.parametrize("change", [Path.unlink, os.utime, append], ids=["removed", "touched", "appended"])
def test_an_input_with_the_same_lines_has_not_changed(path: Path, change: Callable[[Path], Any]) -> None:
    assert sum(map(len, read_and_change(path, change))) >= 2 * BATCH_LINES


def test_an_input_that_has_not_changed_is_not_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_watch, "what_changed", lambda source, known: pytest.fail("compared"))
    assert sum(map(len, read_and_change(path, lambda path: None))) == 2 * BATCH_LINES


def test_an_input_that_grows_all_the_time_is_compared_once_and_at_the_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[object] = []
    monkeypatch.setattr(input_watch, "what_changed", lambda source, known: compared.append(source))
    source = open_source(str(path))
    watch = InputWatch(source)
    try:
        watch.begin(source.identity())
        for _ in watch.checked([[]] * 50):
            append(path)
    finally:
        watch.close()
        source.close()
    assert len(compared) == 2
