"""What this machine has."""

from headrace.hardware.facts import MachineFacts, read_facts

__all__ = ["MachineFacts", "read_facts"]
