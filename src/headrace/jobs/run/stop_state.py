"""Whether a run is stopping before the end of its input: why, and until when lines in flight may finish.

signals.py ──▶ StopRequest ─┐
headrace cancel ────────────┼─▶ StopState: nothing new starts ─▶ lines in flight finish, or the grace period ends
deadline ───────────────────┘   (no grace period after a deadline)
"""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic

from headrace.errors import JobError, ResumableJobError
from headrace.jobs.run.deadline import Deadline
from headrace.jobs.spec import JobSpec
from headrace.jobs.store.directory import JobDirectory
from headrace.jobs.store.status_file import JobState

CANCEL_SECONDS = 0.5  # between two checks whether the job was cancelled


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A request to stop the run; from a signal unless a field is set."""

    is_cancelled: bool = False  # by `headrace cancel`
    is_expired: bool = False  # by the deadline


class StopState:
    """Owned by the job's main loop."""

    def __init__(self, grace_s: float, *, directory: JobDirectory | None, deadline: Deadline | None) -> None:
        self._grace_s = grace_s
        self._directory = directory
        self._deadline = deadline
        self._checked_at = monotonic()
        self._leave_at = 0.0
        self._request: StopRequest | None = None

    @property
    def is_stopping(self) -> bool:
        return self._request is not None

    @property
    def is_grace_over(self) -> bool:
        """The run waits no longer for lines in flight."""
        return self._request is not None and monotonic() >= self._leave_at

    @property
    def is_cancelled(self) -> bool:
        return self._request is not None and self._request.is_cancelled

    @property
    def is_expired(self) -> bool:
        return self._request is not None and self._request.is_expired

    @property
    def seconds_to_deadline(self) -> float | None:
        return None if self._deadline is None else self._deadline.seconds_left

    @property
    def final_state(self) -> JobState:
        """The state of a run that ended as planned."""
        if self._request is None:
            return "finished"
        return "expired" if self._request.is_expired else "stopped"

    def begin(self, request: StopRequest) -> None:
        self._request = request
        self._leave_at = monotonic() + (0.0 if request.is_expired else self._grace_s)

    def check(self) -> StopRequest | None:
        """A request to stop, if the deadline is over or the job was cancelled."""
        if self._request is not None:
            return None
        if self._deadline is not None and self._deadline.is_over:
            return StopRequest(is_expired=True)
        if self._directory is None or monotonic() - self._checked_at < CANCEL_SECONDS:
            return None
        self._checked_at = monotonic()
        return StopRequest(is_cancelled=True) if self._directory.is_cancelled else None

    @property
    def seconds_to_check(self) -> float | None:
        """Seconds until `check` or `is_grace_over` may change. None: neither changes by itself."""
        limits = []
        if self._request is not None:
            limits.append(self._leave_at - monotonic())
        if self._directory is not None:
            limits.append(CANCEL_SECONDS)
        if self._deadline is not None:
            limits.append(self._deadline.seconds_left)
        return max(0.0, min(limits)) if limits else None


def stopping(job: JobSpec, error: ResumableJobError) -> JobError:
    """The error with which the job stops."""
    if job.is_resumable:
        return error
    return JobError(f"{error} (but this job cannot be resumed: its input or output is a stream)")
