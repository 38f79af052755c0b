"""Facts for benchmark records: commit and CPU."""

from __future__ import annotations

import os
import subprocess

from headrace.hardware import read_facts


def commit() -> str:
    """The commit of the code; COMMIT of the environment where the code is a copy without git."""
    if given := os.environ.get("COMMIT"):
        return given
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def cpu_name() -> str:
    return read_facts().cpu_model
