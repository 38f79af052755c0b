from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.engine.process.supervisor import EngineSupervisor, Supervision
from headrace.engine.restart_policy import SUPERVISOR_RESTARTS, RestartPolicy
from headrace.errors import ConfigError, EngineDeadError
from headrace.startup import Report, StartupStage
from headrace.types import SequenceEvent
from tests.engine import cores
from tests.engine.process.process_tools import Inbox, make_request, wait_until

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
NO_DELAY = replace(SUPERVISOR_RESTARTS, first_delay_s=0.0)
LONG_DELAY = replace(SUPERVISOR_RESTARTS, first_delay_s=1e6)
AT_ONCE = Supervision(restarts=NO_DELAY)


class Clock:
    """Stands still, or advances by a second with each call."""

    now = 0.0
    runs = False

    def __call__(self) -> float:
        self.now += self.runs
        return self.now


@pytest.fixture(autouse=True)
def _cores_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)


Start = Callable[..., EngineSupervisor]


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def failures() -> list[str]:
    """Why engines have ended, as known when `deliver` was called without events."""
    return []


@pytest.fixture
def start(inbox: Inbox, failures: list[str]) -> Iterator[Start]:
    started: list[EngineSupervisor] = []

    def deliver(events: list[SequenceEvent]) -> None:
        if not events:
            failures.append(str(started[0].failure))
        inbox.deliver(events)

    def start(
        rules: Supervision = AT_ONCE,
        core: str = "faulty",
        model: str = "pretend",
        report: Report = lambda stage: None,
    ) -> EngineSupervisor:
        supervisor = EngineSupervisor(deliver, rules, core=f"tests.engine.cores:{core}", report=report)
        started.append(supervisor)
        supervisor.start(EngineConfig(model=model))
        assert supervisor.phase == "starting"
        supervisor.wait_until_ready()
        return supervisor

    yield start
    for supervisor in started:
        supervisor.close()


def quick_checks(restarts: RestartPolicy, clock: Clock) -> Supervision:
    return Supervision(step_timeout_s=8.0, restarts=restarts, check_s=0.001, heartbeat_s=0.001, clock=clock)


def check_answers(supervisor: EngineSupervisor, inbox: Inbox) -> None:
    wait_until(lambda: supervisor.phase == "ready")
    assert supervisor.failure is None
    supervisor.submit(make_request("after"))
    inbox.until_finished("after")


