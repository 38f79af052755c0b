"""The manifest of a job: its input, settings, state, epoch and pass. Everything but the results.

The names of fields are the keys of `manifest.json`: jobs of earlier versions must stay readable.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.errors import JobError
from headrace.jobs.files import write_atomically
from headrace.jobs.formats.identity import SourceIdentity

FORMAT = 1

# `running` while no process holds the lock: the process was killed.
# `expired`: completed, but a deadline left some lines without an answer.
State = Literal["running", "stopped", "cancelled", "completed", "expired"]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A pass over the input. Its number is the attempt of its results. The first pass runs all lines, later ones those
    that match `where`."""

    number: int = 1
    where: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DeadlineSet:
    """A deadline as first given in a pass. The same text in later runs of that pass means the same time."""

    text: str
    turn: int  # the number of the pass
    at: float  # seconds since the Unix epoch


@dataclass(frozen=True, kw_only=True)
class Manifest:
    format: int = FORMAT
    job_id: str
    state: State
    epoch: int
    first_epoch: int  # segments of earlier epochs were discarded by --overwrite
    created: str
    input: str
    output: str
    identity: SourceIdentity | None  # None: stdin or a pipe, which cannot be read again
    fingerprint: dict[str, Any]
    sealed: dict[str, int] = field(default_factory=dict)  # segments of earlier epochs, and how many bytes of each count
    current: Pass = field(default_factory=Pass)
    published_in_order: bool | None = None  # how the output was last published
    published_format: str | None = None
    num_expected: int | None = None
    deadline: DeadlineSet | None = None
    reason: str | None = None  # why it stopped
    auto_settings: dict[str, Any] | None = None  # what --auto chose at the first run; None: without --auto

    @property
    def is_done(self) -> bool:
        """Whether its output was published."""
        return self.state in ("completed", "expired")

    def with_state(self, state: State, reason: str | None = None) -> Manifest:
        return replace(self, state=state, reason=reason)


def manifest_path(directory: Path) -> Path:
    return directory / "manifest.json"


def read_manifest(directory: Path) -> Manifest | None:
    """Returns None if there is no job, or one that died before it started."""
    path = manifest_path(directory)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise JobError(f"the job's manifest {path} cannot be read: {error.strerror}") from error
    try:
        if (found := msgspec.json.decode(data).get("format")) != FORMAT:
            raise JobError(
                f"the job in {directory} has format {found}, this version reads {FORMAT}; use the version that wrote it"
            )
        return msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, AttributeError) as error:
        raise JobError(f"the job's manifest {path} is damaged: {error}; start the job over with --overwrite") from error


def write_manifest(directory: Path, manifest: Manifest) -> None:
    write_atomically(manifest_path(directory), msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
