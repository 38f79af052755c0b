"""A server on two nodes whose processes are killed one after the other: it answers again, without a hand."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import psutil
import pytest

from tests.engine.nodes.test_nodes import flags, node_1, port, secret  # noqa: F401  fixtures
from tests.engine.process.process_tools import MAX_WAIT_S
from tests.engine.ranks.test_failures import has_gone, ranks_of

pytestmark = [pytest.mark.processes, pytest.mark.slow]

REQUEST = {"prompt": "hello there", "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


RESTART_S = 600.0  # on a machine that is busy with other things; a test that waits longer has failed


class Server:
    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        self._address = address

    def answer(self) -> str | None:
        """None: there is no engine now."""
        body = json.dumps(REQUEST).encode()
        request = urllib.request.Request(f"{self._address}/v1/completions", body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=MAX_WAIT_S) as answer:
                text: str = json.load(answer)["choices"][0]["text"]
                return text
        except urllib.error.HTTPError as error:
            if error.code not in (500, 503):
                raise
            return None

    @property
    def engine(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(each for each in children if "headrace.engine.process.child" in each.cmdline())


@contextmanager
def node_0(model: Path, node_port: int) -> Iterator[Server]:
    command = [sys.executable, "-m", "headrace", "serve", str(model), "--port", "0", *flags(node_port)]
    sizes = ["--max-num-seqs", "4", "--num-gpu-blocks-override", "64", "--num-threads", "1"]
    process = subprocess.Popen([*command, *sizes], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while "http://" not in (line := process.stdout.readline()):
            assert line, "".join(lines)
            lines.append(line)
        yield Server(process, "http://" + line.split("http://")[1].split()[0].rstrip("/.,"))
    finally:
        process.kill()
        process.communicate()


def answers_again(server: Server, expected: str, *, without: psutil.Process) -> None:
    """Waits until the process has gone and the server answers as before."""
    deadline = monotonic() + RESTART_S
    while not has_gone(without) or (text := server.answer()) is None:
        assert monotonic() < deadline
    assert text == expected


def test_a_server_on_two_nodes_answers_again_whichever_process_is_killed(tiny_directory: Path, port: int) -> None:  # noqa: F811
    with node_1(tiny_directory, port) as node, node_0(tiny_directory, port) as server:
        expected = server.answer()
        assert expected is not None

        engine = server.engine
        engine.kill()
        answers_again(server, expected, without=engine)

        (rank,) = ranks_of(node.pid)
        rank.kill()
        answers_again(server, expected, without=rank)
        assert node.poll() is None  # the same host all the time

        node.kill()
        with node_1(tiny_directory, port) as another:
            answers_again(server, expected, without=psutil.Process(node.pid))
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(MAX_WAIT_S) == 0
            assert another.wait(MAX_WAIT_S) == 0
