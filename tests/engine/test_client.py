from __future__ import annotations

import pytest

from headrace.config import EngineConfig
from headrace.engine.client import EngineClient
from headrace.errors import EngineDeadError
from headrace.startup import ignore_stage
from tests.engine import cores
from tests.engine.process.process_tools import Inbox, make_request


def make_client(inbox: Inbox) -> EngineClient:
    core = cores.faulty(EngineConfig(model="pretend"), ignore_stage).core
    return EngineClient(core, inbox.deliver)


def test_an_exception_of_one_request_ends_only_that_request() -> None:
    inbox = Inbox()
    client = make_client(inbox)
    client.submit(make_request("breaks", cores.BREAK))
    client.submit(make_request("well"))
    errors = {event.request_id: event.error for event in inbox.until_finished("breaks", "well") if event.finish_reason}
    assert errors == {"breaks": "the engine could not take the request (KeyError); its log says more", "well": None}
    assert client.failure is None
    client.close()


def test_after_a_failure_waiting_requests_are_told_and_new_ones_refused() -> None:
    inbox = Inbox()
    client = make_client(inbox)
    client.submit(make_request("fatal", cores.RAISE))
    assert inbox.next() == []
    assert str(client.failure) == "the device is on fire"
    with pytest.raises(EngineDeadError, match="the device is on fire"):
        client.submit(make_request("late"))
    client.close()


def test_after_closing_requests_are_refused_and_closing_again_does_nothing() -> None:
    inbox = Inbox()
    client = make_client(inbox)
    client.close()
    with pytest.raises(EngineDeadError, match="the engine has stopped: it was closed"):
        client.submit(make_request("late"))
    client.close()
    assert client.stats.scheduler.num_steps == 0


def test_a_failure_before_closing_is_the_one_that_is_reported() -> None:
    inbox = Inbox()
    client = make_client(inbox)
    client.submit(make_request("fatal", cores.RAISE))
    assert inbox.next() == []
    client.close()
    assert str(client.failure) == "the device is on fire"
