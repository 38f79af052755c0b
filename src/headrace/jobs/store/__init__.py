"""The job directory on disk, `answers.jsonl.job` beside the output: everything that survives a crash.

    lock             flock and the name of the process that runs the job
    manifest.json    input, settings, state, epoch and pass of the job
    seg-*.jsonl      the journal: one record per result, only ever appended
    trouble.jsonl    the failure log; exists only after a failure
    in-flight        lines in flight, read when a whole process was lost
    status.json      counters and rates, replaced about once a second
    cancel           exists after a request to stop the job

`directory.JobDirectory` owns all of it while a process runs the job. `job_view` reads it from outside.

    open: lock, manifest, agreement, replay ─▶ begin: new epoch ─▶ append, flush, ... ─▶ publish ─▶ completed
          (nothing left to do: no model is loaded)

Invariants
- Committed: a result counts once it is in the journal, keyed by the index of its line. `committed` holds one byte per
  line (attempt, error or answer), is rebuilt by replaying the segments, and is stored nowhere else.
- Torn tail: a crash may leave half a record at the end of a segment. Replay cuts it off.
- Epoch: each run of a job. It is written to the manifest before its first segment, with the sizes of all earlier
  segments (`sealed`). What an older process still appends lies beyond a sealed size or in an unlisted segment, and does
  not count. A process checks the manifest before each write and stops once its epoch is over. `--overwrite` writes a
  manifest with a later `first_epoch`.
- Pass: a round over the lines. `--redo` starts another pass; its number is the attempt of its results.
- Syncing happens on a separate thread, in groups. Only the end of a job, or a disk far behind, makes the job wait.
- Full disk: the journal keeps in memory what it could not write; `flush` can be called again until it succeeds.
- Duplicates have records of their own: if a crash separates one from its original, it is computed by itself.
"""

from __future__ import annotations
