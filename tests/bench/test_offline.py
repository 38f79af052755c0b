"""Offline rounds: what is timed, what is kept when an engine dies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.bench.engines import EngineFailure, OfflineRun
from headrace.bench.offline import measure_offline
from headrace.bench.workloads import Workload, WorkloadSpec, build
from tests.bench.engines_for_tests import FakeRunning

SMALL = build(WorkloadSpec(name="random", num_requests=300, input_len=10, output_len=20))


def timed(*seconds: float) -> FakeRunning:
    """An engine whose warm-up takes 100 s and whose rounds take these."""
    times: Iterator[float] = iter([100.0, *seconds])
    return FakeRunning(lambda workload: next(times))


def test_the_summary_is_of_the_median_round_and_the_warm_up_is_not_timed() -> None:
    engine = timed(4.0, 1.0, 2.0)
    record = measure_offline(engine, SMALL, num_rounds=3)
    assert [each["seconds"] for each in record["rounds"]] == [4.0, 1.0, 2.0]
    assert record["summary"]["seconds"] == 2.0
    assert record["summary"]["output_tokens_per_s"] == 3000.0
    assert record["summary"]["total_tokens_per_s"] == 4500.0
    assert (record["summary"]["best_seconds"], record["summary"]["worst_seconds"]) == (1.0, 4.0)


def test_the_warm_up_is_short_and_every_round_starts_with_an_empty_cache() -> None:
    engine = timed(1.0, 1.0)
    measure_offline(engine, SMALL, num_rounds=2)
    warm_up, *rounds = engine.runs
    assert len(warm_up.requests) == 256
    assert max(request.output_len for request in warm_up.requests) == 4
    assert all(run is SMALL for run in rounds)
    assert engine.num_resets == 2


def test_a_death_in_the_second_round_keeps_the_first() -> None:
    class Dying(FakeRunning):
        def run_offline(self, workload: Workload) -> OfflineRun:
            if len(self.runs) == 2:
                raise EngineFailure("oom", "killed", log_tail="Killed")
            return super().run_offline(workload)

    record = measure_offline(Dying(lambda workload: 3.0), SMALL, num_rounds=5)
    assert [each["seconds"] for each in record["rounds"]] == [3.0]
    assert record["failure"] == {"kind": "oom", "message": "killed", "log_tail": "Killed"}
    assert record["summary"]["seconds"] == 3.0


def test_answers_of_a_wrong_length_are_not_a_result() -> None:
    class Short(FakeRunning):
        def run_offline(self, workload: Workload) -> OfflineRun:
            run = super().run_offline(workload)
            return OfflineRun(run.seconds, [1, *run.output_lens[1:]], run.prompt_lens)

    with pytest.raises(EngineFailure, match="1 of 300 answers"):
        measure_offline(Short(lambda workload: 1.0), SMALL)


def test_the_record_says_what_was_measured() -> None:
    record = measure_offline(timed(1.0), SMALL, num_rounds=1, commit="abc1234")
    assert record["schema"] == "headrace.bench/1"
    assert record["workload"]["hash"] == SMALL.spec.hash
    assert record["commit"] == "abc1234"
    assert record["engine"]["start_s"] == 1.5
    assert record["telemetry"]["processes"]["reason"].startswith("not available")
    assert any("one round" in warning for warning in record["warnings"])
