"""Sections that every record has: what was run, with which settings, on which machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def facts_table(title: str, labels: Sequence[str], facts: Sequence[Any]) -> Table | None:
    """One row a fact, one column a level or round. None if none has any."""
    columns = [dict(flat(each)) for each in facts]
    names = list(dict.fromkeys(name for column in columns for name in column))
    if not names:
        return None
    rows = [[label_of(name), *(of_kind(column.get(name), name) for column in columns)] for name in names]
    return Table(["", *labels], rows, caption=title)


def telemetry_of(facts: Any) -> Any:
    """Telemetry for people: what is not available is one line with its reason, and each GPU has its number."""
    if not isinstance(facts, Mapping):
        return facts
    shown: dict[str, Any] = {}
    for kind, value in facts.items():
        if not isinstance(value, Mapping):
            shown[kind] = value
        elif not value.get("available", True):
            shown[kind] = value.get("reason", NOT_AVAILABLE)
        elif "gpus" in value:
            shown |= {f"GPU {place}": _without(gpu, "index", "uuid", "name") for place, gpu in enumerate(value["gpus"])}
        else:
            shown[kind] = _without(value, "available")
    return shown


def _without(facts: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name not in names}
