"""Machine, versions and commit, for records of benchmarks and summaries of jobs. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace.hardware.facts import read_facts
from headrace.hardware.gpu_topology import read_gpu_topology
from headrace.version import __version__

PACKAGES = ("torch", "triton", "fa3-fwd", "numba", "numpy", "tokenizers", "uvicorn", "uvloop")


def machine_facts() -> dict[str, Any]:
    """Hardware and system, without importing torch."""
    facts, gpus = read_facts(), gpu_facts()
    links = read_gpu_topology() if gpus else None
    return {
        "cpu": facts.cpu_model,
        "num_cores": facts.num_cores,
        "topology": None if facts.topology is None else facts.topology.describe(),
        "memory_bytes": facts.total_memory,
        "gpus": gpus,
        "gpu_topology": None if links is None else links.describe(),
        "platform": platform.platform(),
        "load_average": list(os.getloadavg()),
    }


def gpu_facts() -> list[dict[str, str]]:
    """Name, driver and memory of each GPU, from the driver's own command. Empty without one."""
    fields = ("name", "driver_version", "memory.total", "uuid")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(fields, (part.strip() for part in line.split(",")), strict=False)) for line in found.splitlines()]


def package_versions() -> dict[str, str]:
    versions = {"headrace": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def current_commit() -> str | None:
    """The commit of the checkout that this package lies in, with `-dirty` if files differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
