"""`headrace route` as a process in front of two servers of Headrace, with the openai client."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.processes

DEADLINE_S = 60.0  # ends a test that hangs


class Process:
    """A command that prints its address."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "headrace", *arguments]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        self.address = self._read_address()

    def _read_address(self) -> str:
        assert self._process.stderr is not None
        lines = []
        for line in self._process.stderr:
            lines.append(line)
            if found := re.search(r"on (http://\S+:\d+)$", line.strip()):
                return found[1]
        raise RuntimeError("".join(lines))

    def signal(self, number: signal.Signals) -> None:
        """To it and its engine."""
        os.killpg(self._process.pid, number)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        assert self._process.stderr is not None
        self._process.stderr.read()
        self._process.stderr.close()
        self._process.wait()


@contextmanager
def running(*arguments: str) -> Iterator[Process]:
    process = Process(*arguments)
    try:
        yield process
    finally:
        process.stop()


def replicas(router: Process) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{router.address}/replicas", timeout=10) as answer:
        found: list[dict[str, Any]] = json.loads(answer.read())["replicas"]
        return found


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_requests_stay_with_their_prefix_until_its_server_is_killed(tiny_directory: Path) -> None:
    serve = ("serve", str(tiny_directory), "--port", "0", "--served-model-name", "tiny", "--max-num-seqs", "8")
    with ExitStack() as stack:
        one, two = (stack.enter_context(running(*serve)) for _ in range(2))
        router = stack.enter_context(running("route", one.address, two.address, "--port", "0"))
        client = stack.enter_context(openai.OpenAI(base_url=f"{router.address}/v1", api_key="none", max_retries=0))
        assert [model.id for model in client.models.list()] == ["tiny"]

        def home_of(prompt: str) -> str:
            answer = client.completions.with_raw_response.create(model="tiny", prompt=prompt, max_tokens=4)
            assert answer.parse().usage.completion_tokens > 0  # type: ignore[union-attr]
            return answer.headers["x-headrace-replica"]

        prompts = [f"{number} " * 150 for number in range(4)]
        homes = [home_of(prompt) for prompt in prompts]
        assert len(set(homes)) == 2, "different prompts are spread"
        assert [home_of(prompt) for prompt in prompts] == homes
        chunks = client.completions.create(model="tiny", prompt=prompts[0], max_tokens=4, stream=True)
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] in ("length", "stop")

        (dying,) = [each for each in (one, two) if homes[0] in each.address]
        dying.signal(signal.SIGSTOP)  # it takes a request and does not answer
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(home_of, prompts[0])
            wait_until(lambda: [each["in_flight"] for each in replicas(router) if each["name"] == homes[0]] == [1])
            dying.signal(signal.SIGKILL)
            assert waiting.result() != homes[0], "no byte was answered: another server has it"
        assert homes[0] not in [home_of(prompt) for prompt in prompts]
        wait_until(lambda: [each["state"] for each in replicas(router)].count("up") == 1)
