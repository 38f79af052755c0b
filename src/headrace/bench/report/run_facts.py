"""Sections that every record has: what was run, with which settings, on which machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.bench.report.document import Code, Details, Facts, Part, Section, Table
from headrace.bench.values import NOT_AVAILABLE, flat, found, label_of, memory, of_kind, plain, seconds


def title_of(record: Mapping[str, Any], what: str) -> str:
    return f"{what}: {found(record, 'workload', 'name') or 'a workload'} on {engine_label(record)}"


def subtitle_of(record: Mapping[str, Any]) -> str:
    model = found(record, "model", "name") or f"model {NOT_AVAILABLE}"
    return f"{model} · {record.get('started_at', 'date not available')} · record {record.get('id', NOT_AVAILABLE)}"


def engine_label(record: Mapping[str, Any]) -> str:
    name = found(record, "engine", "name") or "an engine"
    version = found(record, "engine", "versions", str(name))
    return f"{name} {version}" if version else str(name)


def run_section(record: Mapping[str, Any]) -> Section:
    engine, model, workload = (record.get(key) or {} for key in ("engine", "model", "workload"))
    parts: list[Part] = []
    if found(engine, "launch_command"):
        parts.append(Code(str(engine["launch_command"]), "Launch command of the engine"))
    parts.append(
        Facts(
            [
                ("engine", engine_label(record)),
                ("start-up", seconds(found(engine, "start_s"))),
                ("model", plain(found(model, "name") or NOT_AVAILABLE)),
                ("model digest", plain(found(model, "digest") or NOT_AVAILABLE)),
                (
                    "workload",
                    f"{found(workload, 'name') or NOT_AVAILABLE}, hash {found(workload, 'hash') or NOT_AVAILABLE}",
                ),
                ("machine", machine_label(record)),
                ("commit of Headrace", plain(record.get("commit") or NOT_AVAILABLE)),
                ("command", plain(record.get("command") or NOT_AVAILABLE)),
            ]
        )
    )
    settings = found(engine, "settings") or {}
    if settings:
        rows = [
            [
                name,
                plain(found(setting, "value")),
                plain(found(setting, "source") or ""),
                plain(found(setting, "reason") or ""),
            ]
            for name, setting in settings.items()
        ]
        table = Table(["setting", "value", "source", "reason"], rows, num_text_columns=4)
        parts.append(Details(f"Settings in force ({len(rows)})", [table]))
    for title, facts in (
        ("Workload", workload),
        ("Model", model),
        ("Machine", record.get("machine")),
        (
            "Versions",
            {
                **(record.get("versions") or {}),
                **{f"engine: {k}": v for k, v in (found(engine, "versions") or {}).items()},
            },
        ),
    ):
        pairs = [
            (label_of(name), of_kind(value, name) if name.endswith("_bytes") else plain(value))
            for name, value in flat(facts)
        ]
        if pairs:
            parts.append(Details(title, [Facts(pairs)]))
    return Section("What was run", parts)


def machine_label(record: Mapping[str, Any]) -> str:
    machine = record.get("machine")
    gpus = [str(gpu.get("name")) for gpu in found(machine, "gpus") or [] if isinstance(gpu, Mapping)]
    cpu = found(machine, "cpu")
    parts = [f"{len(gpus)} x {gpus[0]}"] if gpus and len(set(gpus)) == 1 else gpus
    parts += [f"{cpu}, {found(machine, 'num_cores')} cores"] if cpu else []
    parts += [memory(found(machine, "memory_bytes"))] if found(machine, "memory_bytes") else []
    return "; ".join(parts) or NOT_AVAILABLE


def facts_table(title: str, labels: list[str], facts: list[Any], first: str) -> Table | None:
    """One row a level, one column a fact. None if no level has any."""
    names = list(dict.fromkeys(name for each in facts for name, _ in flat(each)))
    if not names:
        return None
    rows = [
        [label, *(of_kind(dict(flat(each)).get(name), name) for name in names)]
        for label, each in zip(labels, facts, strict=True)
    ]
    return Table([first, *map(label_of, names)], rows, caption=title)
