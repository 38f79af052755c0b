"""Removes a job directory."""

from __future__ import annotations

import shutil
from pathlib import Path

from headrace.errors import JobError
from headrace.jobs.store.lock import JobLock
from headrace.jobs.store.manifest import manifest_path, read_manifest


def clean(directory: Path, *, force: bool = False) -> int:
    """Returns the number of bytes freed. The manifest is removed first: a directory without one holds no job."""
    lock = JobLock.take(directory / "lock")
    try:
        manifest = read_manifest(directory)
        if manifest is not None and not manifest.is_done and not force:
            raise JobError(
                f"the job in {directory} is not completed, its work would be lost; finish it by running its command "
                "again, or give --force"
            )
        num_bytes = sum(path.stat().st_size for path in directory.iterdir())
        manifest_path(directory).unlink(missing_ok=True)
        shutil.rmtree(directory)
        return num_bytes
    finally:
        lock.release()
