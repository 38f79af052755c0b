"""Jobs whose engine fails: requests that end in errors, engines that die, lines that kill them, out of memory."""

from __future__ import annotations

import gc
import json
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.config import EngineConfig
from headrace.engine.start import Engine
from headrace.errors import JobError, ModelError, ResumableJobError
from headrace.jobs.input import prepare_process
from headrace.jobs.input.plain_lines import PlainReply
from headrace.jobs.input.prepare import Work
from headrace.jobs.recovery.memory_ladder import RUNGS, MemoryLadder, is_out_of_memory
from headrace.jobs.recovery.policy import Progress, RecoveryPolicy, WorkerDeath
from headrace.jobs.recovery.retry_rules import RetryRules
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec
from headrace.jobs.status.metrics import JobCollector
from headrace.jobs.status.metrics_server import MetricsServer
from headrace.jobs.status.report import JobReport
from headrace.jobs.status.summary import plain_summary
from headrace.jobs.store.failure_log import EngineDeath, FailureLog, PoisonLine, Retry, Suspicion, read_entries
from headrace.jobs.store.in_flight_file import InFlightFile, lines_in_flight
from headrace.jobs.store.job_view import view_job
from headrace.jobs.store.manifest import read_manifest, write_manifest
from headrace.jobs.store.status_file import JobStatus, read_status
from headrace.startup import Report
from headrace.types import SamplingParams
from tests.jobs.conftest import settings_of
from tests.jobs.faults import AT_ONCE, FaultyRunner, FaultyStart, OutOfMemoryError

