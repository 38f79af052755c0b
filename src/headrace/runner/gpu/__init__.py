"""Runs plans on a GPU: CUDA graphs, step layouts, memory and uploads."""

from __future__ import annotations
