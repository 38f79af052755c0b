"""A job as others see it: read from its directory, running or not, without touching it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from time import time
from typing import Any

import msgspec

from headrace.errors import JobError
from headrace.jobs.spec import job_directory
from headrace.jobs.store.committed import Committed, replay
from headrace.jobs.store.failure_log import counts_of
from headrace.jobs.store.lock import Holder, holder_of
from headrace.jobs.store.manifest import Manifest, manifest_path, read_manifest
from headrace.jobs.store.record import Record
from headrace.jobs.store.segments import Segment, find_segments
from headrace.jobs.store.status_file import STATUS_NAME, JobState, JobStatus, read_status

FRESH_SECONDS = 10.0  # a job that runs says every second how it stands
ENDED_WELL: tuple[JobState, ...] = ("finished", "stopped", "expired")  # all that it had counted was written


@dataclass(frozen=True)
class JobView:
    directory: Path
    manifest: Manifest
    holder: Holder | None
    segments: list[Segment]
    last_status: JobStatus | None = None  # what its process said last, if it said anything

    @cached_property
    def committed(self) -> Committed:
        """Replays the whole journal, which of millions of rows takes minutes."""
        return replay(self.segments)

    @property
    def status(self) -> JobStatus | None:
        """Where a process runs the job and has said how it stands; that of an earlier one says nothing of it."""
        status = self.last_status
        return status if status is not None and self.holder is not None and status.pid == self.holder.pid else None

    @property
    def told(self) -> JobStatus | None:
        """The last status, if its counts are right: the job runs and has told them just now, or its journal is as long
        as it was then."""
        status = self.last_status
        if status is None or status.epoch != self.manifest.epoch or status.error_lines is None:
            return None
        if status.state in ("running", "paused"):
            return status if self.status is not None and time() - status.updated_at <= FRESH_SECONDS else None
        return status if status.state in ENDED_WELL and status.journal_bytes == self.num_bytes else None

    @property
    def num_bytes(self) -> int:
        """Of the journal, as far as it counts."""
        return sum(s.path.stat().st_size if s.end is None else s.end for s in self.segments)

    @property
    def state(self) -> str:
        """As the manifest says, but a job whose process has gone without a word is interrupted."""
        if self.holder is not None:
            return "paused" if self.status is not None and self.status.state == "paused" else "running"
        return "interrupted" if self.manifest.state == "running" else self.manifest.state

    def records(self, *, in_order: bool = False) -> Iterator[Record]:
        reading = self.committed.records_in_order if in_order else self.committed.records
        return reading(self.segments)

    def as_json(self) -> dict[str, Any]:
        manifest, told = self.manifest, self.told
        if told is not None and told.error_lines is not None:
            num_lines, errors = told.lines_done - told.lines_held, Counter(told.error_lines)
        else:
            num_lines = self.committed.num_done
            errors = Counter(record.error for record in self.records() if record.error is not None)
        return {
            "state": self.state,
            "reason": manifest.reason,
            "holder": None if self.holder is None else str(self.holder),
            "input": manifest.input,
            "output": manifest.output,
            "directory": str(self.directory),
            "created": manifest.created,
            "lines": num_lines,
            "expected": manifest.num_expected,
            "errors": errors.total(),
            "errors_by_code": dict(errors.most_common()),
            "trouble": asdict(counts_of(self.directory, first_epoch=manifest.first_epoch)),
            "bytes": sum(os.stat(segment.path).st_size for segment in self.segments),
            "counted": "journal" if told is None else "status",
            "epoch": manifest.epoch,
            "pass": manifest.current.number,
            "redo": manifest.current.where,
            "fingerprint": manifest.fingerprint,
            "status": msgspec.to_builtins(self.status),
        }


def find_job(name: str) -> Path:
    """A job's directory, by its own name or by its output's."""
    for path in (Path(name), job_directory(name)):
        if path.is_dir() and manifest_path(path).exists():
            return path
    raise JobError(f"there is no job {name}; name the output of 'headrace run', or the .job directory beside it")


def view_job(directory: Path) -> JobView:
    manifest = read_manifest(directory)
    if manifest is None:
        raise JobError(f"there is no job in {directory}")
    holder = holder_of(directory / "lock")
    epochs = range(manifest.first_epoch, manifest.epoch + 1)
    segments = find_segments(directory, epochs=epochs, sealed=manifest.sealed)
    return JobView(directory, manifest, holder, segments, _last_status(directory / STATUS_NAME))


def _last_status(path: Path) -> JobStatus | None:
    try:
        return read_status(path)
    except JobError:  # there is none, or one of another version
        return None
