"""Named steps of a job, and of a batch of the server, at which the crash tests kill the process.

HEADRACE_CRASH_AT=<step> or <step>:<n> kills the process with SIGKILL the n-th time it reaches that step. Without the
variable, `reach` does nothing.
"""

from __future__ import annotations

import os
import signal

STEPS = (
    "lock-taken",
    "tail-cut",
    "manifest-written",  # to its temporary file
    "manifest-renamed",
    "segment-created",
    "appended",  # in memory
    "write-half",  # of the buffered results
    "written",
    "synced",
    "input-ended",
    "merge-half",
    "merged",
    "merge-synced",
    "output-renamed",
    "output-synced",
    "completed",
)

BATCH_STEPS = (  # of the Batch API, around the steps of its job
    "batch-file-moved",  # an upload, before its row exists
    "batch-added",
    "batch-validated",
    "batch-job-ended",
    "batch-finalizing",
    "batch-files-written",
    "batch-ended",
)

_armed: list[str | int] = []  # the step, and how many more times it must be reached


def arm(text: str) -> None:
    """Set the step to crash at; an empty text disables crashes."""
    step, _, count = text.partition(":")
    if step and step not in STEPS + BATCH_STEPS:
        known = ", ".join(STEPS + BATCH_STEPS)
        raise ValueError(f"HEADRACE_CRASH_AT={text!r} is not a step; the steps are {known}")
    _armed[:] = [step, int(count or 1)] if step else []


def is_armed(step: str) -> bool:
    return bool(_armed) and _armed[0] == step


def reach(step: str) -> None:
    if not _armed or _armed[0] != step:
        return
    _armed[1] = int(_armed[1]) - 1
    if _armed[1] == 0:
        os.kill(os.getpid(), signal.SIGKILL)


arm(os.environ.get("HEADRACE_CRASH_AT", ""))
