"""One run of a job: from the command to the report.

    input ─▶ jobs/formats ─▶ jobs/input: parse, render, tokenize ─▶ planner: a window of lines, in execution order
          ─▶ submitting ─▶ workers ─▶ collecting ─▶ outcomes ─▶ journal (append, write, sync) ─▶ jobs/store/publish

    reader thread   prepared batches ──┐
    worker threads  events of a step ──┼─▶ inbox ─▶ main_loop, one message at a time on the thread of `run_job`
    signal handler  StopRequest ───────┘

- `run_job.py`: the entry. Opens input and job directory, starts the engine, runs the loop, publishes the output.
- `options.py`: `RunOptions`, how a job is run. `context.py`: `RunContext`, what the parts below share. `open_feed.py`:
  the reader thread, and whether another process prepares the lines.
- `main_loop.py`: takes a message and gives it to a part: `submitting.py` chooses lines and submits them,
  `in_flight.py` holds what the engine has (`parts_in_flight.py`: the requests of a line with several prompts),
  `collecting.py` turns events into answers, retries or error lines, `outcomes.py` writes and counts each line once,
  `status_reporter.py` shows progress and writes `status.json`.
- SIGINT and SIGTERM: `signals.py` installs the handlers, which send a `StopRequest`; `stop_state.py` holds whether and
  why the run is stopping (signal, `headrace cancel`, deadline) and until when lines in flight may finish.
- `deadline.py`: the deadline, and the error lines for everything that is unfinished then.
- Retry and restart decisions: `jobs/recovery/policy.py`; `restarting.py` replaces the engine of a worker that has died,
  while the loop goes on with the others. `stall.py`: what ends each wait of a job, and the error if nothing does.

Invariants. Only a `Worker` (`jobs/workers`) holds an engine. The results of a step are written before new requests
are submitted, so a crash loses at most what was in flight. The planner's window and the limit on sequences in flight
bound the memory, whatever the size of the input. The reader never looks at results, and the journal never at the
engine. A duplicate is a line of its own in the journal: if a crash separates it from its original, it is computed again
with the same answer. Each run is an epoch of the journal (`jobs/store`); `jobs/crash_points.py` names the places at
which tests kill the process.
"""

from __future__ import annotations
