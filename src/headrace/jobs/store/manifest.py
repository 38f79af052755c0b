"""What a job is, beside its results: whose input and settings they belong to, its state and its epoch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.errors import JobError
from headrace.jobs.files import write_atomically
from headrace.jobs.formats.identity import SourceIdentity

FORMAT = 1

# `running` without a holder of the lock: the process was killed.
# `expired` is `completed` with lines that a deadline has left without an answer.
State = Literal["running", "stopped", "cancelled", "completed", "expired"]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A pass over the input; its number is the attempt of the results that it makes. The first one asks for all rows,
    later ones for those that match `where`."""

    number: int = 1
    where: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DeadlineSet:
    """In a pass: the same words in later runs of it mean the same moment."""

    text: str
    turn: int
    at: float  # seconds of the Unix epoch


@dataclass(frozen=True, kw_only=True)
class Manifest:
    format: int = FORMAT
    job_id: str
    state: State
    epoch: int
    first_epoch: int  # segments of earlier ones belong to a job that was started anew
    created: str
    input: str
    output: str
    identity: SourceIdentity | None  # None: from stdin or a pipe, which cannot be read again
    fingerprint: dict[str, Any]
    sealed: dict[str, int] = field(default_factory=dict)  # segments of earlier epochs, and how much of them counts
    current: Pass = field(default_factory=Pass)
    published_in_order: bool | None = None  # how the output was last published
    published_format: str | None = None
    num_expected: int | None = None
    deadline: DeadlineSet | None = None
    reason: str | None = None  # why it stopped

    @property
    def is_done(self) -> bool:
        """Whether its output was published."""
        return self.state in ("completed", "expired")

    def with_state(self, state: State, reason: str | None = None) -> Manifest:
        return replace(self, state=state, reason=reason)


def manifest_path(directory: Path) -> Path:
    return directory / "manifest.json"


def read_manifest(directory: Path) -> Manifest | None:
    """None: there is no job, or one that died before it began."""
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
                f"the job in {directory} has format {found}, this version reads {FORMAT}; use the one that made it"
            )
        return msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, AttributeError) as error:
        raise JobError(f"the job's manifest {path} is damaged: {error}; start the job anew with --overwrite") from error


def write_manifest(directory: Path, manifest: Manifest) -> None:
    write_atomically(manifest_path(directory), msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
