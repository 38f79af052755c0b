"""One file per endpoint, and what the endpoints share."""

from __future__ import annotations
