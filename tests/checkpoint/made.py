"""Small checkpoints for tests: of fake engines, and of synthetic records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.bench.offline import measure_offline
from headrace.bench.sweep import Sweep, parse_configs, run_sweep
from headrace.bench.workloads import WorkloadSpec, build
from headrace.checkpoint.create import from_records
from headrace.checkpoint.document import Checkpoint, write_checkpoint
from tests.bench.engines_for_tests import FakeEngine

WORKLOAD = build(WorkloadSpec(name="random", num_requests=4, input_len=8, output_len=4))
STEADY = (1.0, 1.01, 0.99)


def engine(seconds: Sequence[float] = STEADY) -> FakeEngine:
    """Rounds take these seconds, in order. The first run is the warm-up."""
    turns = iter([1.0, *seconds])
    return FakeEngine(lambda settings, workload: next(turns))


def offline_facts(seconds: Sequence[float] = STEADY, **settings: Any) -> dict[str, Any]:
    with engine(seconds).start(settings, serves=False) as running:
        record = measure_offline(running, WORKLOAD, num_rounds=len(seconds))
    return from_records([record])


def checkpoint(path: Path, seconds: Sequence[float] = STEADY, **settings: Any) -> Checkpoint:
    return write_checkpoint(offline_facts(seconds, **settings), path)


def sweep_record(tmp_path: Path, configs: Sequence[Mapping[str, Any]], seconds: Mapping[Any, Sequence[float]]) -> Any:
    """A sweep whose configs take the seconds of their max_num_seqs, round by round."""
    # Each start has one more run, the check of the first answer; each round has a warm-up.
    turns = {key: iter([1.0, *(each for value in values for each in (1.0, value))]) for key, values in seconds.items()}

    sweep = Sweep(
        configs=parse_configs(json.dumps(list(configs)), "configs"),
        engine=FakeEngine(lambda settings, workload: next(turns[settings.get("max_num_seqs")])),
        workload=WORKLOAD,
        measure=lambda running, workload: measure_offline(running, workload, num_rounds=1),
        serves=False,
        num_rounds=3,
    )
    return run_sweep(sweep, tmp_path / "s.journal").as_record()
