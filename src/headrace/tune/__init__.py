"""`headrace tune`: finds the settings of an engine for a workload, and proves that they are better than the default."""

from __future__ import annotations
