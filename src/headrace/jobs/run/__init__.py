"""The run of a job: the main loop, what is in flight, stopping and deadlines."""

from __future__ import annotations
