"""What this machine has."""

from __future__ import annotations

from headrace.hardware.facts import MachineFacts, read_facts

__all__ = ["MachineFacts", "read_facts"]
