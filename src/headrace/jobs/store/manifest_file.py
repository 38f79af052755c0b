"""The manifest of a job as this process wrote it: shows whether another process has taken the job over."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.jobs.files import job_error
from headrace.jobs.store.manifest import Manifest, manifest_path, read_manifest, write_manifest


class ManifestFile:
    """Owned by the process that runs the job."""

    def __init__(self, directory: Path, *, epoch: int) -> None:
        self._directory = directory
        self._epoch = epoch
        self._name = str(manifest_path(directory))
        self._signature: tuple[int, int] | None = None
        self.written: Manifest | None = None  # the last one that this process wrote

    def write(self, manifest: Manifest) -> None:
        try:
            write_manifest(self._directory, manifest)
        except OSError as error:
            message = f"the job directory {self._directory} cannot be written: {error.strerror}"
            raise job_error(message, error) from error
        self.written = manifest
        self._signature = self._sign()

    def is_ours(self) -> bool:
        """Whether no other process has taken the job over. Called before each write: usually costs one stat."""
        if self._sign() == self._signature:
            return True
        found = read_manifest(self._directory)
        return found is not None and found.epoch == self._epoch

    def _sign(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self._name)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns
