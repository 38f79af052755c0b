"""The engines of a job: one, or several side by side, each in a process of its own.

    main loop ─▶ Workers ┬─▶ Worker 0 ─▶ engine process 0      cores, memory and GPUs: engine/shares.py
                         └─▶ Worker 1 ─▶ engine process 1
    main loop ◀─ inbox ◀──── events of all workers, in one queue

- `worker.py`: what the main loop asks of a worker (`Worker`). `JobEngine` (`jobs/recovery`) is one on this machine; one
  on another machine needs the same methods and nothing else.
- `worker_set.py`: the workers of a job, which of them run, their counters in total.
- `local.py`: starts workers on this machine, all at once.

Invariants. Request ids are unique in a job, so events need not name their worker. An empty list of events says that
some worker has changed its state: it has died, or a start has ended. A worker that dies costs only its own lines in
flight; the other workers go on, and its lines run again on any of them. The journal knows nothing of workers.
"""

from __future__ import annotations
