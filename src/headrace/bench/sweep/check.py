"""Whether a started engine is the one that was asked for: it answers, and its settings are in force."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from headrace.bench.engines.base import EngineFailure, RunningEngine, SettingInForce
from headrace.bench.load import ClosedLoop, LoadError, run_load
from headrace.bench.workloads import Workload

TIMEOUT_S = 300.0
AUTOMATIC = (None, "auto")
# Names of the same value.
ALIASES = {"fp8_e4m3": "fp8", "half": "float16", "bf16": "bfloat16", "float": "float32"}


def check_answer(engine: RunningEngine, workload: Workload) -> None:
    """Have the first request of the workload answered. Raises EngineFailure."""
    first = workload.first(1)
    if engine.address is None:
        run = engine.run_offline(first)
        if not any(run.output_lens):
            raise EngineFailure(
                "crash", f"{engine.name} started, but its first answer has no tokens", engine.log_tail()
            )
        return
    load = ClosedLoop(concurrency=1, num_requests=1)
    try:
        result = run_load(engine.address, first, load, model_name=engine.model_name, timeout_s=TIMEOUT_S)
    except LoadError as error:
        raise EngineFailure(
            "crash", f"{engine.name} started, but did not answer the first request: {error}", engine.log_tail()
        ) from error
    outcome = result.outcomes[0]
    if not outcome.is_ok:
        raise EngineFailure(
            "crash",
            f"{engine.name} started, but its first request was {outcome.status}: {outcome.error}",
            engine.log_tail(),
        )


def not_in_force(asked: Mapping[str, Any], in_force: Mapping[str, SettingInForce]) -> list[str]:
    """Settings that the engine uses with another value than asked, each in words."""
    return [
        f"{name}: asked for {json.dumps(value)}, in force is {json.dumps(in_force[name].value, default=str)}"
        + (f" ({in_force[name].reason})" if in_force[name].reason else "")
        for name, value in asked.items()
        if name in in_force and not _is_same(value, in_force[name].value)
    ]


def not_reported(asked: Mapping[str, Any], in_force: Mapping[str, SettingInForce]) -> list[str]:
    """Settings of which the engine does not say what it uses."""
    return [name for name, value in asked.items() if name not in in_force and value not in AUTOMATIC]


def _is_same(asked: Any, used: Any) -> bool:
    """Whether a value is in force. true is not 1, 0 is not false; null and "auto" leave the choice to the engine."""
    if asked is None or asked == "auto":
        return True
    if isinstance(asked, bool) or isinstance(used, bool):
        return asked is used
    if isinstance(asked, (int, float)) and isinstance(used, (int, float)):
        return math.isclose(asked, used, rel_tol=1e-6)
    if isinstance(asked, str) and isinstance(used, str):
        return _plain(asked) == _plain(used)
    return bool(asked == used)


def _plain(text: str) -> str:
    lowered = text.strip().lower().removeprefix("torch.")
    return ALIASES.get(lowered, lowered)
