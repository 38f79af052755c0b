from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from headrace.errors import ConfigError
from headrace.profile.remote import RemoteServer, overhead_of, profile_server


class LikeVllm(BaseHTTPRequestHandler):
    """Answers as vLLM's server does: 200 without a body."""

    seen: list[tuple[str, str | None]]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        type(self).seen.append((self.path, self.headers.get("Authorization")))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def vllm() -> Iterator[tuple[str, type[LikeVllm]]]:
    handler = type("Handler", (LikeVllm,), {"seen": []})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_vllm_server_is_started_and_stopped(vllm: tuple[str, type[LikeVllm]]) -> None:
    url, handler = vllm
    lines: list[str] = []
    found = profile_server(RemoteServer(url + "/", "secret"), seconds=0.01, print_line=lines.append)
    assert found.report is None
    assert handler.seen == [("/start_profile", "Bearer secret"), ("/stop_profile", "Bearer secret")]
    assert any("no Headrace server" in line for line in lines)


def test_an_address_that_does_not_answer_is_an_error() -> None:
    with pytest.raises(ConfigError, match="does not answer"):
        RemoteServer("http://127.0.0.1:1").start()
    with pytest.raises(ConfigError, match="must start with http"):
        RemoteServer("file:///etc/passwd")
    with pytest.raises(ConfigError, match="is no address"):
        RemoteServer("http://x:port")


def test_a_server_without_the_route_is_an_error(vllm: tuple[str, type[LikeVllm]]) -> None:
    server = RemoteServer(vllm[0])
    with pytest.raises(ConfigError, match="answered 501"):
        server._ask("GET", "/start_profile", None, timeout_s=5)


def test_the_overhead_of_a_server_is_that_of_the_time_between_two_profiles() -> None:
    first = {"num_finished_steps": 100, "resumed_at": 10.0}
    started = {"num_finished_steps": 300, "at": 12.0}
    stopped = {"num_finished_steps": 480, "stopped_at": 14.0}
    overhead = overhead_of(first, started, stopped)
    assert overhead is not None
    assert overhead.steps_per_s_off == (100.0,) and overhead.steps_per_s_on == (90.0,)
    assert overhead_of({}, started, stopped) is None
