"""States of a batch: cancelling, expiry, restarts of the server and of its engine, a full disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.config import EngineConfig
from headrace.jobs.store import journal as journal_module
from headrace.server.batch import runner as runner_module
from headrace.server.batch.records import Batch
from headrace.server.batch.runner import BatchRunner
from headrace.server.batch.store import BatchStore
from tests.engine.process.process_tools import wait_until
from tests.server.batch.batch_server import (
    BatchServer,
    as_jsonl,
    create,
    line,
    results,
    serving_batches,
    upload,
    wait_for,
)
from tests.server.batch.test_store import add_batch, add_file
from tests.server.whole_server import LimitedEngine

LINES = [line(str(number)) for number in range(8)]
IDS = {each["custom_id"] for each in LINES}


def _status(client: openai.OpenAI, batch: Any) -> str:
    return client.batches.retrieve(batch.id).status


def wait_until_submitted(engine: LimitedEngine) -> None:
    """Until lines of a batch wait in the engine, which runs none."""
    wait_until(lambda: engine.stats.scheduler.num_waiting > 0)


@pytest.mark.slow
def test_a_cancelled_batch_keeps_what_is_done(client: openai.OpenAI, engine: LimitedEngine) -> None:
    long = [line(f"long-{number}", max_tokens=400, ignore_eos=True) for number in range(30)]
    batch = create(client, [line("short"), *long])
    wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)  # type: ignore[union-attr]
    batch = client.batches.cancel(batch.id)
    assert batch.status == "cancelling" and batch.cancelling_at is not None
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")  # again: no error
    batch = wait_for(client, batch.id, "cancelled")
    answers = results(client, batch.output_file_id)
    assert 0 < len(answers) < 31 and len(answers) == batch.request_counts.completed
    assert batch.request_counts.total == 31 and batch.error_file_id is None
    assert batch.cancelled_at is not None and batch.completed_at is None


def test_a_batch_is_cancelled_before_it_starts(client: openai.OpenAI, engine: LimitedEngine) -> None:
    engine.client.limit_running(0)
    first = create(client, LINES)
    wait_until_submitted(engine)
    second = create(client, LINES)
    wait_for(client, second.id, "in_progress")  # it waits behind the first
    client.batches.cancel(second.id)
    second = wait_for(client, second.id, "cancelled")
    assert second.output_file_id is None and second.request_counts.completed == 0
    engine.client.limit_running(None)
    assert wait_for(client, first.id, "completed").request_counts.completed == 8


def test_a_finished_or_finalizing_batch_cannot_be_cancelled(
    client: openai.OpenAI, server: BatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[int] = []
    write_results = runner_module.write_results

    def cancelled_meanwhile(*given: Any) -> Any:
        (batch,) = server.service.store.unfinished()
        assert batch.status == "finalizing"
        with pytest.raises(openai.ConflictError, match="finalizing cannot be cancelled") as raised:
            client.batches.cancel(batch.id)
        refused.append(raised.value.status_code)
        return write_results(*given)

    monkeypatch.setattr(runner_module, "write_results", cancelled_meanwhile)
    batch = wait_for(client, create(client, LINES).id, "completed")
    assert refused == [409] and results(client, batch.output_file_id).keys() == IDS
    with pytest.raises(openai.ConflictError, match="completed cannot be cancelled"):
        client.batches.cancel(batch.id)


def test_lines_that_are_not_done_in_time_expire(engine: LimitedEngine, config: EngineConfig, tmp_path: Path) -> None:
    engine.client.limit_running(0)
    with serving_batches(engine, config, tmp_path, window_s=2) as server, server.client() as client:
        running, waiting = create(client, LINES), create(client, LINES)
        for batch in (running, waiting):
            batch = wait_for(client, batch.id, "expired", "completed", "failed")
            assert batch.status == "expired" and batch.expired_at is not None and batch.output_file_id is None
            errors = results(client, batch.error_file_id)
            assert errors.keys() == IDS and batch.request_counts.failed == 8
            assert {each["error"]["code"] for each in errors.values()} == {"batch_expired"}
            assert all(each["response"] is None for each in errors.values())
    engine.client.limit_running(None)


def test_a_clock_that_jumps_expires_nothing(
    client: openai.OpenAI, engine: LimitedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.client.limit_running(0)
    running = create(client, LINES)
    wait_until_submitted(engine)
    waiting = create(client, LINES)
    wait_for(client, waiting.id, "in_progress")
    now = runner_module.time.time
    monkeypatch.setattr("time.time", lambda: now() + 10 * 24 * 3600)
    engine.client.limit_running(None)
    for batch in (running, waiting):
        assert wait_for(client, batch.id, "completed", "expired").status == "completed"


def test_a_clock_that_goes_back_does_not_lengthen_the_window(
    engine: LimitedEngine, config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.client.limit_running(0)
    with serving_batches(engine, config, tmp_path, window_s=2) as server, server.client() as client:
        batch = create(client, LINES)
        # On a slow machine it may expire before its lines are submitted.
        wait_until(lambda: engine.stats.scheduler.num_waiting > 0 or _status(client, batch) == "expired")
        now = runner_module.time.time
        monkeypatch.setattr("time.time", lambda: now() - 10 * 24 * 3600)
        assert wait_for(client, batch.id, "expired", "completed").status == "expired"
    engine.client.limit_running(None)


def test_a_clock_that_went_back_before_a_restart_does_not_lengthen_the_window(
    engine: LimitedEngine, config: EngineConfig, tmp_path: Path
) -> None:
    store, in_ten_days = BatchStore(tmp_path), int(runner_module.time.time()) + 10 * 24 * 3600
    file = add_file(store, content=as_jsonl(LINES), max_bytes=10**6)
    batch = add_batch(store, file, created_at=in_ten_days, window_s=2)
    store.close()
    engine.client.limit_running(0)
    with serving_batches(engine, config, tmp_path) as server, server.client() as client:
        ended = wait_for(client, batch.id, "expired", "completed")
        assert ended.status == "expired" and results(client, ended.error_file_id).keys() == IDS
    engine.client.limit_running(None)


def test_a_clock_that_jumps_deletes_no_files(server: BatchServer, client: openai.OpenAI) -> None:
    file_id = upload(client, LINES)
    runner = server.service.runner
    now, in_a_year = runner._clock(), runner._clock() + 365 * 24 * 3600
    for clock, is_kept in ((in_a_year, True), (now, True)):
        runner._clock, runner._swept_at = (lambda clock=clock: clock), float("-inf")
        runner._sweep()
        assert bool(list(client.files.list())) == is_kept
    runner._started_at, runner._swept_at = in_a_year, float("-inf")  # the server has run for a year
    runner._clock = lambda: in_a_year
    runner._sweep()
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file_id)


def test_a_more_urgent_batch_overtakes_the_one_that_runs(
    client: openai.OpenAI, engine: LimitedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headrace.batch")
    engine.client.limit_running(0)
    lines = [line(str(number)) for number in range(40)]
    first = create(client, lines)
    wait_until_submitted(engine)
    second, urgent = create(client, LINES), create(client, LINES, extra_body={"priority": -1})
    assert (first.priority, urgent.priority) == (0, -1)
    wait_until(lambda: "which is more urgent" in caplog.text)
    engine.client.limit_running(None)
    for batch, num_lines in ((first, 40), (second, 8), (urgent, 8)):
        ended = wait_for(client, batch.id, "completed", "failed", "expired")
        assert (ended.status, len(results(client, ended.output_file_id))) == ("completed", num_lines)
    ends = [record.args[0] for record in caplog.records if record.msg.startswith("batch %s is %s")]
    assert ends == [urgent.id, first.id, second.id]


@pytest.mark.slow
def test_a_batch_goes_on_after_a_restart_of_the_server(
    engine: LimitedEngine, config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = [line(f"long-{number}", max_tokens=400, ignore_eos=True) for number in range(30)]
    lines = [line("short"), *long]
    with serving_batches(engine, config, tmp_path) as server, server.client() as client:
        batch = create(client, lines)
        wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)  # type: ignore[union-attr]
    counted, begun = [], BatchRunner._begun

    def counts_first(runner: BatchRunner, batch: Batch, stop: Callable[[], None]) -> None:
        counted.append(runner.counts_now(batch))
        begun(runner, batch, stop)

    monkeypatch.setattr(BatchRunner, "_begun", counts_first)
    with serving_batches(engine, config, tmp_path) as server, server.client() as client:
        batch = wait_for(client, batch.id, "completed", "failed")
        assert counted[0] is not None and counted[0].completed > 0
        assert batch.status == "completed" and batch.request_counts.completed == 31
        assert results(client, batch.output_file_id).keys() == {each["custom_id"] for each in lines}


@pytest.mark.slow
def test_other_requests_go_before_the_lines_of_a_batch(client: openai.OpenAI, engine: LimitedEngine) -> None:
    batch = create(client, [line(str(number), max_tokens=400, ignore_eos=True) for number in range(40)])
    wait_until(lambda: engine.stats.scheduler.num_running == 4)  # all slots
    num_before = engine.stats.scheduler.num_preemptions
    answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=2)
    assert answer.usage is not None and answer.usage.completion_tokens > 0
    assert engine.stats.scheduler.num_preemptions > num_before
    assert client.batches.cancel(batch.id).status == "cancelling"  # it was not finished
    wait_for(client, batch.id, "cancelled")


def test_a_batch_pauses_while_the_disk_is_full(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    write, num_left = journal_module.Journal._write, [5]

    def full(journal: Any, data: Any) -> None:
        if num_left[0]:
            num_left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(journal, data)

    monkeypatch.setattr(journal_module.Journal, "_write", full)
    monkeypatch.setattr("headrace.jobs.recovery.disk_full.TRY_SECONDS", 0.0)
    batch = wait_for(client, create(client, LINES).id, "completed", "failed")
    assert num_left == [0] and results(client, batch.output_file_id).keys() == IDS


def test_a_full_disk_at_the_end_delays_the_files(
    client: openai.OpenAI, server: BatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "RETRY_S", 0.01)
    write_results, num_left = runner_module.write_results, [3]

    def full(*given: Any) -> Any:
        if num_left[0]:
            num_left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_results(*given)

    monkeypatch.setattr(runner_module, "write_results", full)
    batch = wait_for(client, create(client, LINES).id, "completed", "failed")
    assert num_left == [0] and results(client, batch.output_file_id).keys() == IDS
    assert not list((server.service.store.path / "uploads").iterdir())
    wait_until(lambda: not list((server.service.store.path / "jobs").iterdir()))  # removed after the state is told
