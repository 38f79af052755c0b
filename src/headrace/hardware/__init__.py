"""What this machine has."""

from __future__ import annotations

from headrace.hardware.facts import MachineFacts, read_facts
from headrace.hardware.memory import release_unused

__all__ = ["MachineFacts", "read_facts", "release_unused"]
