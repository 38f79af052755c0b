"""Records: everything needed to repeat a measurement and to doubt it. One JSON object each.

    schema, kind, id, started_at, command         what was run, when
    engine                                        name, versions, start_s, launch command, settings in force
    model                                         name, digest of its files, shape
    workload, load                                the hashed spec; how requests were sent
    summary, rounds, levels                       figures (summary.py), of each round or load level
    machine, versions, commit                     hardware, packages and driver, commit of Headrace
    telemetry                                     GPU utilisation, memory, power; or why it is not available
    client                                        the load generator's own cost
    warnings                                      what a reader must know

Per-request rows lie beside a record, gzipped, so that any other statistic can be computed later.
"""

from __future__ import annotations

import gzip
import json
import secrets
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from headrace.bench.engines.base import RunningEngine
from headrace.bench.outcomes import Outcome
from headrace.bench.workloads import Workload
from headrace.errors import HeadraceError, reason_of
from headrace.hardware.describe import current_commit, machine_facts, package_versions

SCHEMA = "headrace.bench/1"
ROWS_SUFFIX = ".requests.jsonl.gz"
DIGITS = 4  # significant digits of figures in a record: the raw rows have all of them
# What a measurement is repeated with keeps every digit: a rounded workload would have another hash.
# So does a decision: its text and its numbers must not differ in the last digit.
EXACT = frozenset({"settings", "common_settings", "in_force", "workload", "load", "decision"})


class RecordError(HeadraceError):
    """A record that cannot be read or written."""


def new_record(kind: str, engine: RunningEngine, workload: Workload, commit: str | None = None) -> dict[str, Any]:
    """A record without figures."""
    now = datetime.now(UTC)
    return {
        "schema": SCHEMA,
        "kind": kind,
        "id": f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}",
        "started_at": now.isoformat(timespec="seconds"),
        "command": shlex.join(["headrace", *sys.argv[1:]]),
        "engine": {
            "name": engine.name,
            "versions": engine.versions(),
            "start_s": engine.start_s,
            "address": engine.address,
            "launch_command": engine.launch_command(),
            "settings": {name: asdict(setting) for name, setting in engine.settings_in_force().items()},
        },
        "model": engine.model_facts(),
        "workload": workload.facts,
        "machine": machine_facts(),
        "versions": package_versions(),
        "commit": commit or current_commit(),
        "warnings": [],
    }


def write_record(record: dict[str, Any], path: Path, rows: Sequence[Sequence[Outcome]] = ()) -> None:
    """Append to a file of records (.jsonl), or write one record (.json). `rows` are those of its levels.

    Rows are written first: a record never names rows that are missing.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for number, (level, outcomes) in enumerate(zip(record.get("levels", ()), rows, strict=False), 1):
            file = path.with_name(f"{record['id']}-{number}{ROWS_SUFFIX}")
            with gzip.open(file, "wb") as stream:
                stream.writelines(msgspec.json.encode(outcome) + b"\n" for outcome in outcomes)
            level["requests"] = file.name
        text = json.dumps(rounded(record))
        if path.suffix == ".jsonl":
            with path.open("a") as lines:
                lines.write(text + "\n")
        else:
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_text(text + "\n")
            temporary.replace(path)
    except OSError as error:
        raise RecordError(f"the record cannot be written to {path}: {error.strerror or error}") from error


def read_records(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The records of files (.json, .jsonl) and directories."""
    return [record for path in paths for record in _records_of(path)]


def read_rows(level: dict[str, Any], directory: Path) -> list[Outcome] | None:
    """The request rows of a level, if they were kept beside its record."""
    path = directory / str(level.get("requests"))
    if "requests" not in level or not path.exists():
        return None
    with gzip.open(path) as file:
        return [msgspec.json.decode(line, type=Outcome) for line in file]


def _records_of(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_dir():
        files = sorted([*path.glob("*.json"), *path.glob("*.jsonl")])
        if not files:
            raise RecordError(f"{path} has no records (*.json, *.jsonl)")
        for file in files:
            yield from _records_of(file)
        return
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} cannot be read: {reason_of(error)}") from error
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise RecordError(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(record, dict) or record.get("schema") != SCHEMA:
            raise RecordError(f"{path}, line {number}: not a record of headrace bench (schema {SCHEMA})")
        yield record


def rounded(value: Any) -> Any:
    """The same structure with floats of few significant digits, for files that people read; EXACT keys stay."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if abs(value) < 10**DIGITS else round(value, 1)
    if isinstance(value, dict):
        return {key: each if key in EXACT else rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    return value
