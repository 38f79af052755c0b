"""From a journal to the output: merged beside it, on the disk, and then renamed; a reader never sees a part."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from headrace.jobs import crash_points
from headrace.jobs.files import job_error, sync_directory

WRITE_BYTES = 1 << 20
BATCH_RESULTS = 256

WriteResults = Callable[[Iterable[bytes], BinaryIO], None]


def write_lines(results: Iterable[bytes], file: BinaryIO) -> None:
    left = iter(results)
    while batch := list(islice(left, BATCH_RESULTS)):
        file.write(b"\n".join([*batch, b""]))


def publish(
    results: Iterable[bytes], output: Path, *, directory: Path, num_results: int, write: WriteResults = write_lines
) -> None:
    """A crash at any point leaves the old output or the new one; doing it again gives the same."""
    merged = directory / "publish.tmp"
    try:
        with open(merged, "wb", buffering=WRITE_BYTES) as file:
            write(_watched(results, num_results // 2) if crash_points.is_armed("merge-half") else results, file)
            file.flush()
            crash_points.reach("merged")
            os.fsync(file.fileno())
        crash_points.reach("merge-synced")
        os.replace(merged, output)
        crash_points.reach("output-renamed")
        sync_directory(output.parent)
        crash_points.reach("output-synced")
    except OSError as error:
        merged.unlink(missing_ok=True)
        message = f"the output {output} cannot be written: {error.strerror}; its results are safe in {directory}"
        raise job_error(message, error) from error


def _watched(results: Iterable[bytes], half: int) -> Iterator[bytes]:
    for number, result in enumerate(results):
        if number == half:
            crash_points.reach("merge-half")
        yield result
