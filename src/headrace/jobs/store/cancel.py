"""Stops a job from outside: by a file that its process looks for, on whatever machine it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import JobError
from headrace.jobs.store.directory import CANCEL
from headrace.jobs.store.lock import JobLock, holder_of
from headrace.jobs.store.manifest import Manifest, read_manifest, write_manifest


def cancel(directory: Path) -> str:
    """Returns a message about what was done."""
    holder = holder_of(directory / "lock")
    if holder is not None:
        (directory / CANCEL).touch()
        return f"asked {holder} to stop; 'headrace status {directory}' shows when it has stopped"
    with _held(directory) as manifest:
        if manifest.is_done:
            raise JobError(
                f"the job in {directory} is {manifest.state}; 'headrace clean {directory}' removes its directory"
            )
        write_manifest(directory, manifest.with_state("cancelled", "by 'headrace cancel'"))
        (directory / CANCEL).unlink(missing_ok=True)
    return f"the job in {directory} is cancelled"


def undo(directory: Path) -> str:
    with _held(directory) as manifest:
        if manifest.state != "cancelled" and not (directory / CANCEL).exists():
            raise JobError(f"the job in {directory} is not cancelled, it is {manifest.state}")
        write_manifest(directory, manifest.with_state("stopped", "by 'headrace cancel --undo'"))
        (directory / CANCEL).unlink(missing_ok=True)
    return f"the job in {directory} continues when its command is run again"


@contextmanager
def _held(directory: Path) -> Iterator[Manifest]:
    lock = JobLock.take(directory / "lock")
    try:
        manifest = read_manifest(directory)
        if manifest is None:
            raise JobError(f"there is no job in {directory}")
        yield manifest
    finally:
        lock.release()