Start = Callable[..., Engine]
WriteLines = Callable[..., Path]


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect() -> Iterator[None]:
    """Each death of an engine collects garbage, which would scan everything that other tests have left."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def run(source: Path, start: Any, rules: RetryRules = AT_ONCE, **options: Any) -> JobReport:
    output = source.parent / "out.jsonl"
    return run_job(JobSpec(input=str(source), output=str(output), **options), start=start, rules=rules, quiet=True)


def read(source: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (source.parent / "out.jsonl").read_text().splitlines()]
    assert len({line["index"] for line in lines}) == len(lines)
    return {line["index"]: line for line in lines}


def directory_of(source: Path) -> Path:
    return source.parent / "out.jsonl.job"


def prompts(num_lines: int, *, poison: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    return [
        {"prompt": f"line {number}{'!' if number in poison else ''}", "max_tokens": 4, "ignore_eos": True}
        for number in range(num_lines)
    ]


# Requests that end in an error.


def test_a_line_that_fails_is_retried_and_counted(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(20))
    faulty = FaultyStart(start, FaultyRunner(), fails=["3", "3", "7"])
    report = run(source, faulty)
    assert (report.exit_code, report.tally.num_answered) == (0, 20)
    assert report.failures.retries == {"engine_error": 3}
    assert Counter(faulty.submitted[0])["3"] == 3
    assert read_status(directory_of(source) / "status.json").retries == {"engine_error": 3}
    assert view_job(directory_of(source)).as_json()["trouble"]["retries"] == {"engine_error": 3}
    assert "retries       engine_error 3" in plain_summary(report)
    clean = run(write_lines(*prompts(20)), start, overwrite=True)
    assert clean.failures.retries == {}, "--overwrite starts from the beginning"


def test_a_line_that_fails_five_times_becomes_an_error_line(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(8))
    faulty = FaultyStart(start, FaultyRunner(), fails=["3"] * 9)
    report = run(source, faulty)
    assert Counter(faulty.submitted[0])["3"] == 5
    assert (report.exit_code, dict(report.tally.errors)) == (3, {"engine_error": 1})
    assert "sampling is broken (tried 5 times)" in read(source)[3]["error"]["message"]


def test_the_count_of_attempts_survives_the_process(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(8))
    broken = FaultyStart(start, FaultyRunner(dies_at={3}, error=lambda: RuntimeError("CUDA error: gone")))
    with pytest.raises(ResumableJobError):
        run(source, broken)
    log = FailureLog(directory_of(source) / "trouble.jsonl", epoch=1)
    for _ in range(3):
        log.append(Retry(3, "engine_error"))
    faulty = FaultyStart(start, FaultyRunner(), fails=["3"] * 9)
    report = run(source, faulty)
    assert Counter(faulty.submitted[0])["3"] == 2, "three were made before"
    assert report.tally.errors["engine_error"] == 1
    again = FaultyStart(start, FaultyRunner(), fails=["3"])
    assert run(source, again, redo="error").exit_code == 0
    assert Counter(again.submitted[0])["3"] == 2, "a redo counts from zero"


def test_an_invalid_request_is_never_retried(write_lines: WriteLines, start: Start) -> None:
    form = {"structured_outputs": {"choice": ["yes", "no"]}}
    source = write_lines({"prompt": "x" * 600}, "{broken", {"prompt": "a", **form}, *prompts(3))
    faulty = FaultyStart(start, FaultyRunner(), fails=["2"])
    report = run(source, faulty, max_error_rate=1)
    assert report.tally.num_failed == 3
    assert Counter(faulty.submitted[0])["2"] == 1
    assert report.failures.retries == {}


# Engines that die.


def test_a_dead_engine_is_restarted_and_its_lines_run_again(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(40))
    run(source, start)
    expected = read(source)
    faulty = FaultyStart(start, FaultyRunner(dies_at={5, 17}))
    report = run(source, faulty, overwrite=True)
    assert (report.exit_code, report.tally.num_answered, len(faulty.configs)) == (0, 40, 3)
    assert report.failures.deaths == {"engine": 2}
    assert {index: line["text"] for index, line in read(source).items()} == {
        index: line["text"] for index, line in expected.items()
    }
    assert report.stats.scheduler.num_finished == 40, "the counts of all engines"
    status = read_status(directory_of(source) / "status.json")
    assert (status.state, status.engine_deaths) == ("finished", {"engine": 2})


def test_deaths_are_logged_with_the_lines_in_flight(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(6))
    faulty = FaultyStart(start, FaultyRunner(dies_at={2}))
    run(source, faulty)
    (death,) = (line.event for line in read_entries(directory_of(source) / "trouble.jsonl"))
    assert isinstance(death, EngineDeath)
    assert (death.loss, death.lines, death.num_done) == ("engine", list(range(6)), 0)
    assert "the device is gone" in death.reason
    assert sorted(map(int, faulty.submitted[1])) == death.lines


def test_an_engine_that_cannot_be_started_again_ends_the_job_resumably(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(40))
    faulty = FaultyStart(start, FaultyRunner(dies_at={9}))
    num_starts = 0

    def once(*arguments: Any) -> Engine:
        nonlocal num_starts
        num_starts += 1
        if num_starts > 1:
            raise ModelError("the weights have gone")
        return faulty(*arguments)

    with pytest.raises(ResumableJobError, match="could not be started again in 3 attempts: the weights have gone"):
        run(source, once)
    assert num_starts == 1 + 3
    report = run(source, start)
    assert (report.exit_code, 0 < report.num_before < 40, len(read(source))) == (0, True, 40)


def test_a_stream_survives_deaths_too_but_is_not_resumable(
    write_lines: WriteLines, start: Start, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    source = write_lines(*prompts(20, poison=(4,)))
    job = JobSpec(input=str(source), output="-")
    report = run_job(job, start=FaultyStart(start, FaultyRunner(dies_at={12})), rules=AT_ONCE, quiet=True)
    assert (report.tally.num_answered, dict(report.tally.errors)) == (19, {"poison_request": 1})
    lines = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert sorted(line["index"] for line in lines) == list(range(20))
    always = FaultyStart(start, FaultyRunner(always=True))
    with pytest.raises(JobError, match="this job cannot be resumed: its input or output is a stream") as raised:
        run_job(job, start=always, rules=AT_ONCE, quiet=True)
    assert not isinstance(raised.value, ResumableJobError)


@pytest.mark.parametrize("min_lines_for_process", [1_000, 1])
def test_nothing_of_a_dead_engine_is_held_when_the_next_one_is_loaded(
    write_lines: WriteLines, start: Start, min_lines_for_process: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights and its cache would take the memory of the next one."""
    monkeypatch.setattr(prepare_process, "num_cores", lambda: 2)
    runners: list[weakref.ref[FaultyRunner]] = []
    still_there: list[bool] = []

    def started(config: EngineConfig, deliver: Any) -> Engine:
        still_there.append(any(runner() is not None for runner in runners))
        runner = FaultyRunner(dies_at={6} if len(runners) < 3 else ())
        runners.append(weakref.ref(runner))
        return start(config, deliver, runner=runner)

    source = write_lines(*prompts(60))
    job = JobSpec(input=str(source), output=str(source.parent / "out.jsonl"))
    report = run_job(job, start=started, rules=AT_ONCE, min_lines_for_process=min_lines_for_process, quiet=True)
    assert (report.exit_code, report.failures.deaths) == (0, {"engine": 3})
    assert still_there == [False] * 4


