"""The self-check of a server: a few requests, answered by its engine before it listens.

It shows that the settings in force can answer. Its latencies are recorded and not judged: four requests of a fresh
engine say little about speed, for which `headrace bench` is there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from headrace.bench.load import ClosedLoop
from headrace.bench.outcomes import Outcome
from headrace.bench.summary import summarize
from headrace.bench.workloads import Workload, WorkloadSpec, build
from headrace.checkpoint.create import from_records, verification, with_hub_digest
from headrace.checkpoint.decision import decision
from headrace.engine.in_force import shape_of
from headrace.errors import HeadraceError
from headrace.hardware.describe import current_commit, machine_facts, package_versions
from headrace.types import SamplingParams

if TYPE_CHECKING:
    from headrace.engine.async_engine import AsyncEngine

NUM_REQUESTS, INPUT_LEN, OUTPUT_LEN = 4, 8, 8
TIMEOUT_S = 300.0
JUDGED = ("success_share",)


async def self_check(engine: AsyncEngine, model: str, settings: Mapping[str, Any], *, command: str) -> dict[str, Any]:
    """Have a few requests answered. Returns the facts of a checkpoint."""
    from headrace.bench.engines.shapes import model_identity

    spec = WorkloadSpec(
        name="random", num_requests=NUM_REQUESTS, input_len=INPUT_LEN, output_len=OUTPUT_LEN, temperature=0.0
    )
    workload = build(spec.for_vocabulary(engine.spec.vocab_size))
    load = ClosedLoop(concurrency=NUM_REQUESTS, num_requests=NUM_REQUESTS)
    started_at, started = datetime.now(UTC), time.monotonic()
    outcomes = await asyncio.gather(*(_answer(engine, workload, i, started) for i in range(NUM_REQUESTS)))
    summary = summarize(outcomes, time.monotonic() - started)
    versions = package_versions()
    record = {
        "kind": "online",
        "started_at": started_at.isoformat(timespec="seconds"),
        "command": command,
        "engine": {
            "name": "headrace",
            "versions": {"headrace": versions["headrace"]},
            "launch_command": command,
            "settings": settings,
        },
        "model": {**await asyncio.to_thread(model_identity, model), **shape_of(engine.spec)},
        "workload": workload.facts,
        "load": {"levels": [load.as_json()], "warms_up": False, "timeout_s": TIMEOUT_S, "compatibility": "vllm"},
        "levels": [{"load": load.as_json(), "summary": summary, "warnings": []}],
        "machine": await asyncio.to_thread(machine_facts),
        "versions": versions,
        "commit": await asyncio.to_thread(current_commit),
    }
    facts = with_hub_digest(from_records([record]))
    reason = f"served with these settings; self-check: {summary['num_ok']} of {NUM_REQUESTS} requests answered"
    loads = facts["verification"]["loads"]
    return facts | {
        "kind": "serve",
        "decision": decision(reason),
        "verification": verification("online", loads, judged=JUDGED),
        "warnings": [f"self-check: {error}" for error in summary["errors"]],
    }


async def _answer(engine: AsyncEngine, workload: Workload, index: int, started: float) -> Outcome:
    request = workload.requests[index]
    sent, first, times = time.monotonic() - started, None, list[float]()
    num_tokens, error = 0, None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            assert isinstance(request.prompt, list)
            async for output in engine.generate(request.prompt, SamplingParams(**workload.sampling(request))):
                times.append(time.monotonic() - started)
                first = first if first is not None else times[-1]
                num_tokens = sum(len(answer.token_ids) for answer in output.outputs)
    except (HeadraceError, TimeoutError) as failure:
        error = " ".join(str(failure).split()) or type(failure).__name__
    return Outcome(
        index=index,
        due_s=sent,
        sent_s=sent,
        end_s=time.monotonic() - started,
        status="ok" if error is None else "failed",
        first_s=first,
        num_prompt_tokens=request.num_prompt_tokens or 0,
        num_output_tokens=num_tokens,
        chunk_s=times,
        error=error,
    )
