"""SageMaker's sessions: opened, used and closed at /invocations."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.server.endpoints.sagemaker import CLOSED_SESSION, NEW_SESSION, _handle_session
from headrace.server.http.errors import ApiError
from headrace.server.http.exchange import Exchange
from headrace.server.sagemaker_sessions import LIFETIME_S, SESSION, VARIABLE, SageMakerSessions


def ask(sessions: SageMakerSessions | None, body: dict[str, Any], session: str | None = None) -> dict[str, str] | None:
    """The headers of the answer; None if the request is for another handler."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("the body was read")

    headers = [] if session is None else [(SESSION.lower().encode(), session.encode())]
    exchange = Exchange({"path": "/invocations", "headers": headers}, receive, send)
    if not asyncio.run(_handle_session(sessions, exchange, body)):
        return None
    return {name.decode(): value.decode() for name, value in sent[0]["headers"]}


def test_a_session_is_opened_used_and_closed_once() -> None:
    sessions = SageMakerSessions.of({VARIABLE: "True"})
    opened = ask(sessions, {"requestType": "NEW_SESSION"})
    assert opened is not None
    name, _, expires = opened[NEW_SESSION.lower()].partition("; ")
    assert expires.startswith("Expires=") and expires.endswith("Z")
    assert ask(sessions, {"prompt": "hi"}, name) is None
    closed = ask(sessions, {"requestType": "CLOSE"}, name)
    assert closed is not None and closed[CLOSED_SESSION.lower()] == name
    for body in ({"requestType": "CLOSE"}, {"prompt": "hi"}):
        with pytest.raises(RequestError, match="session not found"):
            ask(sessions, body, name)


@pytest.mark.parametrize("body", [{"requestType": "NEW_SESSION", "more": 1}, {"requestType": "OPEN"}])
def test_a_request_about_sessions_has_nothing_else(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="requestType"):
        ask(SageMakerSessions(), body)


def test_a_close_without_a_name_is_refused_with_the_status_of_sagemaker() -> None:
    with pytest.raises(ApiError, match="invalid session_id") as caught:
        ask(SageMakerSessions(), {"requestType": "CLOSE"})
    assert caught.value.status == 424


def test_sessions_are_off_by_default_and_said_so() -> None:
    sessions = SageMakerSessions.of({})
    assert sessions is None and ask(sessions, json.loads('{"prompt": "hi"}')) is None
    with pytest.raises(RequestError, match=VARIABLE):
        ask(sessions, {"requestType": "NEW_SESSION"})


def test_a_session_ends_by_itself() -> None:
    now = [100.0]
    sessions = SageMakerSessions(clock=lambda: now[0])
    name, end = sessions.open()
    assert end == 100.0 + LIFETIME_S
    sessions.check(name)
    now[0] = end
    with pytest.raises(RequestError, match="session not found"):
        sessions.check(name)