def test_an_engine_whose_death_is_seen_by_submit_is_replaced_too(write_lines: WriteLines, start: Start) -> None:
    """A call may fail before the empty event list that reports the death arrives."""
    source = write_lines(*prompts(40))
    faulty = FaultyStart(start, FaultyRunner(dies_at={3}))
    num_calls = 0

    def dies_in_submit(config: EngineConfig, deliver: Any) -> Engine:
        engine = faulty(config, deliver)
        submit = engine.client.submit

        def waits_for_death(request: Any) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 20:  # the engine dies at its third step
                while engine.client.failure is None:
                    time.sleep(0.001)
            submit(request)

        engine.client.submit = waits_for_death  # type: ignore[method-assign]
        return engine

    report = run(source, dies_in_submit)
    assert (report.exit_code, len(read(source)), report.failures.deaths) == (0, 40, {"engine": 1})


# Lines that kill the engine.


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


# Loss of the whole process.


def lose_process(source: Path, indices: list[int], *, num_epochs: int = 0) -> None:
    """As if the process of the last run, or of one that came `num_epochs` later, had been killed with these lines in
    flight."""
    directory = directory_of(source)
    manifest = read_manifest(directory)
    assert manifest is not None
    epoch = manifest.epoch + num_epochs
    write_manifest(directory, replace(manifest, state="running", epoch=epoch))
    file = InFlightFile(directory / "in-flight", epoch=epoch)
    file.add(indices)
    file.close()


def interrupted(source: Path, start: Start, *, at: int = 9) -> None:
    def lost() -> BaseException:
        return RuntimeError("CUDA error: gone")

    with pytest.raises(ResumableJobError):
        run(source, FaultyStart(start, FaultyRunner(dies_at={at}, error=lost, is_poison=False)))


def test_a_loss_is_counted_once_however_often_the_next_run_fails(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(20))
    interrupted(source, start)
    lose_process(source, sorted(set(range(20)) - done_indices(source)))

    def never(*arguments: Any) -> Engine:
        raise ModelError("no model")

    for _ in range(3):
        with pytest.raises(ModelError):
            run(source, never)
        lose_process_again(source)
    log = FailureLog(directory_of(source) / "trouble.jsonl")
    assert log.counts.deaths == {"device": 1, "process": 1}


def done_indices(source: Path) -> set[int]:
    return {record.index for record in view_job(directory_of(source)).records()}


def lose_process_again(source: Path) -> None:
    directory = directory_of(source)
    manifest = read_manifest(directory)
    assert manifest is not None
    write_manifest(directory, replace(manifest, state="running"))


def test_lines_in_flight_are_known_for_the_same_epoch_and_boot_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.jobs.store import in_flight_file

    path = tmp_path / "in-flight"
    file = InFlightFile(path, epoch=3)
    assert lines_in_flight(path, epoch=3) == []
    file.add([5, 2**40, 7])
    assert lines_in_flight(path, epoch=3) == [5, 2**40, 7]
    file.remove(5)
    file.remove(6)
    file.add([0, 7, 9])
    assert lines_in_flight(path, epoch=3) == [0, 2**40, 7, 9]
    assert lines_in_flight(path, epoch=4) is None
    file.clear()
    assert lines_in_flight(path, epoch=3) == []
    file.add([1, 2])
    file.close()
    with monkeypatch.context() as patch:
        patch.setattr(in_flight_file, "boot_id", lambda: b"another machine.")
        assert lines_in_flight(path, epoch=3) is None
    data = path.read_bytes()
    for place in (0, 5, 12, 30, 42):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert lines_in_flight(path, epoch=3) is None
    path.write_bytes(data[:20])
    assert lines_in_flight(path, epoch=3) is None
    assert lines_in_flight(tmp_path / "none", epoch=3) is None


