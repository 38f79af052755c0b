"""What two checkpoints should have in common: machine, drivers, versions, model, settings, workload and load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.bench.compare import FactDifference
from headrace.bench.values import found, plain

NOT_THERE = "not there"
# Where a server listens, and under which name: it does not change what is measured.
OF_PLACE = frozenset(
    {
        "host",
        "port",
        "root_path",
        "served_model_name",
        "api_key",
        "api_key_file",
        "admin_key",
        "ssl_certfile",
        "ssl_keyfile",
        "allowed_origins",
    }
)
ENVIRONMENT = ("machine", "driver", "package", "engine", "model", "commit")  # groups that are not the user's choice


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[FactDifference]:
    """Every fact that differs, with both values."""
    first, second = dict(_facts(before)), dict(_facts(after))
    return [
        FactDifference(*key, first.get(key, NOT_THERE), second.get(key, NOT_THERE))
        for key in dict.fromkeys((*first, *second))
        if first.get(key, NOT_THERE) != second.get(key, NOT_THERE)
    ]


def machine_of(machine: Mapping[str, Any]) -> dict[str, Any]:
    """What identifies a machine's kind: equal machines of a cluster are equal here."""
    gpus = machine.get("gpus") or []
    return {
        "cpu": machine.get("cpu"),
        "num_cores": machine.get("num_cores"),
        "gpus": [gpu.get("name") for gpu in gpus if isinstance(gpu, Mapping)],
    }


def sentence(difference: FactDifference) -> str:
    what = difference.name if difference.name == difference.group else f"{difference.group}, {difference.name}"
    return f"{what}: recorded {difference.before}, now {difference.after}"


def _facts(facts: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], str]]:
    for (group, name), value in _raw(facts):
        yield (group, name), plain(value)


def _raw(facts: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], Any]]:
    machine = facts.get("machine") or {}
    for name in ("cpu", "num_cores", "memory_bytes", "platform"):
        yield ("machine", name), machine.get(name)
    gpus = [gpu for gpu in machine.get("gpus") or [] if isinstance(gpu, Mapping)]
    yield ("machine", "gpus"), [f"{gpu.get('name')} ({gpu.get('memory.total')})" for gpu in gpus]
    yield ("driver", "driver"), sorted({str(gpu.get("driver_version")) for gpu in gpus})
    for name, value in (facts.get("versions") or {}).items():
        yield ("package", name), value
    yield ("commit", "commit"), facts.get("commit")
    yield ("engine", "engine"), found(facts, "engine", "name")
    for name, value in (found(facts, "engine", "versions") or {}).items():
        if (facts.get("versions") or {}).get(name) != value:
            yield ("engine", name), value
    for name in ("name", "digest"):
        yield ("model", name), found(facts, "model", name)
    for name, setting in (found(facts, "engine", "settings") or {}).items():
        if name not in OF_PLACE and name != "model":
            yield ("setting", name), found(setting, "value")
    for name, value in (facts.get("workload") or {}).items():
        if name != "input":
            yield ("workload", name), value
    levels = found(facts, "load", "levels")
    yield ("load", "load"), facts.get("load") if levels is None else levels
    yield ("load", "slo"), facts.get("slo")
