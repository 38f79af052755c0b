"""Facts for benchmark records: command, commit, machine and versions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from headrace.hardware import read_facts
from headrace.hardware.describe import machine_facts, package_versions


def record_facts() -> dict[str, Any]:
    """What every record begins with."""
    return {
        "command": "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine_facts(),
        "versions": package_versions(),
    }


def commit() -> str:
    """The commit of the code; COMMIT of the environment where the code is a copy without git."""
    if given := os.environ.get("COMMIT"):
        return given
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def cpu_name() -> str:
    return read_facts().cpu_model
