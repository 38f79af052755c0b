"""Lines that kill the engine: the search for them, and what becomes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.config import EngineConfig
from headrace.engine.start import Engine
from headrace.errors import ResumableJobError
from headrace.jobs.input.plain_lines import PlainReply
from headrace.jobs.input.prepare import Work
from headrace.jobs.recovery.policy import RecoveryPolicy
from headrace.jobs.status.metrics import JobCollector
from headrace.jobs.status.metrics_server import MetricsServer
from headrace.jobs.store.failure_log import FailureLog, PoisonLine
from headrace.jobs.store.job_view import view_job
from headrace.jobs.store.status_file import JobStatus
from headrace.types import SamplingParams
from tests.jobs.faults import FaultyRunner, FaultyStart
from tests.jobs.recovery.failing_jobs import Start, WriteLines, directory_of, prompts, read, run


@pytest.mark.parametrize("poison", [(0,), (11,), (3, 4), (7, 30, 31)])
def test_lines_that_kill_the_engine_are_found_and_the_job_continues(
    write_lines: WriteLines, start: Start, poison: tuple[int, ...]
) -> None:
    source = write_lines(*prompts(40, poison=poison))
    runner = FaultyRunner()
    report = run(source, FaultyStart(start, runner))
    lines = read(source)
    assert len(lines) == 40
    failed = {index: line["error"] for index, line in lines.items() if "error" in line}
    assert tuple(sorted(failed)) == poison
    assert {error["code"] for error in failed.values()} == {"poison_request"}
    assert "at last while it ran alone (RuntimeError: the device is gone)" in failed[poison[0]]["message"]
    assert (report.exit_code, report.failures.poison_rows) == (3, len(poison))
    assert report.failures.deaths == {"engine": runner.num_deaths}


def test_an_openai_line_that_kills_the_engine_becomes_a_server_error(write_lines: WriteLines, start: Start) -> None:
    body = {"prompt": "x!", "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    source = write_lines(line, *prompts(3))
    run(source, FaultyStart(start, FaultyRunner()))
    texts = (source.parent / "out.jsonl").read_text().splitlines()
    (found,) = (line for text in texts if "custom_id" in (line := json.loads(text)))
    assert (found["response"]["status_code"], found["response"]["body"]["error"]["code"]) == (500, "poison_request")


def test_duplicates_of_a_poison_line_fail_with_it(write_lines: WriteLines, start: Start) -> None:
    same = {"prompt": "kill!", "max_tokens": 4, "temperature": 0}
    source = write_lines(same, *prompts(10), same)
    report = run(source, FaultyStart(start, FaultyRunner()))
    assert dict(report.tally.errors) == {"poison_request": 2}
    assert report.failures.poison_rows == 1


def test_later_duplicates_of_a_poison_line_need_no_new_search(write_lines: WriteLines, start: Start) -> None:
    same = {"prompt": "kill!", "max_tokens": 4, "temperature": 0}
    source = write_lines(same, *prompts(10), same, *prompts(3), same, {**same, "max_tokens": 5})
    run(source, FaultyStart(start, FaultyRunner()), limit=11)
    runner = FaultyRunner()
    report = run(source, FaultyStart(start, runner))
    lines = read(source)
    assert [index for index, line in lines.items() if "error" in line] == [0, 11, 15, 16]
    messages = {index: lines[index]["error"]["message"].partition(": ")[2] for index in (0, 11, 15)}
    assert len(set(messages.values())) == 1
    assert report.failures.poison_rows == 2, "another length is another request"
    assert view_job(directory_of(source)).as_json()["errors_by_code"] == {"poison_request": 4}


def test_the_request_of_a_poison_line_is_known_to_the_next_run(tmp_path: Path) -> None:
    def work(index: int, tokens: bytes, **fields: Any) -> Work:
        params = SamplingParams(temperature=0, seed=0, logit_bias={5: 1.0, 3: 2.0}, **fields)
        return Work(PlainReply(index), params, tokens)

    log = FailureLog(tmp_path / "trouble.jsonl")
    log.append(PoisonLine(4, 0))
    first = RecoveryPolicy(log, EngineConfig())
    assert first.has_poison and first.refuse(work(9, b"aaaa")) is None, "the request of line 4 is not known yet"
    assert first.refuse(work(4, b"aaaa")) is not None
    for recovery in (
        first,
        RecoveryPolicy(FailureLog(tmp_path / "trouble.jsonl"), EngineConfig(), is_done=lambda index: True),
    ):
        assert recovery.has_poison
        assert recovery.refuse(work(9, b"aaaa")) is not None
        others = [work(9, b"aaab"), work(9, b"aaaa", stop="x"), replace_salt(work(9, b"aaaa"))]
        assert [recovery.refuse(other) for other in others] == [None] * 3
        own = Work(PlainReply(9), SamplingParams(), b"aaaa", seed=3)
        assert recovery.refuse(own) is None, "its seed makes it a different request"
    assert not RecoveryPolicy(FailureLog(tmp_path / "trouble.jsonl", pass_number=2), EngineConfig()).has_poison


def replace_salt(work: Work) -> Work:
    return msgspec.structs.replace(work, cache_salt="s")


def test_metrics_show_failures_while_the_job_runs(
    write_lines: WriteLines, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses: list[JobStatus] = []
    monkeypatch.setattr(MetricsServer, "update", lambda server, status: statuses.append(status))
    source = write_lines(*prompts(20, poison=(4,)))
    run(source, FaultyStart(start, FaultyRunner(), fails=["3", "3"]), metrics_port=0)
    num_deaths = view_job(directory_of(source)).as_json()["trouble"]["deaths"]["engine"]
    last = samples(statuses[-1])
    assert last["headrace:job_retries_total", "engine_error"] == 2
    assert last["headrace:job_engine_deaths_total", "engine"] == num_deaths
    assert last["headrace:job_poison_rows", None] == 1
    assert last["headrace:job_lines_failed_total", "poison_request"] == 1


def samples(status: JobStatus) -> dict[tuple[str, str | None], float]:
    """By name and by the value of the label beside the model's name."""
    collector = JobCollector()
    collector.status = status
    return {
        (
            sample.name,
            next((value for label, value in sample.labels.items() if label != "model_name"), None),
        ): sample.value
        for metric in collector.collect()
        for sample in metric.samples
    }