def test_a_killed_engine_fails_its_requests_and_is_restarted(
    start: Start, inbox: Inbox, failures: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = start()
    first, num_files = supervisor.pid, len(os.listdir("/dev/fd"))
    assert first is not None
    supervisor.submit(make_request("stuck", cores.HANG))
    os.kill(first, signal.SIGKILL)
    assert inbox.next() == []
    assert failures == ["its process was killed (SIGKILL), by a user or because the system's memory ran out"]
    check_answers(supervisor, inbox)
    assert supervisor.num_restarts == 1
    assert "the engine is back, after restart 1" in caplog.messages
    assert supervisor.pid != first
    assert len(os.listdir("/dev/fd")) == num_files
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


@pytest.mark.slow
def test_an_engine_that_sleeps_has_no_process_and_refuses_requests_until_it_is_woken(
    start: Start, inbox: Inbox, failures: list[str]
) -> None:
    supervisor = start()
    first = supervisor.pid
    assert first is not None
    supervisor.submit(make_request("lost", cores.HANG))
    supervisor.sleep()
    supervisor.sleep()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert supervisor.phase == "asleep" and "asleep" in failures[-1]
    with pytest.raises(EngineDeadError, match="asleep") as refused:
        supervisor.submit(make_request("refused"))
    assert refused.value.code == "asleep"
    supervisor.wake_up()
    assert supervisor.pid != first and supervisor.num_restarts == 0
    inbox.clear()
    check_answers(supervisor, inbox)


def test_an_engine_that_was_woken_is_supervised_again(start: Start, inbox: Inbox) -> None:
    supervisor = start()
    supervisor.sleep()
    supervisor.wake_up()
    inbox.clear()
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    assert inbox.next() == []
    check_answers(supervisor, inbox)
    assert supervisor.num_restarts == 1


def test_the_stages_of_a_restart_are_reported_too(start: Start) -> None:
    stages: list[StartupStage] = []
    supervisor = start(report=stages.append)
    first = [stage.name for stage in stages if stage.is_finished]
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    wait_until(lambda: supervisor.phase == "ready" and supervisor.num_restarts == 1)
    assert [stage.name for stage in stages if stage.is_finished] == first * 2 == ["import", "load"] * 2


def test_during_a_restart_requests_are_refused_and_closing_does_not_wait(start: Start, inbox: Inbox) -> None:
    supervisor = start(Supervision(restarts=LONG_DELAY))
    supervisor.submit(make_request("fatal", cores.EXIT))
    assert inbox.next() == []
    assert supervisor.phase == "restarting"
    with pytest.raises(EngineDeadError, match="restarting: its process exited with status 3") as caught:
        supervisor.submit(make_request("early"))
    assert caught.value.code == "engine_restarting"
    supervisor.abort("fatal")
    supervisor.forget_prefixes()
    supervisor.close()


def test_a_restart_that_closing_ends_is_not_reported_as_a_failure(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = start()
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    wait_until(lambda: supervisor.num_restarts == 1)
    supervisor.close()
    assert "could not be restarted" not in caplog.text


def test_after_too_many_restarts_it_stays_dead(start: Start, inbox: Inbox) -> None:
    supervisor = start(Supervision(restarts=RestartPolicy(max_starts=1, first_delay_s=0.0)))
    supervisor.submit(make_request("fatal", cores.RAISE))
    assert inbox.next() == []
    wait_until(lambda: supervisor.phase == "ready")
    supervisor.submit(make_request("fatal again", cores.RAISE))
    assert inbox.next() == []
    wait_until(lambda: supervisor.phase == "dead")
    assert supervisor.num_restarts == 1
    assert "the device is on fire" in str(supervisor.failure)
    with pytest.raises(EngineDeadError, match="for good: RuntimeError: the device is on fire") as caught:
        supervisor.submit(make_request("late"))
    assert caught.value.code == "engine_dead"


def test_restarts_that_fail_count_too(start: Start, inbox: Inbox, tmp_path: Path) -> None:
    rules = Supervision(restarts=RestartPolicy(max_starts=2, first_delay_s=0.0))
    supervisor = start(rules, "breaks_the_second_time", str(tmp_path / "started"))
    supervisor.submit(make_request("fatal", cores.EXIT))
    assert inbox.next() == []
    wait_until(lambda: supervisor.phase == "dead")
    assert supervisor.num_restarts == 2
    assert "the device is still on fire" in str(supervisor.failure)


def test_a_hung_step_is_detected_and_the_engine_restarted(start: Start, inbox: Inbox, failures: list[str]) -> None:
    clock = Clock()
    supervisor = start(quick_checks(NO_DELAY, clock))
    supervisor.submit(make_request("well"))
    inbox.until_finished("well")
    supervisor.submit(make_request("stuck", cores.HANG))
    wait_until(lambda: supervisor.health.has_work)
    while not failures:  # a second after each heartbeat: the process lives, but finishes no step
        number = supervisor.health.num_heartbeats
        wait_until(lambda seen=number: bool(failures) or supervisor.health.num_heartbeats != seen)  # type: ignore[misc]
        clock.now += 1.0
    assert inbox.next() == []
    (failure,) = failures
    assert re.fullmatch(r"it finished no step for (9|10) s, although it had work", failure)
    check_answers(supervisor, inbox)
    assert supervisor.num_restarts == 1


def test_a_stopped_process_is_detected_even_without_work(start: Start, inbox: Inbox, failures: list[str]) -> None:
    clock = Clock()
    supervisor = start(quick_checks(LONG_DELAY, clock))
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGSTOP)
    clock.runs = True
    assert inbox.next() == []
    assert failures == ["its process sent no heartbeat for 9 s"]


def test_a_limit_on_running_sequences_survives_a_restart(start: Start, inbox: Inbox) -> None:
    supervisor = start()
    supervisor.limit_running(1)
    supervisor.submit(make_request("fatal", cores.EXIT))
    assert inbox.next() == []
    wait_until(lambda: supervisor.phase == "ready")
    for name in ("first", "second"):
        supervisor.submit(make_request(name, max_tokens=50, ignore_eos=True))
    order = [event.request_id for event in inbox.until_finished("first", "second")]
    assert order == sorted(order)  # one after the other


def test_a_first_start_that_fails_is_not_repeated(inbox: Inbox) -> None:
    supervisor = EngineSupervisor(inbox.deliver, AT_ONCE, core="tests.engine.cores:refuses_config")
    supervisor.start(EngineConfig(model="pretend"))
    with pytest.raises(ConfigError, match="an odd number; try 8"):
        supervisor.wait_until_ready()
    assert supervisor.num_restarts == 0
    supervisor.close()
