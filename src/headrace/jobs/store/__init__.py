"""The job directory on disk: lock, manifest, journal, failure log, status file, published output."""

from __future__ import annotations
