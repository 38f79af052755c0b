from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.bench.engines import EngineFailure
from headrace.bench.sweep.result import Failure
from headrace.tune.goal import BatchGoal
from headrace.tune.trial import Asked, TrialRunner
from tests.tune.builders import SimulatedEngine, workload
from tests.tune.surfaces import flat

ASKED = Asked("race", 1, 0, 64)


def a_runner(engine: SimulatedEngine) -> TrialRunner:
    return TrialRunner(engine, workload(), BatchGoal(), clock=engine.clock, check=lambda running, requests: None)


def test_a_trial_says_how_long_it_and_its_start_took() -> None:
    engine = SimulatedEngine(flat, noise=0.0)
    outcome = a_runner(engine).run({}, ASKED)
    assert not isinstance(outcome, Failure)
    trial, facts = outcome
    assert trial.num_requests == 64 and trial.start_s == 5.0
    assert trial.seconds == engine.clock.now > 5.0
    assert facts.values["max_num_seqs"] == 128


def test_equal_settings_use_the_same_engine() -> None:
    engine = SimulatedEngine(flat)
    runner = a_runner(engine)
    runner.run({}, ASKED)
    outcome = runner.run({}, ASKED)
    assert not isinstance(outcome, Failure) and outcome[0].start_s is None
    assert len(engine.started) == 1


def test_other_settings_restart_it_unless_it_can_change() -> None:
    for can_reconfigure, num_starts in ((False, 2), (True, 1)):
        engine = SimulatedEngine(flat, can_reconfigure=can_reconfigure)
        runner = a_runner(engine)
        runner.run({}, ASKED)
        runner.run({"max_num_seqs": 64}, ASKED)
        assert len(engine.started) == num_starts
        runner.close()
        assert engine.num_alive == 0


def test_a_failure_is_returned_with_its_stage_and_the_engine_is_stopped() -> None:
    def breaks(settings: Mapping[str, Any]) -> EngineFailure | None:
        return EngineFailure("oom", "out of memory under load")

    engine = SimulatedEngine(flat, breaks=breaks)
    outcome = a_runner(engine).run({}, ASKED)
    assert isinstance(outcome, Failure) and (outcome.stage, outcome.kind) == ("measurement", "oom")
    assert engine.num_alive == 0


def test_a_start_that_fails_is_returned_too() -> None:
    engine = SimulatedEngine(flat, refuses=lambda settings: EngineFailure("bad_setting", "no"))
    outcome = a_runner(engine).run({}, ASKED)
    assert isinstance(outcome, Failure) and (outcome.stage, outcome.kind) == ("start", "bad_setting")


def test_a_setting_that_is_not_in_force_is_a_failure() -> None:
    class Stubborn(SimulatedEngine):
        def start(self, settings: Mapping[str, Any], *, serves: bool) -> Any:
            return super().start({**settings, "max_num_seqs": 1}, serves=serves)

    outcome = a_runner(Stubborn(flat)).run({"max_num_seqs": 64}, ASKED)
    assert isinstance(outcome, Failure) and outcome.kind == "not in force"
