"""The bodies of requests, as msgspec reads them. Types are strict; null is the same as leaving a field out."""

from __future__ import annotations