def test_status_is_right_after_poison_lines_without_the_journal(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(20, poison=(4,)), "{broken")
    run(source, FaultyStart(start, FaultyRunner(), fails=["3"] * 9))
    found = view_job(directory_of(source)).as_json()
    assert (found["counted"], found["lines"]) == ("status", 21)
    (directory_of(source) / "status.json").unlink()
    again = view_job(directory_of(source)).as_json()
    assert again["counted"] == "journal"
    names = ("lines", "errors", "errors_by_code", "trouble", "state")
    assert {name: again[name] for name in names} == {name: found[name] for name in names}


def test_an_engine_that_dies_with_every_line_is_not_blamed_on_the_lines(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(40))
    with pytest.raises(ResumableJobError, match=r"dies with every line that it runs alone .* none between"):
        run(source, FaultyStart(start, FaultyRunner(always=True)))
    with pytest.raises(ResumableJobError, match="dies with every line"):  # not two more poison lines each time
        run(source, FaultyStart(start, FaultyRunner(always=True)))
    assert view_job(directory_of(source)).committed.num_errors == 2
    report = run(source, start, redo="error")
    assert (report.exit_code, len(read(source))) == (0, 40)


def test_an_engine_that_dies_with_nothing_to_do_ends_the_job(write_lines: WriteLines, start: Start) -> None:
    """Every submit fails."""
    source = write_lines(*prompts(3))

    def dead_from_the_start(config: EngineConfig, deliver: Any) -> Engine:
        engine: Engine = start(config, deliver)
        engine.client.submit = dead  # type: ignore[method-assign]
        return engine

    def dead(request: Any) -> None:
        from headrace.errors import EngineDeadError

        raise EngineDeadError("the engine has stopped: it never ran")

    with pytest.raises(ResumableJobError, match="died 4 times in a row without a line done between"):
        run(source, dead_from_the_start)
