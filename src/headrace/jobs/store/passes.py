"""Chooses the pass of a run: the one that was interrupted, or with `--redo` another one over some of the lines."""

from __future__ import annotations

import time

from headrace.errors import JobError
from headrace.jobs.formats.line_index import Bitmap
from headrace.jobs.spec import JobSpec
from headrace.jobs.store.committed import MAX_ATTEMPT
from headrace.jobs.store.journal import Journal
from headrace.jobs.store.manifest import DeadlineSet, Manifest, Pass
from headrace.jobs.store.redo import Where
from headrace.jobs.times import deadline_at


def choose_pass(job: JobSpec, earlier: Manifest | None) -> Pass:
    current = earlier.current if earlier else Pass()
    where, overrides = job.redo, dict(job.overrides)
    if where is None:
        return current
    if earlier is None:
        raise JobError(f"--redo {where!r}: there is no job in {job.directory} whose lines could be repeated")
    is_same = (current.where, current.overrides) == (where, overrides)
    if is_same and not earlier.is_done:
        return current
    if current.number == MAX_ATTEMPT:
        raise JobError(f"the job in {job.directory} was redone {MAX_ATTEMPT} times, the maximum; --overwrite it")
    return Pass(number=current.number + 1, where=where, overrides=overrides)


def choose_lines(job: JobSpec, current: Pass, journal: Journal) -> Bitmap:
    """The lines that `--redo` selects and that this pass has not done yet."""
    lines = Bitmap()
    if job.redo is None:
        return lines
    where = Where(job.redo)
    for record in journal.records():
        if where.matches(record) and journal.last_attempt(record.index) < current.number:
            lines.add(record.index)
    where.refuse_unseen()
    return lines


def choose_deadline(job: JobSpec, current: Pass, earlier: Manifest | None) -> DeadlineSet | None:
    """The time that the text meant when it was first given in this pass: '2h' does not move with each run."""
    text, known = job.deadline, earlier.deadline if earlier else None
    if text is None:
        return None
    if known is not None and (known.text, known.turn) == (text, current.number):
        return known
    return DeadlineSet(text=text, turn=current.number, at=deadline_at(text, now=time.time()))
