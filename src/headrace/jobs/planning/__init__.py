"""The order in which lines run: prefix groups, duplicates, expected answer lengths."""

from __future__ import annotations
