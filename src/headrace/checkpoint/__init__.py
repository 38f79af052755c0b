"""Operator checkpoints: a decision about settings as one file, with all that is needed to check it again.

    document.py   the file: schema, digest of the content, text that diffs well
    create.py     from a record of a benchmark, a sweep or a tune, a job's summary, a server's self-check
    self_check.py a few requests, answered by a server's engine at its start
    decision.py   what a sweep or a tune shows: the best config against the default and others
    judge.py      tolerances from the recorded noise, and whether figures still hold
    rerun.py      the same workload, engine, settings and load again
    verify.py     rerun, compare, name what else differs
    facts.py      machine, versions, model, settings and workload of two checkpoints
    views.py      show and diff as reports
    jobs.py       a batch job: the digest of its input, and the arguments that run it again
    find.py       the checkpoint for a model, a machine and a kind of workload

Reading, showing and comparing import no torch.
"""

from __future__ import annotations

from headrace.checkpoint.document import Checkpoint, CheckpointError, read_checkpoint, write_checkpoint
from headrace.checkpoint.find import find_checkpoint

__all__ = ["Checkpoint", "CheckpointError", "find_checkpoint", "read_checkpoint", "write_checkpoint"]
