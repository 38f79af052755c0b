"""Sweeps: a list of settings, each started, verified, measured and stopped, then ranked.

    configs.py    the user's list: names checked, values kept as given       check.py      is it as asked?
    run.py        the loop; a failure is a row, not the end                   journal.py    what is done, on disk
    result.py     the ranking, with intervals over rounds                     settings_file.py    the best one as a file

    for each config:   start ─▶ settings in force? one request answered? ─▶ measure, round by round ─▶ stop
                         │                  │                                  │
                         └──────────────────┴───── a failure row ──────────────┘
                                            journal: one line for each round that ended, fsynced

The same command continues an interrupted sweep: rounds that the journal has are not run again.
"""

from __future__ import annotations

from headrace.bench.sweep.configs import SweepConfig, parse_configs, read_configs
from headrace.bench.sweep.result import SweepResult
from headrace.bench.sweep.run import Sweep, run_sweep
from headrace.bench.sweep.settings_file import settings_file

__all__ = ["Sweep", "SweepConfig", "SweepResult", "parse_configs", "read_configs", "run_sweep", "settings_file"]
