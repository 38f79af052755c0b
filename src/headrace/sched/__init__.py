"""Which tokens of which sequences a step computes. Pure: no torch, no clock, no threads."""

from __future__ import annotations

from headrace.sched.limits import SchedulerLimits
from headrace.sched.scheduler import Scheduler
from headrace.sched.stats import SchedulerStats

__all__ = ["Scheduler", "SchedulerLimits", "SchedulerStats"]
