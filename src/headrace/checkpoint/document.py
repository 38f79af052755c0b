"""The file of a checkpoint: one JSON object with a fixed order of keys, one fact per line, and a digest of its content.

    schema, digest, kind, created_at              what this file is; kind: offline, online, sweep, tune, job, serve
    decision                                      text, reason, alternatives with their ratios and intervals
    verification                                  figures of each round under each load, and which of them are judged
    engine                                        name, versions, launch command, every setting in force with its source
    model, workload, load, slo                    digest of the model's files, hashed spec, how requests are sent
    machine, versions, commit                     hardware with drivers, packages, commit of Headrace
    command, rerun, measured_at, warnings         how it was measured; for a job, the arguments that run it again

A file that was edited by hand is still read: its digest does not match, and readers say so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from headrace.bench.record import rounded
from headrace.bench.values import found
from headrace.errors import HeadraceError

SCHEMA = "headrace.checkpoint/1"
FAMILY = "headrace.checkpoint/"
SUFFIX = ".checkpoint"
KEYS = (
    "schema",
    "digest",
    "kind",
    "created_at",
    "decision",
    "verification",
    "engine",
    "model",
    "workload",
    "load",
    "slo",
    "machine",
    "versions",
    "commit",
    "command",
    "rerun",
    "measured_at",
    "warnings",
)
OBJECTS = ("decision", "verification", "engine", "model", "workload", "machine", "versions")
EDITED = "the file was edited after it was written: its content does not match its digest"
MAX_LINE = 110  # objects and lists that fit are written on one line, and so are settings and rounds
MIN_DEPTH = 2  # of what may be on one line: keys of the first two levels have lines of their own


class CheckpointError(HeadraceError):
    """A checkpoint that cannot be read, written or verified."""


@dataclass(frozen=True)
class Checkpoint:
    """What a file says. `was_edited`: its content does not match its digest."""

    facts: Mapping[str, Any]
    was_edited: bool = False

    @property
    def kind(self) -> str:
        return str(self.facts["kind"])

    @property
    def workload_kind(self) -> str:
        """`batch` (all requests at once, jobs) or `serve` (over HTTP)."""
        return "batch" if found(self.facts, "verification", "kind") in ("offline", "job") else "serve"

    def at(self, *path: str) -> Any:
        """The value under these keys, or None."""
        return found(self.facts, *path)


def write_checkpoint(facts: Mapping[str, Any], path: Path) -> Checkpoint:
    """Write in one step, so that a reader never sees half of a file. Returns what was written."""
    few_digits = {**rounded(dict(facts)), "decision": rounded(dict(facts.get("decision") or {}))}
    content = json.loads(json.dumps(few_digits, default=str))
    content["schema"] = SCHEMA
    content["digest"] = digest_of(content)
    ordered = {key: content[key] for key in KEYS if key in content}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(text_of(ordered), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise CheckpointError(f"the checkpoint cannot be written to {path}: {error.strerror or error}") from error
    return Checkpoint(ordered)


def read_checkpoint(path: Path) -> Checkpoint:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        facts = json.loads(text)
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not JSON ({error}); if it is truncated, restore it from version control or create it again"
        ) from None
    _check(facts, path)
    return Checkpoint(facts, was_edited=facts.get("digest") != digest_of(facts))


def digest_of(facts: Mapping[str, Any]) -> str:
    """Of everything but the digest itself, whatever the order of keys."""
    content = {key: value for key, value in facts.items() if key != "digest"}
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def text_of(facts: Mapping[str, Any]) -> str:
    return _shown(facts, 0) + "\n"


def _shown(value: Any, depth: int) -> str:
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, (dict, list)) or not value:
        return line
    if depth >= MIN_DEPTH and (len(line) + 2 * depth <= MAX_LINE or (depth > MIN_DEPTH and _is_flat(value))):
        return line
    inner = "  " * (depth + 1)
    if isinstance(value, dict):
        parts = [f"{inner}{json.dumps(key)}: {_shown(each, depth + 1)}" for key, each in value.items()]
    else:
        parts = [inner + _shown(each, depth + 1) for each in value]
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}\n" + ",\n".join(parts) + f"\n{'  ' * depth}{last}"


def _is_flat(value: dict[str, Any] | list[Any]) -> bool:
    return not any(isinstance(each, (dict, list)) for each in (value.values() if isinstance(value, dict) else value))


def _is_load(load: Any) -> bool:
    rounds, figures = found(load, "rounds"), found(load, "figures")
    return (
        isinstance(found(load, "load"), str)
        and isinstance(rounds, list)
        and all(isinstance(each, dict) for each in rounds)
        and isinstance(figures, dict)
    )


def _check(facts: Any, path: Path) -> None:
    schema = facts.get("schema") if isinstance(facts, dict) else None
    if isinstance(schema, str) and schema.startswith("headrace.bench/"):
        raise CheckpointError(
            f"{path} is a record of 'headrace bench'; make a checkpoint of it: "
            f"headrace checkpoint create {path} -o {path.with_suffix(SUFFIX)}"
        )
    if isinstance(schema, str) and schema.startswith(FAMILY) and schema != SCHEMA:
        raise CheckpointError(f"{path} has schema {schema!r}, and this version of Headrace reads {SCHEMA!r}")
    if schema != SCHEMA:
        raise CheckpointError(f"{path} is not a checkpoint of Headrace (schema {SCHEMA!r})")
    missing = [key for key in OBJECTS if not isinstance(facts.get(key), dict)]
    if not isinstance(found(facts, "engine", "settings"), dict):
        missing.append("engine.settings")
    loads = found(facts, "verification", "loads")
    if not isinstance(loads, list) or not loads or not all(map(_is_load, loads)):
        missing.append("verification.loads")
    if not isinstance(found(facts, "verification", "num_rounds"), int):
        missing.append("verification.num_rounds")
    if not isinstance(facts.get("kind"), str):
        missing.append("kind")
    if missing:
        raise CheckpointError(
            f"{path} lacks a valid {', '.join(missing)}; restore it from version control or create it again"
        )
