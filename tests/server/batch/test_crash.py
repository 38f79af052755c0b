"""A real server is killed with SIGKILL at named steps and at random moments. Each line is answered exactly once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import openai
import pytest

from tests.server.batch.batch_server import COMPLETIONS, create, line, results, upload, wait_for

pytestmark = pytest.mark.crash

NUM_LINES = 30
LINES = [line(str(number), max_tokens=8, ignore_eos=True) for number in range(NUM_LINES)]
IDS = {each["custom_id"] for each in LINES}
ROOT = Path(__file__).parents[3]
DIED_S = 60.0  # for a server to reach the step at which it dies


class Killed(Exception):
    """The server has died while the client waited for it."""


@contextmanager
def running(
    model: Path, directory: Path, *, crash_at: str = "", computes: bool = True
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its address. `computes`: with a model, which takes longer to start."""
    command = [sys.executable, "-m", *(["headrace", "serve"] if computes else ["tests.server.fake_serve"])]
    command += [str(model), "--served-model-name", "tiny", "--port", "0", "--batch-dir", str(directory)]
    command += ["--max-num-seqs", "4", "--num-gpu-blocks-override", "256"]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "HEADRACE_CRASH_AT": crash_at, "PYTHONPATH": paths}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            address = next((line for line in process.stderr if "headrace: serving tiny on " in line), None)
            if address is None:  # it died before it could serve
                raise Killed
            yield process, address.split()[-1]
        finally:
            process.kill()


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def assert_complete(client: openai.OpenAI, batch_id: str, directory: Path) -> None:
    batch = wait_for(client, batch_id, "completed", "failed", "expired")
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", NUM_LINES, NUM_LINES, 0)
    assert results(client, batch.output_file_id).keys() == IDS  # and none twice
    assert batch.usage.output_tokens == 8 * NUM_LINES and batch.error_file_id is None
    assert len(list(client.files.list())) == len(list((directory / "files").iterdir()))


def test_a_server_that_is_killed_at_every_step_loses_nothing(tiny_directory: Path, tmp_path: Path) -> None:
    """One batch; each server dies at the next step, and the last one finishes it. What they compute does not matter."""
    run = partial(running, tiny_directory, tmp_path, computes=False)
    with run(crash_at="batch-added") as (process, url), client_of(url) as client:
        with pytest.raises(openai.APIConnectionError):  # the batch was stored, but not answered
            create(client, LINES)
        assert process.wait(DIED_S) == -signal.SIGKILL
    for step in (
        "batch-validated",
        "appended:10",
        "output-renamed",
        "batch-files-written",
    ):
        try:
            with run(crash_at=step) as (process, _):
                assert process.wait(DIED_S) == -signal.SIGKILL, step
        except Killed:
            pass
    with run() as (process, url), client_of(url) as client:
        (batch,) = client.batches.list()
        assert_complete(client, batch.id, tmp_path)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert not list((tmp_path / "jobs").iterdir()) and not list((tmp_path / "uploads").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    [
        "batch-file-moved",
        "manifest-renamed",
        "write-half",
        "written",
        "batch-finalizing",
        "batch-job-ended",
        "batch-ended",
    ],
)
def test_a_server_that_is_killed_once_loses_nothing(step: str, tiny_directory: Path, tmp_path: Path) -> None:
    with running(tiny_directory, tmp_path, crash_at=step) as (process, url), client_of(url) as client:
        try:
            file_id = upload(client, LINES)
            client.batches.create(input_file_id=file_id, endpoint=COMPLETIONS, completion_window="24h")
        except openai.APIConnectionError:
            assert step == "batch-file-moved"
        assert process.wait(DIED_S) == -signal.SIGKILL
    with running(tiny_directory, tmp_path) as (_, url), client_of(url) as client:
        if step == "batch-file-moved":
            assert not list(client.files.list()) and not list((tmp_path / "files").iterdir())
            create(client, LINES)
        (batch,) = client.batches.list()
        assert_complete(client, batch.id, tmp_path)


@pytest.mark.slow
def test_a_server_that_is_killed_at_random_moments_loses_nothing(tiny_directory: Path, tmp_path: Path) -> None:
    with running(tiny_directory, tmp_path) as (process, url), client_of(url) as client:
        ids = [create(client, LINES).id for _ in range(2)]
        time.sleep(random.uniform(0.0, 1.0))
        process.kill()
    for _ in range(3):
        with running(tiny_directory, tmp_path) as (process, _):
            time.sleep(random.uniform(0.0, 1.0))
            process.kill()
    with running(tiny_directory, tmp_path) as (_, url), client_of(url) as client:
        for batch_id in ids:
            assert_complete(client, batch_id, tmp_path)


@pytest.mark.slow
def test_a_cancelled_batch_stays_cancelled(tiny_directory: Path, tmp_path: Path) -> None:
    long = [line(str(number), max_tokens=300, ignore_eos=True) for number in range(200)]
    with running(tiny_directory, tmp_path, crash_at="batch-files-written") as (process, url), client_of(url) as client:
        batch = create(client, long)
        wait_for(client, batch.id, "in_progress")
        client.batches.cancel(batch.id)
        assert process.wait(DIED_S) == -signal.SIGKILL
    with running(tiny_directory, tmp_path) as (_, url), client_of(url) as client:
        batch = wait_for(client, batch.id, "cancelled", "completed")
        assert batch.status == "cancelled" and batch.request_counts.completed < 200
        assert len(results(client, batch.output_file_id)) == batch.request_counts.completed
