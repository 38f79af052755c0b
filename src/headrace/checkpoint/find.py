"""Finds the checkpoint for a model, a machine and a kind of workload in a directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from headrace.checkpoint.document import SUFFIX, Checkpoint, CheckpointError, read_checkpoint
from headrace.checkpoint.facts import machine_of

WorkloadKind = Literal["batch", "serve"]


class FoundCheckpoint(NamedTuple):
    path: Path
    checkpoint: Checkpoint


def find_checkpoint(
    directory: Path,
    *,
    model_digest: str,
    machine: Mapping[str, Any],
    workload_kind: WorkloadKind,
    engine: str = "headrace",
) -> FoundCheckpoint | None:
    """The newest checkpoint of this engine, model, kind of machine and kind of workload. One of a tune is preferred to
    one of a sweep, and both to one that only recorded what ran. `machine` is as in `machine_facts`; other files of the
    directory, and checkpoints that cannot be read, are passed over."""
    matches = [
        found
        for found in _checkpoints(directory)
        if found.checkpoint.at("model", "digest") == model_digest
        and found.checkpoint.at("engine", "name") == engine
        and found.checkpoint.workload_kind == workload_kind
        and machine_of(found.checkpoint.facts["machine"]) == machine_of(machine)
    ]
    return max(matches, key=_preference, default=None)


def _checkpoints(directory: Path) -> list[FoundCheckpoint]:
    found = []
    for path in sorted([*directory.glob(f"*{SUFFIX}"), *directory.glob("*.json")]):
        try:
            found.append(FoundCheckpoint(path, read_checkpoint(path)))
        except CheckpointError:
            continue
    return found


def _preference(found: FoundCheckpoint) -> tuple[int, str, str]:
    return _rank(found.checkpoint), str(found.checkpoint.facts.get("created_at")), found.path.name


def _rank(checkpoint: Checkpoint) -> int:
    """How much was compared. A tune that was stopped before its confirmation has compared little."""
    if checkpoint.kind == "tune":
        return 1 if checkpoint.at("decision", "verdict") == "not confirmed" else 3
    return 2 if checkpoint.at("decision", "alternatives") else 0
