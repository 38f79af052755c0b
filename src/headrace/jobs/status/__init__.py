"""How a job is doing: counters, rates, time left, bottleneck, console, metrics and the final report.

    Tally, EngineStats, planner ──▶ JobMeter.measure, once a second ──▶ JobStatus ─┬▶ console.py (terminal)
                                     time_left.py, bottleneck.py                   ├▶ status.json (jobs/store)
                                                                                   └▶ metrics_server.py (Prometheus)
    Tally, EngineStats at the end ──▶ report.py: JobReport, exit code ──▶ summary.py (text), --json-summary

- `report.py`: `Tally` counts lines as they finish; `JobReport` is the result of a run.
- `meter.py`: makes a `JobStatus` (`jobs/store/status_file.py`) from counters. It is the only place that computes rates.
- `bottleneck.py`: what the job is limited by. `time_left.py`: how long the rest takes.
- `workers.py`, `gpus.py`: the figures of each worker and GPU. `desired_workers.py`: how many workers a job needs.
- `console.py`: text on the terminal: single messages, and the live view or a line every ten seconds.
- `metrics.py`: the Prometheus series of a status. `metrics_server.py`: serves them with prometheus_client.

The job's thread makes the status; views only show it. The metrics server's thread reads the last one. A status names
the epoch and the size of the journal that it counted: `headrace status` trusts it while both are unchanged, and reads
the journal otherwise.
"""

from __future__ import annotations
