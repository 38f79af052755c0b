"""`headrace top` as a command, on a real socket."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from headrace.cli.main import main
from tests.doctor.pages import vllm_page

ALTERNATE_SCREEN, NORMAL_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"
HIDDEN_CURSOR, SHOWN_CURSOR = b"\x1b[?25l", b"\x1b[?25h"


class Handler(BaseHTTPRequestHandler):
    """A vLLM server that generates 100 tokens between two scrapes. It has a key if `key` is set."""

    key: str | None = None
    num_tokens = 0

    def do_GET(self) -> None:
        if self.path != "/metrics":
            self.send_error(404)
            return
        if self.key is not None and self.headers["Authorization"] != f"Bearer {self.key}":
            self.send_error(401)
            return
        type(self).num_tokens += 100
        body = vllm_page({"generation_tokens": self.num_tokens}, {"num_requests_running": 3}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Handler, "key", None)
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_once_prints_the_figures_of_one_interval(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", address, "--once", "--interval", "0.01"]) == 0
    text = capsys.readouterr().out
    assert "vLLM · m · answers" in text and "running     3" in text and "tokens/s" in text
    assert "missing: " in text


def test_json_has_the_figures(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", address, "--json", "--interval", "0.01"]) == 0
    document = json.loads(capsys.readouterr().out)
    figures = document["figures"]
    assert figures["generated_per_s"] == pytest.approx(100 / figures["seconds"])


def test_a_server_that_does_not_answer_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "http://127.0.0.1:9", "--once", "--interval", "0.01"]) == 1
    assert "connection refused" in capsys.readouterr().err


def test_the_key_comes_from_the_environment(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Handler, "key", "secret-1")
    assert main(["top", address, "--once", "--interval", "0.01"]) == 1
    said = capsys.readouterr().err
    assert "--api-key-env" in said and "secret-1" not in said
    monkeypatch.setenv("HEADRACE_API_KEY", "secret-1")
    assert main(["top", address, "--once", "--interval", "0.01"]) == 0
    monkeypatch.setenv("HEADRACE_API_KEY", "wrong")
    monkeypatch.setenv("OTHER", "secret-1")
    assert main(["top", address, "--once", "--interval", "0.01", "--api-key-env", "OTHER"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--interval", "0"], "--interval must be above 0"), (["--api-key-env", "NOT_SET"], "NOT_SET is not set")],
)
def test_wrong_usage_is_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(SystemExit) as stopped:
        main(["top", *arguments])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


# A test run in the background of a shell ignores SIGINT, and its children inherit that.
WITH_CTRL_C = """\
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from headrace.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_leaves_a_clean_terminal(address: str, number: signal.Signals, code: int) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    command = [sys.executable, "-c", WITH_CTRL_C, "top", address, "--interval", "0.05"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    try:
        while b"tokens/s" not in seen:
            seen += os.read(ours, 65536)
        process.send_signal(number)
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux: all other ends are closed
                break
            if not part:
                break
            seen += part
        assert process.wait(60) == code
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert ALTERNATE_SCREEN in seen and HIDDEN_CURSOR in seen
    assert seen.rindex(NORMAL_SCREEN) > seen.rindex(ALTERNATE_SCREEN)
    assert seen.rindex(SHOWN_CURSOR) > seen.rindex(HIDDEN_CURSOR)
    assert b"Traceback" not in seen


def test_it_imports_neither_torch_nor_the_engine() -> None:
    program = (
        "import sys, headrace.cli.top, headrace.top.live, headrace.top.watch\n"
        "print(sorted({'torch', 'numpy', 'tokenizers', 'headrace.engine', 'headrace.bench'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
