"""The parts of uvicorn that the server uses and that are not public API. A new uvicorn must still have them."""

from __future__ import annotations

import inspect

import pytest
import uvicorn
from uvicorn.protocols.http import httptools_impl
from uvicorn.server import ServerState

METHODS = ("_start_asgi_task", "_unset_keepalive_if_required", "_unsupported_upgrade_warning", "on_response_complete")
CYCLE_FIELDS = (
    *("chunked_encoding", "disconnected", "flow", "keep_alive", "message_event"),
    *("response_complete", "response_started", "transport"),
)


@pytest.mark.parametrize("name", METHODS)
def test_the_protocol_has_the_methods_that_we_override(name: str) -> None:
    assert callable(getattr(httptools_impl.HttpToolsProtocol, name))


@pytest.mark.parametrize("name", CYCLE_FIELDS)
def test_a_response_cycle_has_the_fields_that_we_read(name: str) -> None:
    assert f"self.{name}" in inspect.getsource(httptools_impl.RequestResponseCycle.__init__)


def test_status_lines_are_bytes_by_status_code() -> None:
    assert httptools_impl.STATUS_LINE[431].startswith(b"HTTP/1.1 431 ")


def test_signal_handlers_can_be_replaced_and_tasks_and_connections_counted() -> None:
    assert callable(uvicorn.Server.capture_signals)
    state = ServerState()
    assert state.tasks == set()
    assert state.connections == set()
