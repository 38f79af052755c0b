"""The Batch API: files and batches on disk, which run as jobs of `headrace.jobs` on the server's engine.

    endpoints ─▶ service.py ─▶ store.py (SQLite, files)
                    │ wakes       ▲
                    ▼             │
                 runner.py: two threads
                    clerk     validates (validation.py), ends cancelled and expired batches
                    worker    runs one batch after the other: `jobs.run.run_job` over a `SharedClient`, then results.py

- `multipart.py`, `upload.py`: a body of any size to a file, in blocks.
- `records.py`: what is stored, OpenAI's objects, and the states.
- `setup.py`: builds all of it for a server.

Invariants. What a client was told is on the disk. The state of a batch changes only by `BatchStore.move`, in a
transaction that checks the state before; output files and the final state appear together. The job's journal
alone says which lines are done, so the process may end at any moment: `runner.py` goes on from the stored states.
"""

from __future__ import annotations