def test_after_a_lost_process_the_engine_has_one_of_its_own(
    write_lines: WriteLines, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.jobs.run import run_job as run_module

    started = []
    monkeypatch.setattr(run_module, "start_engine", lambda *a, report: started.append("thread") or start(*a))
    monkeypatch.setattr(run_module, "start_engine_process", lambda *a, report: started.append("process") or start(*a))
    source = write_lines(*prompts(20))
    interrupted(source, start)
    run(source, None)
    run(write_lines(*prompts(3)), None, overwrite=True)
    assert started == ["process", "thread"]


def test_no_line_is_blamed_for_losses_of_a_process_that_is_not_the_engines(
    write_lines: WriteLines, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that is preempted again and again, each time with the same long line in flight."""
    from headrace.jobs.run import run_job as run_module

    def no_model(*arguments: Any, report: Report) -> Engine:
        raise ModelError("no model")

    source = write_lines(*prompts(20))
    interrupted(source, start)  # the next runs have their engine in a separate process
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "start_engine_process", no_model)
        for _ in range(9):
            lose_process(source, [19], num_epochs=1)
            with pytest.raises((ModelError, ResumableJobError)):
                run(source, None)

    def with_model(*arguments: Any, report: Report) -> Engine:
        return start(*arguments)

    monkeypatch.setattr(run_module, "start_engine_process", with_model)
    report = run(source, None)
    assert (report.exit_code, report.failures.poison_rows, len(read(source))) == (0, 0, 20)
    assert report.failures.deaths == {"device": 1, "process": 9}


def test_a_job_whose_process_is_lost_again_and_again_without_progress_says_so() -> None:
    policy = RecoveryPolicy(FailureLog(None), EngineConfig())
    for epoch in range(1, 4):
        policy.process_was_lost(epoch, [7], Progress(0, 0), had_own_process=True)
    with pytest.raises(ResumableJobError, match="the job's process was lost 4 times in a row without a line done"):
        policy.process_was_lost(4, [7], Progress(0, 0), had_own_process=True)
    assert policy.suspects.trial is None


def test_a_torn_record_of_the_failure_log_loses_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "trouble.jsonl"
    log = FailureLog(path)
    log.append(Retry(1, "engine_error"))
    log.append(EngineDeath("engine", "why", [1, 2], 0, Suspicion([1, 2])))
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        again = FailureLog(path)
        again.append(Retry(9, "engine_error"))
        whole = data[:size].count(b"\n")
        assert FailureLog(path).num_retries[9] == 1
        assert len(read_entries(path)) in (whole + 1, whole + 2), "a record without its line break may be whole"


# Memory.


def test_after_out_of_memory_engines_that_need_less_are_started(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(40))
    runner = FaultyRunner(dies_at={2, 4, 6, 8}, error=lambda: OutOfMemoryError("CUDA out of memory"))
    faulty = FaultyStart(start, runner)
    report = run(source, faulty)
    assert (report.exit_code, report.failures.deaths) == (0, {})
    assert report.failures.memory_rungs == list(RUNGS)
    given = [(config.max_num_batched_tokens, config.gpu_memory_utilization) for config in faulty.configs]
    assert given == [(None, None), (None, None), (64, None), (64, 0.4), (64, 0.3)]
    assert read_status(directory_of(source) / "status.json").memory_rungs == list(RUNGS)
    assert "memory        ran out 4 times: started again, half the tokens" in plain_summary(report)


def test_the_next_run_starts_on_the_rung_of_the_last(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(40))
    runner = FaultyRunner(dies_at={2, 4}, error=lambda: OutOfMemoryError("no memory"))
    faulty = FaultyStart(start, runner)

    def only_two(*arguments: Any) -> Engine:
        if len(faulty.configs) == 2:
            raise ModelError("enough")
        return faulty(*arguments)

    with pytest.raises(ResumableJobError, match="enough"):
        run(source, only_two)
    later = FaultyStart(start, FaultyRunner())
    run(source, later)
    assert later.configs[0].max_num_batched_tokens == 64


def test_at_the_top_of_the_ladder_the_search_for_a_poison_line_starts(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(12, poison=(5,)))
    report = run(source, FaultyStart(start, FaultyRunner(error=lambda: OutOfMemoryError("no memory"))))
    assert [index for index, line in read(source).items() if "error" in line] == [5]
    assert report.failures.memory_rungs[: len(RUNGS)] == list(RUNGS)


def test_a_ladder_without_progress_ends() -> None:
    config = EngineConfig()
    settings = settings_of(config)
    ladder = MemoryLadder(config)
    rungs = [climbed.rung for _ in range(4) if (climbed := ladder.climb(settings, num_done=3))]
    assert rungs == list(RUNGS)
    assert ladder.climb(settings, num_done=3) is None
    again = ladder.climb(settings, num_done=4)
    assert again is not None and again.rung == list(RUNGS)[-1]
    assert ladder.climb(settings, num_done=4) is None


def test_settings_that_the_user_changed_restart_the_ladder() -> None:
    config = EngineConfig()
    ladder = MemoryLadder(config)
    events = [climbed for _ in range(3) if (climbed := ladder.climb(settings_of(config), num_done=0))]
    assert MemoryLadder(config, events).config.gpu_memory_utilization == 0.4
    changed = EngineConfig(gpu_memory_utilization=0.6)
    assert MemoryLadder(changed, events).config == changed


@pytest.mark.parametrize(
    "failure, expected",
    [
        (OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("OutOfMemoryError: CUDA out of memory. Tried to allocate"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_out_of_memory_errors_are_recognized(failure: BaseException, expected: bool) -> None:
    assert is_out_of_memory(failure) == expected


def test_torchs_own_out_of_memory_error_is_recognized() -> None:
    import torch

    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))


# Several workers.


def died(policy: RecoveryPolicy, worker: int, lines: list[int], *, num_ended: int = 0, others: tuple[int, ...]) -> Any:
    return policy.engine_died(
        RuntimeError("gone"),
        lines,
        Progress(num_ended, num_ended),
        settings_of(EngineConfig()),
        had_own_process=True,
        death=WorkerDeath(worker, others, num_ended),
    )


def two_workers(log: FailureLog | None = None) -> RecoveryPolicy:
    shares = [(EngineConfig(), 1), (EngineConfig(), 1)]
    return RecoveryPolicy(log or FailureLog(None), EngineConfig(), rules=AT_ONCE, shares=shares)


def test_a_line_in_flight_at_deaths_of_two_workers_is_searched_on_the_second() -> None:
    policy = two_workers()
    assert died(policy, 0, [1, 2, 3], others=(1,)) is not None
    assert not policy.is_searching, "one death says nothing"
    assert died(policy, 1, [3, 7, 8], others=(0,)) is not None
    assert (policy.suspects_of(0).trial, policy.suspects_of(1).trial) == (None, {3})
    assert policy.reserved() == {3: 1}


def test_a_line_is_blamed_only_if_its_worker_answers_others_or_a_second_one_dies_too() -> None:
    policy = two_workers()
    for _ in range(4):
        died(policy, 0, [3], others=(1,))
    assert not policy.has_poison, "the worker may be the cause"
    assert (policy.suspects_of(0).trial, policy.suspects_of(1).trial) == (None, {3})
    died(policy, 1, [3], others=(0,))
    assert policy.has_poison
    answering = two_workers()
    for num_ended in (0, 0, 5, 5):
        died(answering, 0, [3], num_ended=num_ended, others=(1,))
    assert answering.has_poison, "the worker has answered five others meanwhile"


def test_a_worker_that_dies_four_times_without_an_answer_is_given_up_only_if_there_are_others() -> None:
    policy = two_workers()
    for number in range(3):
        assert died(policy, 0, [10 * number], others=(1,)) is not None
    assert died(policy, 0, [90], others=(1,)) is None
    assert died(two_workers(), 0, [90], others=()) is not None


def test_searches_of_more_workers_than_a_later_run_has_go_on(tmp_path: Path) -> None:
    policy = two_workers(FailureLog(tmp_path / "trouble.jsonl"))
    for worker, line in ((0, 4), (0, 4), (1, 9), (1, 9)):
        died(policy, worker, [line, 100 + line], others=(1 - worker,))
    one = RecoveryPolicy(FailureLog(tmp_path / "trouble.jsonl"), EngineConfig())
    assert one.suspects.lines == {4, 104, 9, 109}
    assert two_workers(FailureLog(tmp_path / "trouble.jsonl")).reserved() == {4: 0, 104: 0, 9: 1, 109: 1}


def test_each_worker_has_its_own_rung_of_the_memory_ladder(tmp_path: Path) -> None:
    share = EngineConfig(gpu_memory_utilization=0.46)
    shares = [(share, 2), (share, 2)]
    log = FailureLog(tmp_path / "trouble.jsonl")
    policy = RecoveryPolicy(log, EngineConfig(), shares=shares)
    for _ in range(3):
        policy.engine_died(
            OutOfMemoryError("out of memory"),
            [1],
            Progress(0, 0),
            settings_of(EngineConfig()),
            had_own_process=True,
            death=WorkerDeath(1, (0,)),
        )
    assert policy.config_of(0) == share
    assert policy.config_of(1).gpu_memory_utilization == pytest.approx(0.41), "a tenth, divided by two workers"
    later = RecoveryPolicy(FailureLog(tmp_path / "trouble.jsonl"), EngineConfig(), shares=shares)
    assert later.config_of(0) == share
    assert later.config_of(1) == policy.config_of(1)
