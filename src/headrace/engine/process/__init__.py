"""An engine in a process of its own: channel, wire format, child process, health checks and restarts."""

from __future__ import annotations
