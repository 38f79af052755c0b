"""What a search is asked for: engine, workload, goal and budget; and what follows from it for journal and record."""

from __future__ import annotations

import json
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from typing import Any

from headrace.bench.engines import Engine
from headrace.bench.record import SCHEMA
from headrace.bench.sweep.check import check_answer
from headrace.bench.sweep.configs import HASH_LEN
from headrace.bench.sweep.run import Check
from headrace.bench.workloads import Workload
from headrace.hardware.describe import current_commit, package_versions
from headrace.tune.goal import Goal
from headrace.tune.knobs import Demand, Space
from headrace.tune.shortlist import Forecast
from headrace.tune.trial import EngineFacts


@dataclass(frozen=True, kw_only=True)
class Tune:
    """What to search. `identity` is what a stored trial must share to be used again besides what stands here."""

    engine: Engine
    workload: Workload
    goal: Goal
    budget_s: float
    known: Collection[str]  # names of the engine's settings
    common: Mapping[str, Any] = field(default_factory=dict)  # model, and what the user has fixed
    searched: Mapping[str, Sequence[Any]] | None = None
    allows_quality_change: bool = False
    can_change_settings: bool = True  # False: a server that runs already
    identity: Mapping[str, Any] = field(default_factory=dict)
    retries_failed: bool = False
    check: Check = check_answer
    forecast: Callable[[Mapping[str, Any]], Forecast | None] = lambda machine: None  # of a machine, see forecast.py
    clock: Callable[[], float] = time.monotonic


def space_of(tune: Tune, machine: Mapping[str, Any], in_force: Mapping[str, Any]) -> Space:
    """What the knobs are derived from, once the default has said which settings are in force."""
    gpus = machine.get("gpus") or []
    device = str(in_force.get("device", "cuda" if gpus else "cpu"))
    return Space(
        engine=tune.engine.name,
        serves=tune.goal.serves,
        in_force=in_force,
        demand=Demand.of(tune.workload),
        known=tune.known,
        fixed=set(tune.common),
        allows_quality_change=tune.allows_quality_change,
        is_gpu=bool(gpus) and "cpu" not in device,
        num_gpus=len(gpus),
        searched=tune.searched,
    )


def record_facts(
    tune: Tune,
    machine: Mapping[str, Any],
    default: EngineFacts | None,
    started_at: datetime,
    warnings: Sequence[str],
) -> dict[str, Any]:
    """The first keys of the record, as of a sweep's."""
    found = default or EngineFacts()
    return {
        "schema": SCHEMA,
        "kind": "tune",
        "id": f"{started_at:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}",
        "started_at": started_at.isoformat(timespec="seconds"),
        "command": shlex.join(["headrace", *sys.argv[1:]]),
        "engine": {"name": tune.engine.name, "versions": dict(found.versions)},
        "model": dict(found.model),
        "workload": tune.workload.facts,
        "load": None,
        "slo": None if tune.goal.slo is None else tune.goal.slo.text,
        "machine": dict(machine),
        "versions": package_versions(),
        "commit": current_commit(),
        "common_settings": dict(tune.common),
        "warnings": list(warnings),
    }


def identity_of(tune: Tune, machine: Mapping[str, Any]) -> str:
    """What a stored trial must share to be used again."""
    facts = {
        "engine": tune.engine.name,
        "goal": tune.goal.name,
        "slo": None if tune.goal.slo is None else tune.goal.slo.text,
        "workload": tune.workload.spec.hash,
        "num_requests": len(tune.workload.requests),
        "machine": [machine["cpu"], machine["num_cores"], [gpu["name"] for gpu in machine["gpus"]]],
        "budget_s": tune.budget_s,
        "common": dict(tune.common),
        "searched": None if tune.searched is None else {name: list(values) for name, values in tune.searched.items()},
        "allows_quality_change": tune.allows_quality_change,
        **tune.identity,
    }
    return sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:HASH_LEN]
