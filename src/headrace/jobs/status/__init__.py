"""How a job is doing: counters, rates, time left, bottleneck, progress view, metrics and the final report."""

from __future__ import annotations
