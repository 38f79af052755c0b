"""What a job does after a failure: retry a line, restart the engine, isolate a line that kills it, wait for disk space.

    line ends with an error ──▶ policy.decide_retry ──▶ retry_queue (after a delay), or an error line after 5 attempts
    engine dies ──▶ policy.engine_died ┬ out of memory: memory_ladder, a new engine that needs less memory
                                       ├ otherwise: suspects, the lines in flight run again, in smaller groups
                                       └ no progress over several deaths: the job stops and can be resumed
    disk is full ──▶ disk_full: nothing new starts, results wait in memory, writes are tried again

- `policy.py`: every retry and restart decision (`RecoveryPolicy`). It logs each decision before it is carried out.
- `retry_rules.py`: the numbers. Delays and the limit of engine starts come from `engine/restart_policy.py`, which the
  server uses too.
- `retry_queue.py`: lines that wait to run again. The planner still counts them as running.
- `suspects.py`: the search for a line that kills the engine, as pure state. Each death writes the state to the failure
  log (`jobs/store/failure_log.py`), so the search survives a crash of the whole process.
- `memory_ladder.py`: the steps after an out-of-memory error.
- `job_engine.py`: the engine of a job, or of one of its workers, and its replacement. Nothing else may hold an engine,
  not even the traceback of its exception: the memory of a dead engine must be free before the next one loads.
- `disk_full.py`: all flushes of a run go through `DiskWait`; files that are written once use `retry_on_full_disk`.

Everything here runs on the job's thread (`jobs/run/main_loop.py`). `jobs/store/in_flight_file.py` covers the case that
the whole process is lost: the next run reads there which lines were in flight.
"""

from __future__ import annotations
