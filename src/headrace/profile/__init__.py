"""Where a step's time goes, against the ceiling of each part: the analysis behind `headrace profile`.

    engine/profiler.py ─▶ NAME.profile.json (step log, model, ceilings) + NAME.trace.json.gz (torch profiler)
        trace.py      reads both, without torch
        parts.py      the part of a step that a kernel or an operation belongs to
        timeline.py   the device's time: which part ran when, and the gaps between them
        ceilings.py   the least time that the work of the steps needs on this device
        report.py     all of it together, as a table and as JSON; picture.py draws it
    recording.py      records a steady window of a run in this process; remote.py that of a server
    workload.py       requests that keep an engine in one kind of step
    commands.py       the nsys and ncu commands for the same run

Only `recording.py` starts an engine. The rest imports no torch, so that a recorded trace is read in under a second.
"""

from __future__ import annotations
