"""ApacheBench as a load: its command line and its report."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

AB = shutil.which("ab")
needs_ab = pytest.mark.skipif(AB is None, reason="needs ab: apt-get install apache2-utils")


def ab_command(url: str, directory: Path, body: str, *, num: int, concurrency: int) -> list[str]:
    """The command that posts `body`, as docs/benchmarking.md has it."""
    path = directory / "body.json"
    path.write_text(body)
    load = ["-n", str(num), "-c", str(concurrency)]
    return [str(AB), "-l", *load, "-p", str(path), "-T", "application/json", url]


def ab_report(text: str) -> dict[str, str]:
    """What `ab` printed, by name."""
    return dict(re.findall(r"^([A-Z][\w /-]+):\s+(\S+)", text, flags=re.MULTILINE))
