"""Small files of sysfs, procfs and cgroup. One that is missing or unreadable is empty."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/")  # tests read other trees


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, ValueError):
        return ""
