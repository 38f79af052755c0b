"""A job seen from outside, for `headrace status`: read from its directory, running or not, without changing it.

Replaying the journal of millions of lines takes minutes. So the counts of the last status are used while they are
known to be right: it names the epoch and the size of the journal that it counted.
"""

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

FRESH_SECONDS = 10.0  # a running job writes its status every second
ENDED_WELL: tuple[JobState, ...] = ("finished", "stopped", "expired")  # everything counted was written


@dataclass(frozen=True)
class JobView:
    directory: Path
    manifest: Manifest
    holder: Holder | None
    segments: list[Segment]
    last_status: JobStatus | None = None  # the last one that a process of the job wrote

    @cached_property
    def committed(self) -> Committed:
        """Replays the whole journal."""
        return replay(self.segments)

    @property
    def status(self) -> JobStatus | None:
        """The status of the process that runs the job now; None if there is none, or it has not written one."""
        status = self.last_status
        return status if status is not None and self.holder is not None and status.pid == self.holder.pid else None

    @property
    def trusted_status(self) -> JobStatus | None:
        """The last status if its counts are right: the job runs and wrote it just now, or the journal still has the
        size that the status counted."""
        status = self.last_status
        if status is None or status.epoch != self.manifest.epoch or status.error_lines is None:
            return None
        if status.state in ("running", "paused"):
            return status if self.status is not None and time() - status.updated_at <= FRESH_SECONDS else None
        return status if status.state in ENDED_WELL and status.journal_bytes == self.num_bytes else None

    @property
    def num_bytes(self) -> int:
        """Bytes of the journal that count."""
        return sum(s.path.stat().st_size if s.end is None else s.end for s in self.segments)

    @property
    def state(self) -> str:
        """The state of the manifest, but 'interrupted' for a job whose process was killed."""
        if self.holder is not None:
            return "paused" if self.status is not None and self.status.state == "paused" else "running"
        return "interrupted" if self.manifest.state == "running" else self.manifest.state

    def records(self, *, in_order: bool = False) -> Iterator[Record]:
        reading = self.committed.records_in_order if in_order else self.committed.records
        return reading(self.segments)

    def as_json(self) -> dict[str, Any]:
        manifest, status = self.manifest, self.trusted_status
        if status is not None and status.error_lines is not None:
            num_lines, errors = status.lines_done - status.lines_held, Counter(status.error_lines)
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
            "counted": "journal" if status is None else "status",
            "epoch": manifest.epoch,
            "pass": manifest.current.number,
            "redo": manifest.current.where,
            "fingerprint": manifest.fingerprint,
            "status": msgspec.to_builtins(self.status),
        }


def find_job(name: str) -> Path:
    """The directory of a job, given its own name or that of the output."""
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
    except JobError:  # missing, or written by another version
        return None
