"""A job as others see it: read from its directory, running or not, without touching it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import JobError
from headrace.jobs.committed import Committed, replay
from headrace.jobs.lock import Holder, holder_of
from headrace.jobs.manifest import Manifest, manifest_path, read_manifest
from headrace.jobs.record import Record
from headrace.jobs.segments import Segment, find_segments
from headrace.jobs.spec import job_directory
from headrace.jobs.status_file import STATUS_NAME, JobStatus, read_status
from headrace.jobs.trouble import counts_of


@dataclass(frozen=True)
class Survey:
    directory: Path
    manifest: Manifest
    holder: Holder | None
    segments: list[Segment]
    committed: Committed
    status: JobStatus | None = None  # where a process runs the job and has said how it stands

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
        errors = Counter(record.error for record in self.records() if record.error is not None)
        manifest = self.manifest
        return {
            "state": self.state,
            "reason": manifest.reason,
            "holder": None if self.holder is None else str(self.holder),
            "input": manifest.input,
            "output": manifest.output,
            "directory": str(self.directory),
            "created": manifest.created,
            "lines": self.committed.num_done,
            "expected": manifest.num_expected,
            "errors": self.committed.num_errors,
            "errors_by_code": dict(errors.most_common()),
            "trouble": asdict(counts_of(self.directory, first_epoch=manifest.first_epoch)),
            "bytes": sum(os.stat(segment.path).st_size for segment in self.segments),
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


def survey(directory: Path) -> Survey:
    manifest = read_manifest(directory)
    if manifest is None:
        raise JobError(f"there is no job in {directory}")
    holder = holder_of(directory / "lock")
    epochs = range(manifest.first_epoch, manifest.epoch + 1)
    segments = find_segments(directory, epochs=epochs, sealed=manifest.sealed)
    return Survey(directory, manifest, holder, segments, replay(segments), _status_of(holder, directory))


def _status_of(holder: Holder | None, directory: Path) -> JobStatus | None:
    """That of an earlier process says nothing of this one."""
    path = directory / STATUS_NAME
    if holder is None or not path.exists():
        return None
    status = read_status(path)
    return status if status.pid == holder.pid else None
