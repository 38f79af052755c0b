"""How a job's run comes to an end before its input does: somebody asks for it, or its time is over."""

from __future__ import annotations

from time import monotonic

from headrace.jobs.run.deadline import Deadline
from headrace.jobs.run.stopping import Stop
from headrace.jobs.store.directory import JobDirectory
from headrace.jobs.store.status_file import JobState

CANCEL_SECONDS = 0.5  # how often a job looks whether it was cancelled


class Ending:
    """Owned by the job's run."""

    def __init__(self, grace_s: float, *, directory: JobDirectory | None, deadline: Deadline | None) -> None:
        self._grace_s = grace_s
        self._directory = directory
        self._deadline = deadline
        self._looked_at = monotonic()
        self._leave_at = 0.0
        self.stop: Stop | None = None

    @property
    def has_begun(self) -> bool:
        return self.stop is not None

    @property
    def is_over(self) -> bool:
        """What is still in flight is waited for no longer."""
        return self.stop is not None and monotonic() >= self._leave_at

    @property
    def is_cancelled(self) -> bool:
        return self.stop is not None and self.stop.is_cancelled

    @property
    def is_expired(self) -> bool:
        return self.stop is not None and self.stop.is_expired

    @property
    def state(self) -> JobState:
        """In which a run ends that has left nothing undone but what it was told to."""
        if self.stop is None:
            return "finished"
        return "expired" if self.stop.is_expired else "stopped"

    def begin(self, stop: Stop) -> None:
        self.stop = stop
        self._leave_at = monotonic() + (0.0 if stop.is_expired else self._grace_s)

    def hurry(self) -> None:
        """There is nothing to wait for."""
        self._leave_at = monotonic()

    def look(self) -> Stop | None:
        """Whether the deadline is over, or the job was cancelled."""
        if self.stop is not None:
            return None
        if self._deadline is not None and self._deadline.is_over:
            return Stop(is_expired=True)
        if self._directory is None or monotonic() - self._looked_at < CANCEL_SECONDS:
            return None
        self._looked_at = monotonic()
        return Stop(is_cancelled=True) if self._directory.is_cancelled else None

    @property
    def seconds_to_look(self) -> float | None:
        """None: nothing will happen by itself."""
        limits = []
        if self.stop is not None:
            limits.append(self._leave_at - monotonic())
        if self._directory is not None:
            limits.append(CANCEL_SECONDS)
        if self._deadline is not None:
            limits.append(self._deadline.seconds_left)
        return max(0.0, min(limits)) if limits else None
