"""The bodies of requests, as msgspec reads them. Types are strict, null means that a field was left out."""

from __future__ import annotations
