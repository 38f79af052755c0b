"""What happens after a failure: retries, engine restarts, poison requests, less memory, full disks."""

from __future__ import annotations
