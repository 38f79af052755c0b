"""From an input line to a prepared request, or to the error line that it becomes."""

from __future__ import annotations
