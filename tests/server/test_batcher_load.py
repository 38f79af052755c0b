"""The service of docs/python.md under ApacheBench, on a real socket."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.monitor.pages import Page
from tests.server.apache_bench import ab_command, ab_report, needs_ab

DOCS = Path(__file__).parents[2] / "docs" / "python.md"
SLOW = """
import time
from headrace import DynamicBatcher

def predict(items):
    time.sleep(0.05)
    return items

app = DynamicBatcher(predict, max_batch_size=1, max_queue_size=1, max_wait_ms=0).app()
"""

pytestmark = needs_ab


@contextmanager
def served(program: str, directory: Path) -> Iterator[str]:
    """A program with an `app`, served by uvicorn on a free port. Its address, once it answers."""
    (directory / "service.py").write_text(program)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [
            sys.executable,
            "-m",
            "uvicorn",
            "service:app",
            "--fd",
            str(listener.fileno()),
            "--log-level",
            "error",
        ]
        process = subprocess.Popen(command, cwd=directory, pass_fds=[listener.fileno()])
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            fetch(f"{address}/health")  # the socket listens already, so this waits for the start
            yield address
        finally:
            process.terminate()
            process.wait(60)


def fetch(url: str) -> str:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=120) as answer:
        text: str = answer.read().decode()
    return text


def load(address: str, directory: Path, body: str, *, num: int, concurrency: int) -> dict[str, str]:
    """What `ab` reports, by name."""
    command = ab_command(f"{address}/predict", directory, body, num=num, concurrency=concurrency)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return ab_report(done.stdout)


def example() -> str:
    (section,) = re.findall(r"### As a service\n(.*?)\n## ", DOCS.read_text(), flags=re.DOTALL)
    (program,) = re.findall(r"^```python\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    return str(program)


def test_the_documented_service_batches_the_requests_of_ab(tmp_path: Path) -> None:
    with served(example(), tmp_path) as address:
        report = load(address, tmp_path, '{"input": [101, 2023, 102]}', num=400, concurrency=16)
        page = Page(fetch(f"{address}/metrics"))
    assert (report["Complete requests"], report["Failed requests"]) == ("400", "0")
    assert "Non-2xx responses" not in report
    assert page.value("headrace:batcher_items_total") == 400
    assert page.value("headrace:batcher_batches_total") < 400  # some ran together
    assert page.value("headrace:batcher_wait_seconds_count") == 400


def test_ab_shows_refused_requests_as_such(tmp_path: Path) -> None:
    with served(SLOW, tmp_path) as address:
        report = load(address, tmp_path, '{"input": 1}', num=100, concurrency=16)
        page = Page(fetch(f"{address}/metrics"))
    refused = int(report["Non-2xx responses"])
    assert report["Complete requests"] == "100"
    assert page.value("headrace:batcher_refused_total") == refused > 0
    assert page.value("headrace:batcher_items_total") == 100 - refused
