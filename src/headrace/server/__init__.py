"""The OpenAI-compatible server: HTTP in front of one engine."""

from __future__ import annotations
