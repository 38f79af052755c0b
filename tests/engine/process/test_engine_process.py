from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.engine.client import EngineClient
from headrace.engine.process import wire
from headrace.engine.process.channel import Channel
from headrace.engine.process.engine_process import EngineProcess, child_environment
from headrace.errors import ConfigError, EngineDeadError, RequestError
from headrace.startup import StartupStage, ignore_stage
from headrace.types import Readout, Request, SamplingParams, SequenceEvent
from tests.engine import cores
from tests.engine.process.process_tools import MAX_WAIT_S, Inbox, make_request, wait_until

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
CONFIG = EngineConfig(model="pretend", max_num_seqs=4)
PARENT = """
import sys
from headrace.config import EngineConfig
from headrace.engine.process.engine_process import EngineProcess

process = EngineProcess(lambda events: None, lambda: None, core="tests.engine.cores:" + sys.argv[1])
process.start(EngineConfig(model="pretend"))
if sys.argv[1] == "faulty":
    process.wait_until_ready()
print(process.pid, "torch" in sys.modules, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True, scope="module")
def _cores_can_be_imported() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        yield


def start(inbox: Inbox, core: str = "faulty", **options: object) -> EngineProcess:
    process = EngineProcess(
        inbox.deliver,
        lambda: inbox.deliver([]),
        core=f"tests.engine.cores:{core}",
        **options,  # type: ignore[arg-type]
    )
    process.start(CONFIG)
    return process


@pytest.fixture(scope="module")
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture(scope="module")
def process(inbox: Inbox) -> Iterator[EngineProcess]:
    process = start(inbox)
    process.wait_until_ready()
    yield process
    process.close()


def by_sequence(events: list[SequenceEvent]) -> dict[tuple[str, int], list[object]]:
    found: dict[tuple[str, int], list[object]] = {}
    for event in events:
        entry = found.setdefault((event.request_id, event.index), [])
        entry += event.token_ids.tolist()
        if event.finish_reason is not None:
            entry += [event.finish_reason, event.stop_token_id, event.num_cached_tokens]
    return found


def test_settings_arrive_with_their_reasons(process: EngineProcess) -> None:
    assert process.wait_until_ready().settings == cores.settings_of(CONFIG)


def test_tokens_are_those_of_an_engine_on_a_thread(process: EngineProcess, inbox: Inbox) -> None:
    requests = [
        make_request(f"request {i}", 10 + i, seed=i, max_tokens=5 + i, stop_token_ids=[i], ignore_eos=bool(i % 2))
        for i in range(12)
    ]
    beside = Inbox()
    client = EngineClient(cores.faulty(CONFIG, ignore_stage).core, beside.deliver)
    for request in requests:
        process.submit(request)
        client.submit(request)
    names = [request.request_id for request in requests]
    assert by_sequence(inbox.until_finished(*names)) == by_sequence(beside.until_finished(*names))
    client.close()


def test_readouts_arrive(process: EngineProcess, inbox: Inbox) -> None:
    prompt = np.arange(30, 40, dtype=np.int32)
    targets = np.array([35, 39], np.int32)
    process.submit(Request("score", prompt, SamplingParams(seed=0), readout=Readout(targets=targets)))
    (event,) = inbox.until_finished("score")
    assert event.readout is not None and event.readout.tolist() == [-35.0, -39.0]


def test_a_request_that_could_never_run_is_refused_at_once(process: EngineProcess) -> None:
    long = Request("long", np.arange(300, dtype=np.int32), SamplingParams())
    with pytest.raises(RequestError, match="300 tokens") as caught:
        process.submit(long)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(RequestError, match="the vocabulary has 1000 tokens"):
        process.submit(make_request("bias", logit_bias={1000: 1.0}))
    with pytest.raises(RequestError, match="at most 16 can be kept out"):
        process.submit(make_request("stops", stop_token_ids=list(range(16)), min_tokens=1))


def test_a_request_that_cannot_be_encoded_is_refused_at_once(process: EngineProcess) -> None:
    with pytest.raises(RequestError, match="cannot be sent"):
        process.submit(make_request("\ud800"))
    with pytest.raises(RequestError, match="cannot be sent"):
        process.submit(Request("huge", np.arange(3), SamplingParams(), priority=2**70))


def test_an_exception_over_one_request_ends_that_one_only(process: EngineProcess, inbox: Inbox) -> None:
    process.submit(make_request("breaks", cores.BREAK))
    process.submit(make_request("well"))
    errors = {event.request_id: event.error for event in inbox.until_finished("breaks", "well") if event.finish_reason}
    assert errors == {"breaks": "the engine could not take the request (KeyError); its log says more", "well": None}


def test_a_refusal_by_the_engine_arrives_as_an_event(process: EngineProcess, inbox: Inbox) -> None:
    process.submit(make_request("odd", cores.SECRETLY_REFUSED))
    (event,) = inbox.until_finished("odd")
    assert (event.finish_reason, event.error) == ("abort", "only the engine knows why not")


@contextmanager
def bare_child() -> Iterator[tuple[Channel, subprocess.Popen[bytes]]]:
    """The child without `EngineProcess`: the test itself is at the other end of the channel."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-P", "-m", "headrace.engine.process.child", str(theirs.fileno()), str(os.getpid())]
        child = subprocess.Popen(
            [*command, "1.0", "tests.engine.cores:faulty"], pass_fds=[theirs.fileno()], env=child_environment()
        )
    channel = Channel(ours)
    channel.send(wire.encode(wire.Start(CONFIG)))
    try:
        next(message for message in messages(channel) if isinstance(message, wire.Ready))
        yield channel, child
    finally:
        channel.close()
        assert child.wait(MAX_WAIT_S) == 0


