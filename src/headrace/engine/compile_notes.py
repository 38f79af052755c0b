"""Notes in Triton's cache: which starts have all their kernels there.

A note is about settings, which are known once the GPU was asked. A hint is about a config and a model, which are known
before torch is imported: a start that has one most likely needs no compiler. Imports neither torch nor Triton.
"""

from __future__ import annotations

import hashlib
import os
import sys
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import headrace
from headrace.config import EngineConfig
from headrace.engine.settings import Settings
from headrace.hardware import GpuFacts
from headrace.models import ModelSpec


def note_of(spec: ModelSpec, settings: Settings, gpu: GpuFacts) -> Path:
    """The file that says that all kernels of this start are in Triton's cache."""
    what = replace(settings, num_blocks=0, choices=(), warnings=(), num_threads=1, cpu_affinity="none", seed=0)
    what = replace(what, load_format="auto", full_rate_seqs=None)
    return _place_of(spec, what, gpu.capability)


def hint_of(config: EngineConfig, spec: ModelSpec) -> Path:
    """The file that says that a start of this config has found all its kernels."""
    return _place_of(spec, replace(config, model="", seed=0)).with_suffix(".hint")


def write_hint(config: EngineConfig, spec: ModelSpec) -> None:
    with suppress(OSError):  # a cache that cannot be written has no hints
        hint_of(config, spec).touch()


def _place_of(*what: object) -> Path:
    described = repr((*what, sys.version_info[:2], code_digest()))
    return cache_directory() / "headrace" / hashlib.blake2b(described.encode(), digest_size=16).hexdigest()


def cache_directory() -> Path:
    """Where Triton keeps compiled kernels, by its own variables."""
    if chosen := os.environ.get("TRITON_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("TRITON_HOME") or "~").expanduser() / ".triton" / "cache"


def code_digest() -> str:
    """Changes with everything that the compiled form of a kernel depends on, beside its launch."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sorted((Path(headrace.__file__).parent / "kernels" / "gpu").glob("*.py")):
        digest.update(source.read_bytes())
    for package in ("triton", "torch", "fa3-fwd"):
        digest.update(f"{package} {_version(package)}".encode())
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
