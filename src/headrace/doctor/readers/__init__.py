"""Readers of evidence: pages of /metrics, records of benchmarks and jobs, command lines."""

from __future__ import annotations
