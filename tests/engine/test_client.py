from __future__ import annotations

import pytest

from headrace.config import EngineConfig
from headrace.engine.client import EngineClient
from headrace.errors import EngineDeadError
from tests.engine import cores
from tests.engine.process.process_tools import Inbox, make_request


def make_client(inbox: Inbox) -> EngineClient:
    core = cores.faulty(EngineConfig(model="pretend"), lambda stage: None).core
    return EngineClient(core, inbox.deliver)


def test_an_exception_of_one_request_ends_only_that_request() -> None:
    inbox = Inbox()
    client = make_client(inbox)
    client.submit(make_request("breaks", cores.BREAK))
    client.submit(make_request("well"))
    errors = {event.request_id: event.error for event in inbox.until_finished("breaks", "well") if event.finish_reason}
    assert errors == {"breaks": "the engine could not take the request (KeyError); its log says more", "well": None}
    client.close()
    assert client.failure is None


def test_after_a_failure_waiting_requests_are_told_and_new_ones_refused() -> None:
    inbox = Inbox()
    client = make_client(inbox)
    client.submit(make_request("fatal", cores.RAISE))
    assert inbox.next() == []
    assert str(client.failure) == "the device is on fire"
    with pytest.raises(EngineDeadError, match="the device is on fire"):
        client.submit(make_request("late"))
    client.close()


def test_closing_leaves_unfinished_requests_unfinished() -> None:
    inbox = Inbox()
    client = make_client(inbox)
    client.close()
    client.submit(make_request("late"))
    assert client.stats.scheduler.num_steps == 0
