"""Writes the results of a journal to the output, in the output's format. Readers never see a partial output.

A local file is written in the job directory, synced, and renamed. An object appears in its store when it is complete.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from headrace.errors import JobError, reason_of
from headrace.jobs import crash_points
from headrace.jobs.files import job_error, sync_directory
from headrace.jobs.formats import Sink, open_sink
from headrace.jobs.formats.locations import is_url, local_path

BATCH_RESULTS = 256


def publish(results: Iterable[bytes], output: str, *, format: str, directory: Path, num_results: int) -> None:
    """A crash at any point leaves the old output or the new one. Publishing again gives the same output."""
    if crash_points.is_armed("merge-half"):
        results = _watched(results, num_results // 2)
    try:
        if is_url(output):
            _publish_object(results, open_sink(output, format=format, overwrite=True))
        else:
            _publish_file(results, Path(os.path.realpath(local_path(output))), format, directory / "publish.tmp")
    except (JobError, OSError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, Exception):
            raise
        message = f"the output {output} cannot be written: {reason_of(cause)}; its results are safe in {directory}"
        raise (job_error(message, cause) if isinstance(cause, OSError) else JobError(message)) from error


def _publish_file(results: Iterable[bytes], output: Path, format: str, merged: Path) -> None:
    try:
        with open_sink(str(merged), format=format, overwrite=True) as sink:
            copy_results(sink, results)
        crash_points.reach("merged")
        _sync(merged)
        crash_points.reach("merge-synced")
        os.replace(merged, output)
    except BaseException:
        merged.unlink(missing_ok=True)
        raise
    crash_points.reach("output-renamed")
    sync_directory(output.parent)
    crash_points.reach("output-synced")


def _publish_object(results: Iterable[bytes], sink: Sink) -> None:
    """Publish an object. Closing commits it, so after an error the sink is not closed."""
    copy_results(sink, results)
    crash_points.reach("merged")
    sink.close()


def copy_results(sink: Sink, results: Iterable[bytes]) -> None:
    left = iter(results)
    while batch := list(islice(left, BATCH_RESULTS)):
        for result in batch:
            sink.append(result)
        sink.flush()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _watched(results: Iterable[bytes], half: int) -> Iterator[bytes]:
    for number, result in enumerate(results):
        if number == half:
            crash_points.reach("merge-half")
        yield result