def messages(channel: Channel) -> Iterator[wire.EngineMessage]:
    while frames := channel.receive():
        yield from map(wire.decode_message, frames)


def test_a_request_that_cannot_be_decoded_is_answered_too() -> None:
    with bare_child() as (channel, _):
        channel.send(wire.encode(wire.Submit("garbled", msgspec.Raw(msgspec.msgpack.encode({"request_id": 5})))))
        steps = (message for message in messages(channel) if isinstance(message, wire.Step))
        (event,) = next(events for events in map(wire.StepReader().events, steps) if events)
    assert event.error is not None and event.error.startswith("the engine could not take the request (ValidationError)")


def test_stats_arrive_without_a_request(process: EngineProcess, inbox: Inbox) -> None:
    before = process.stats.scheduler.num_finished
    process.submit(make_request("counted"))
    inbox.until_finished("counted")
    wait_until(lambda: process.stats.scheduler.num_finished == before + 1)
    wait_until(lambda: process.stats.scheduler.num_blocks_held == 0)
    assert process.stats.host_seconds > 0.0


def test_abort_and_the_other_commands_reach_it(process: EngineProcess, inbox: Inbox) -> None:
    process.limit_running(1)
    for name in ("first", "second"):
        process.submit(make_request(name, max_tokens=200, ignore_eos=True))
    process.abort("second")
    process.abort("nobody")
    last = {event.request_id: event.finish_reason for event in inbox.until_finished("first", "second")}
    assert last == {"first": "length", "second": "abort"}
    wait_until(lambda: process.stats.scheduler.num_blocks_idle > 0)
    process.forget_prefixes()
    wait_until(lambda: process.stats.scheduler.num_blocks_idle == 0)
    process.limit_running(None)


def test_a_failed_engine_gives_the_reason_and_refuses_later_requests(
    capfd: pytest.CaptureFixture[str],
) -> None:
    inbox = Inbox()
    process = start(inbox)
    process.wait_until_ready()
    process.submit(make_request("fatal", cores.RAISE))
    assert inbox.next() == []
    assert isinstance(process.failure, EngineDeadError)
    assert str(process.failure) == "RuntimeError: the device is on fire"
    with pytest.raises(EngineDeadError, match="the device is on fire"):
        process.submit(make_request("late"))
    process.close()
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "engine: ERROR headrace.engine.process.child: the engine has failed"
    assert lines[-1] == "engine: RuntimeError: the device is on fire"


@pytest.mark.parametrize(
    "core, error, message",
    [
        ("refuses_config", ConfigError, "^max_num_seqs of 7 is an odd number; try 8$"),
        ("breaks", EngineDeadError, "^it could not start: RuntimeError: no such device$"),
        ("no_such_core", EngineDeadError, "it could not start: AttributeError: .*no_such_core"),
    ],
)
def test_a_start_that_fails_raises_what_failed(core: str, error: type[Exception], message: str) -> None:
    inbox = Inbox()
    process = start(inbox, core)
    with pytest.raises(error, match=message):
        process.wait_until_ready()
    process.close()


def test_a_process_whose_front_still_downloads_imports_torch_and_waits(inbox: Inbox) -> None:
    stages: list[StartupStage] = []
    process = EngineProcess(inbox.deliver, lambda: None, core="tests.engine.cores:faulty", report=stages.append)
    wait_until(lambda: [stage.name for stage in stages if stage.is_finished] == ["import"])
    process.start(CONFIG)
    assert process.wait_until_ready().settings is not None
    process.close()


def test_closing_during_the_start_leaves_nothing_behind() -> None:
    stages: list[StartupStage] = []
    before = len(os.listdir("/dev/fd"))
    threads = threading.active_count()
    process = start(Inbox(), "never_ready", report=stages.append)
    pid = process.pid
    assert pid is not None
    wait_until(lambda: [stage.name for stage in stages] == ["import", "import", "compile"])
    with pytest.raises(EngineDeadError, match="not started yet"):
        process.submit(make_request("early"))
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert len(os.listdir("/dev/fd")) == before
    assert threading.active_count() == threads
    with pytest.raises(EngineDeadError, match="the engine has stopped: it was closed"):
        process.abort("anything")
    process.close()


def test_a_hung_process_writes_its_stacks_when_asked(capfd: pytest.CaptureFixture[str]) -> None:
    process = start(Inbox(), heartbeat_s=0.001)
    process.wait_until_ready()
    process.submit(make_request("stuck", cores.HANG))
    wait_until(lambda: process.health.has_work)
    pid, log = process.pid, []
    assert pid is not None

    def has_written_stacks() -> bool:
        os.kill(pid, signal.SIGUSR1)
        log.append(capfd.readouterr().err)
        return "cores.py" in "".join(log) and "in submit" in "".join(log)

    wait_until(has_written_stacks)
    process.kill("it has said enough")
    assert str(process.failure) == "it has said enough"


def test_it_ends_when_its_front_closes_the_socket() -> None:
    with bare_child() as (channel, child):
        channel.send(wire.encode(wire.submission(make_request("stuck", cores.HANG))))
        channel.hang_up()
        assert child.wait(MAX_WAIT_S) == 0


@pytest.mark.parametrize("core", ["faulty", "never_ready"])
def test_it_ends_when_its_front_is_killed(core: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, core],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
    )
    assert parent.stdout is not None
    pid, has_torch = parent.stdout.readline().split()
    assert int(pid) != parent.pid
    assert has_torch == "False"
    parent.send_signal(signal.SIGKILL)
    parent.communicate(timeout=60)  # the engine has stderr too, which is at its end only when both are gone


def test_stop_signals_to_the_process_group_are_ignored(process: EngineProcess, inbox: Inbox) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGTERM)
    process.submit(make_request("after signals"))
    inbox.until_finished("after signals")
