"""Faults that hardware does not show on demand. Python imports this file at start if its directory is in PYTHONPATH.

HEADRACE_SLOW_DISK_S   each write to a regular file and each sync takes so many seconds longer: throttling a real
                       disk needs root
HEADRACE_SLOW_PLAN_S   each plan of a step takes so many seconds longer, as on a slow or busy host
HEADRACE_UNWATCHED     a server does not watch itself: no samples, alerts, diagnosis, log of its load, or GPU figures
HEADRACE_WATCHING_TIMES   a file that gets the CPU time of each slice of that work (`timed_watching.py`)
"""

from __future__ import annotations

import os
import stat
import time

_EXTRA_S = float(os.environ.get("HEADRACE_SLOW_DISK_S", "0"))

if _EXTRA_S > 0:
    _write, _fdatasync, _fsync = os.write, os.fdatasync, os.fsync

    def write(descriptor, data):
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            time.sleep(_EXTRA_S)
        return _write(descriptor, data)

    def fdatasync(descriptor):
        time.sleep(_EXTRA_S)
        _fdatasync(descriptor)

    def fsync(descriptor):
        time.sleep(_EXTRA_S)
        _fsync(descriptor)

    os.write, os.fdatasync, os.fsync = write, fdatasync, fsync

_PLAN_S = float(os.environ.get("HEADRACE_SLOW_PLAN_S", "0"))

if _PLAN_S > 0:
    from headrace.sched.scheduler import Scheduler

    _plan = Scheduler.plan

    def plan(self):
        time.sleep(_PLAN_S)
        return _plan(self)

    Scheduler.plan = plan

if os.environ.get("HEADRACE_UNWATCHED"):
    import asyncio

    from headrace.hardware.gpu_monitor import GpuMonitor
    from headrace.server.self_monitor import SelfMonitor
    from headrace.server.serve import Server

    async def sleep_on(self, interval_s):
        await asyncio.Event().wait()

    SelfMonitor._run = sleep_on
    Server._on_lag = lambda self, lag_s: None
    GpuMonitor.of_device = classmethod(lambda cls, device: cls(open=None, missing="not watched"))

if os.environ.get("HEADRACE_WATCHING_TIMES"):
    import timed_watching  # noqa: F401
