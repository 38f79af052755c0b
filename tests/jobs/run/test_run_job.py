"""Whole jobs over the real engine loop, a fake runner and a byte tokenizer."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.engine.client import Deliver
from headrace.engine.start import Engine
from headrace.errors import ConfigError, JobError, ResumableJobError
from headrace.jobs.formats.reader import BATCH_LINES, InputLine
from headrace.jobs.formats.writer import ResultWriter, StreamResults
from headrace.jobs.input.feed import MAX_BATCHES_AHEAD
from headrace.jobs.planning.planner import Planner
from headrace.jobs.planning.workload import Window
from headrace.jobs.recovery.job_engine import SPARE_SEQUENCES, JobEngine
from headrace.jobs.run.context import RunContext
from headrace.jobs.run.main_loop import MainLoop
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec
from headrace.jobs.status.console import Console
from headrace.jobs.status.report import JobReport
from headrace.jobs.status.summary import plain_summary
from headrace.jobs.store.status_file import read_status
from headrace.jobs.workers.worker_set import Workers
from headrace.runner.fake import FakeRunner
from headrace.startup import Report, StartupStage
from headrace.steps import StepPlan, StepResult

Start = Callable[..., Engine]
WriteLines = Callable[..., Path]


def run(source: Path, start: Start, **options: Any) -> tuple[JobReport, list[dict[str, Any]]]:
    output = source.parent / "out.jsonl"
    report = run_job(JobSpec(input=str(source), output=str(output), **options), start=start, quiet=True)
    return report, read(output)


def read(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def run_loop(
    job: JobSpec, start: Start, lines: Iterable[list[InputLine]], writer: ResultWriter, window: Window
) -> JobReport:
    """The main loop alone, with a window of this size and a small engine."""
    inbox: SimpleQueue[Any] = SimpleQueue()
    workers = Workers([JobEngine(start, inbox.put, EngineConfig(max_num_seqs=4))])
    console = Console(enabled=False)
    context = RunContext.build(job, StreamResults(writer), inbox=inbox, workers=workers, console=console, window=window)
    try:
        return MainLoop(context, lines).run()
    finally:
        workers.close()


def chat(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_every_line_ends_as_one_answer_or_one_error(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(
        {"prompt": "Hello", "max_tokens": 5, "id": "a"},
        "",
        "{broken",
        chat("b"),
        chat("b"),
        {"prompt": "x" * 600},
        {"prompt": "", "id": "c"},
        {"prompt": "a", "stop_token_ids": list(range(16)), "min_tokens": 1},
    )
    report, lines = run(source, start)
    assert report.exit_code == 3
    assert (report.tally.num_answered, report.tally.num_failed) == (2, 5)
    assert dict(report.tally.errors) == {
        "invalid_json": 1,
        "invalid_request": 1,
        "duplicate_custom_id": 1,
        "context_length_exceeded": 1,
        "empty_prompt": 1,
    }
    by_index = {line["index"]: line for line in lines if "index" in line}
    assert by_index.keys() == {0, 2, 5, 6, 7}
    assert by_index[0]["id"] == "a" and by_index[0]["usage"]["completion_tokens"] == 5
    assert by_index[6]["id"] == "c" and by_index[6]["error"]["message"].startswith("line 7: ")
    assert [line["response"] is None for line in lines if line.get("custom_id") == "b"].count(True) == 1


def test_lines_may_ask_for_structured_outputs(write_lines: WriteLines, start: Start) -> None:
    def formed(custom_id: str, schema: dict[str, Any]) -> dict[str, Any]:
        described = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        return chat(custom_id, max_tokens=200, response_format=described)

    source = write_lines(
        formed("good", {"enum": ["red", "blue"]}),
        formed("bad", {"type": "strin"}),
        {"prompt": "a", "structured_outputs": {"choice": ["yes", "no"]}, "n": 2},
        {"prompt": "b", "max_tokens": 3},
    )
    report, lines = run(source, start)
    assert (report.tally.num_answered, report.tally.num_failed) == (3, 1)
    by_id = {line.get("custom_id", line.get("index")): line for line in lines}
    message = by_id["good"]["response"]["body"]["choices"][0]
    assert json.loads(message["message"]["content"]) in ("red", "blue") and message["finish_reason"] == "stop"
    error = by_id["bad"]["response"]["body"]["error"]
    assert error["param"] == "response_format" and "strin" in error["message"]
    assert {answer["text"] for answer in by_id[2]["outputs"]} <= {"yes", "no"}


def test_a_job_without_errors_ends_with_zero(write_lines: WriteLines, start: Start) -> None:
    report, lines = run(write_lines(*[{"prompt": f"line {i}", "max_tokens": 3} for i in range(40)]), start)
    assert report.exit_code == 0
    assert sorted(line["index"] for line in lines) == list(range(40))
    assert report.tally.num_generated_tokens == 120
    assert report.tally.sample is not None and report.tally.sample.question == "line 0"


def test_the_same_job_gives_the_same_answers_at_any_batch_size(write_lines: WriteLines, start: Start) -> None:
    lines = [{"prompt": f"line {i}", "max_tokens": 6} for i in range(20)]
    _, answers = run(write_lines(*lines), start)
    _, other = run(write_lines(*lines), start, config=EngineConfig(max_num_seqs=2), overwrite=True)
    assert {a["index"]: a["text"] for a in answers} == {a["index"]: a["text"] for a in other}
    _, reseeded = run(write_lines(*lines), start, config=EngineConfig(seed=1), overwrite=True)
    assert {a["index"]: a["text"] for a in answers} != {a["index"]: a["text"] for a in reseeded}


def test_several_answers_and_stop_strings(write_lines: WriteLines, start: Start) -> None:
    vowels = [chr(code) for code in range(128)]  # each answer stops at its first character
    source = write_lines(
        {"prompt": "a", "n": 3, "max_tokens": 4},
        {"prompt": "a", "stop": vowels, "max_tokens": 400},
        chat("b", n=2),
    )
    report, lines = run(source, start)
    assert report.exit_code == 0
    plain = {line["index"]: line for line in lines if "index" in line}
    assert len(plain[0]["outputs"]) == 3
    assert (plain[1]["text"], plain[1]["finish_reason"]) == ("", "stop")
    (openai,) = (line for line in lines if "custom_id" in line)
    assert len(openai["response"]["body"]["choices"]) == 2


def test_defaults_and_the_limit_apply(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*[{"prompt": "a"}] * 10)
    report, lines = run(source, start, defaults={"max_tokens": 2}, limit=3)
    assert [line["usage"]["completion_tokens"] for line in lines] == [2, 2, 2]
    assert report.tally.num_done == 3


def test_an_empty_input_is_an_empty_output(write_lines: WriteLines, start: Start) -> None:
    report, lines = run(write_lines("", "  "), start)
    assert (report.exit_code, lines) == (0, [])


def test_notes_are_counted(write_lines: WriteLines, start: Start) -> None:
    report, _ = run(write_lines(chat("a", model="gpt"), chat("b", model="gpt")), start)
    assert dict(report.tally.notes) == {"model 'gpt' was asked for, 'fake' answered": 2}


def test_progress_and_phases_are_written_to_the_stream(write_lines: WriteLines, start: Start) -> None:
    told = io.StringIO()
    source = write_lines({"prompt": "a", "max_tokens": 1})
    run_job(JobSpec(input=str(source), output=str(source.parent / "out.jsonl")), start=start, stream=told)
    assert told.getvalue().splitlines() == [
        "headrace: loading smollm2 ...",
        "headrace: ready in 0.5 s on cpu in float32; answering 1 line",
    ]


# Duplicates.


def test_identical_deterministic_lines_are_computed_once_and_each_has_its_own_line(
    write_lines: WriteLines, start: Start
) -> None:
    greedy = {"prompt": "Hello", "max_tokens": 5, "temperature": 0}
    source = write_lines(
        *[{**greedy, "id": number} for number in range(6)],
        chat("a", temperature=0),
        chat("b", temperature=0, user="somebody else"),
        {"prompt": "Hello", "max_tokens": 5, "seed": 3},
        {"prompt": "Hello", "max_tokens": 5, "seed": 3},
    )
    report, lines = run(source, start)
    assert report.exit_code == 0
    assert report.stats.scheduler.num_finished == 3
    plain = sorted((line for line in lines if "index" in line), key=lambda line: line["index"])
    assert [line["index"] for line in plain] == [0, 1, 2, 3, 4, 5, 8, 9]
    assert [line.get("id") for line in plain] == [0, 1, 2, 3, 4, 5, None, None]
    assert len({line["text"] for line in plain[:6]}) == len({line["text"] for line in plain[6:]}) == 1
    bodies = {line["custom_id"]: line["response"]["body"] for line in lines if "custom_id" in line}
    assert bodies["a"]["choices"] == bodies["b"]["choices"]
    assert bodies["a"]["id"] != bodies["b"]["id"]
    assert report.saved.duplicate_lines == 7
    assert report.saved.duplicate_completion_tokens == 5 * 5 + 4 + 5
    assert report.tally.num_generated_tokens == 8 * 5 + 2 * 4


def test_repeated_sampled_lines_without_a_seed_are_all_computed(write_lines: WriteLines, start: Start) -> None:
    report, lines = run(write_lines(*[{"prompt": "Hello", "max_tokens": 5}] * 6), start)
    assert len({line["text"] for line in lines}) == 6
    assert report.saved.duplicate_lines == 0


def test_duplicates_of_a_refused_line_are_refused_too(write_lines: WriteLines, start: Start) -> None:
    report, lines = run(write_lines(*[{"prompt": "x" * 600, "temperature": 0}] * 5), start)
    assert dict(report.tally.errors) == {"context_length_exceeded": 5}
    assert sorted(line["error"]["message"].split(":")[0] for line in lines) == [f"line {n}" for n in range(1, 6)]


def test_a_duplicate_far_behind_gets_the_answer_that_was_kept(tmp_path: Path, start: Start) -> None:
    data = [b'{"prompt": "one", "max_tokens": 2, "temperature": 0}', b'{"prompt": "%d", "max_tokens": 2}']
    batches = [[InputLine(i, 0, data[0] if i in (0, 299) else data[1] % i) for i in range(k, k + 10)]
               for k in range(0, 300, 10)]  # fmt: skip
    job = JobSpec(input="-", output=str(tmp_path / "out.jsonl"))
    with ResultWriter.open(job.output) as writer:
        report = run_loop(job, start, batches, writer, Window(num_lines=10))
    assert report.tally.num_answered == 300
    assert (report.saved.duplicate_lines, report.stats.scheduler.num_finished) == (1, 299)


# Status.


def test_the_status_beside_the_output_says_how_the_job_ended(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*[{"prompt": f"line {i}", "max_tokens": 3} for i in range(5)], "{broken")
    run(source, start)
    status = read_status(source.parent / "out.jsonl.job" / "status.json")
    assert (status.state, status.lines_total, status.lines_done, status.errors) == (
        "finished",
        6,
        6,
        {"invalid_json": 1},
    )
    assert (status.completion_tokens, status.lines_in_flight, status.seconds_left) == (15, 0, None)


def test_the_status_of_a_job_that_failed_says_so(write_lines: WriteLines, start: Start) -> None:
    def break_down(step: int) -> None:
        raise RuntimeError("CUDA error: the device is gone")

    source = write_lines({"prompt": "a"})
    with pytest.raises(ResumableJobError):
        run(source, functools.partial(start, runner=WatchedRunner(break_down)))
    assert read_status(source.parent / "out.jsonl.job" / "status.json").state == "failed"


def test_a_price_without_a_gpu_is_refused(write_lines: WriteLines, start: Start) -> None:
    with pytest.raises(ConfigError, match="--gpu-price is for a GPU, and this job runs on cpu; leave it out"):
        run(write_lines({"prompt": "a"}), start, gpu_price=2.0)


def test_once_the_input_has_ended_concurrency_is_limited(write_lines: WriteLines, start: Start) -> None:
    limits: list[int | None] = []
    has_ended = threading.Event()

    def start_limited(config: EngineConfig, deliver: Any) -> Engine:
        engine = start(config, deliver, runner=WatchedRunner(lambda step: wait_for(has_ended)))
        limit_running = engine.client.limit_running

        def limit(num_seqs: int | None) -> None:
            limits.append(num_seqs)
            limit_running(num_seqs)
            has_ended.set()

        engine.client.limit_running = limit  # type: ignore[method-assign]
        return dataclasses.replace(engine, settings=dataclasses.replace(engine.settings, full_rate_seqs=2))

    short = [{"prompt": f"{i}", "max_tokens": 10, "ignore_eos": True} for i in range(20)]
    report, _ = run(write_lines({"prompt": "a", "max_tokens": 100, "ignore_eos": True}, *short), start_limited)
    assert report.tally.num_answered == 21
    assert limits == [3]  # 300 tokens, 100 of them in the longest answer


# Bounds.


def test_reading_never_runs_far_ahead_of_writing(tmp_path: Path, start: Start) -> None:
    num_batches, ahead = 40, []

    def lines(writer: ResultWriter) -> Iterator[list[InputLine]]:
        for batch in range(num_batches):
            ahead.append(batch * BATCH_LINES - writer.num_written)
            data = b'{"prompt": "some words", "max_tokens": 2}'
            yield [InputLine(batch * BATCH_LINES + place, 0, data) for place in range(BATCH_LINES)]

    job = JobSpec(input="-", output=str(tmp_path / "out.jsonl"))
    window = Window(num_lines=100)
    with ResultWriter.open(job.output) as writer:
        report = run_loop(job, start, lines(writer), writer, window)
    assert report.tally.num_answered == num_batches * BATCH_LINES
    in_flight = 2 * 4 + SPARE_SEQUENCES
    assert max(ahead) <= in_flight + window.num_lines + (MAX_BATCHES_AHEAD + 1) * BATCH_LINES


class WatchedRunner(FakeRunner):
    """Calls `at_step` before each step."""

    def __init__(self, at_step: Callable[[int], None], *, max_num_seqs: int = 8) -> None:
        super().__init__(max_num_seqs=max_num_seqs, vocab_size=128)
        self._at_step = at_step

    def submit(self, plan: StepPlan) -> StepResult:
        self._at_step(plan.step)
        return super().submit(plan)


def wait_for(event: threading.Event) -> None:
    assert event.wait(60)


# Stops.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_job_and_the_same_command_continues_it(
    write_lines: WriteLines, start: Start, number: signal.Signals
) -> None:
    def interrupt_once(step: int) -> None:
        if step == 300:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    source = write_lines(*[{"prompt": "a", "max_tokens": 200, "ignore_eos": True}] * 40)
    job = JobSpec(input=str(source), output=str(source.parent / "out.jsonl"), grace_s=0)
    report = run_job(job, start=functools.partial(start, runner=WatchedRunner(interrupt_once)), quiet=True)
    assert report.was_stopped
    assert report.exit_code == 75
    assert report.num_in_flight > 0
    assert 0 < report.tally.num_done < 40
    assert signal.getsignal(number) is before
    assert not Path(job.output).exists()
    assert read_status(job.directory / "status.json").state == "stopped"
    again, lines = run(source, start)
    assert (again.exit_code, again.num_before) == (0, report.tally.num_done)
    assert sorted(line["index"] for line in lines) == list(range(40))
    status = read_status(job.directory / "status.json")
    assert (status.lines_total, status.lines_done, status.lines_before) == (40, 40, again.num_before)


def test_ctrl_c_in_a_job_that_writes_a_stream_keeps_what_was_written(write_lines: WriteLines, start: Start) -> None:
    def interrupt_once(step: int) -> None:
        if step == 300:
            os.kill(os.getpid(), signal.SIGINT)

    source = write_lines(*[{"prompt": "a", "max_tokens": 200, "ignore_eos": True}] * 400)
    receiver, sender = os.pipe()
    job = JobSpec(input=str(source), output=f"/dev/fd/{sender}", grace_s=0)
    report = run_job(job, start=functools.partial(start, runner=WatchedRunner(interrupt_once)), quiet=True)
    os.close(sender)
    with os.fdopen(receiver, "rb") as file:
        lines = file.read().splitlines()
    assert (report.was_stopped, report.exit_code) == (True, 130)
    assert 0 < len(lines) == report.tally.num_done < 400


def test_sigterm_while_the_model_loads_is_resumable(write_lines: WriteLines) -> None:
    def load(*arguments: Any) -> Engine:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the model was loaded")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ResumableJobError, match="stopped by SIGTERM while no line was in flight"):
        run(write_lines({"prompt": "a"}), load)
    assert signal.getsignal(signal.SIGTERM) is before


def test_lines_in_flight_may_finish_within_the_grace_period(write_lines: WriteLines, start: Start) -> None:
    def interrupt_once(step: int) -> None:
        if step == 30:
            os.kill(os.getpid(), signal.SIGTERM)

    source = write_lines(*[{"prompt": "a", "max_tokens": 100, "ignore_eos": True}] * 400)
    job = JobSpec(input=str(source), output=str(source.parent / "out.jsonl"), grace_s=1e6)
    report = run_job(job, start=functools.partial(start, runner=WatchedRunner(interrupt_once)), quiet=True)
    assert report.was_stopped and report.num_in_flight == 0
    assert 0 < report.tally.num_done < 400


def test_duplicates_of_a_line_in_flight_are_answered_with_it_within_the_grace_period(
    write_lines: WriteLines, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_stopping = threading.Event()
    drop_waiting = Planner.drop_waiting

    def drop(planner: Planner) -> None:
        drop_waiting(planner)
        is_stopping.set()

    def interrupt_once(step: int) -> None:
        if step == 30:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(is_stopping)

    monkeypatch.setattr(Planner, "drop_waiting", drop)
    source = write_lines(*[{"prompt": "a", "max_tokens": 60, "ignore_eos": True, "temperature": 0}] * 30)
    job = JobSpec(input=str(source), output=str(source.parent / "out.jsonl"), grace_s=1e6)
    report = run_job(job, start=functools.partial(start, runner=WatchedRunner(interrupt_once)), quiet=True)
    assert (report.was_stopped, report.exit_code, report.tally.num_done) == (True, 75, 30)
    again, lines = run(source, never)
    assert again.num_before == 30
    assert sorted(line["index"] for line in lines) == list(range(30))


def test_a_lost_device_ends_the_process_and_the_same_command_continues_the_job(
    write_lines: WriteLines, start: Start
) -> None:
    def break_down(step: int) -> None:
        if step == 30:
            raise RuntimeError("CUDA error: the device is gone")

    source = write_lines(*[{"prompt": "a", "max_tokens": 2}] * 4, *[{"prompt": "a", "max_tokens": 500}] * 4)
    with pytest.raises(
        ResumableJobError, match=r"the device is gone; run the same command again to continue, with the engine in a"
    ):
        run(source, functools.partial(start, runner=WatchedRunner(break_down)))
    report, lines = run(source, start)
    assert (report.num_before, len(lines)) == (4, 8)


def test_answers_can_be_read_while_the_job_runs(write_lines: WriteLines, start: Start, tmp_path: Path) -> None:
    seen: list[list[dict[str, Any]]] = []

    def look(step: int) -> None:
        """The engine waits until results can be seen."""
        while step == 200 and not seen:
            lines = [line for path in (tmp_path / "out.jsonl.job").glob("seg-*.jsonl") for line in read(path)]
            seen.extend([lines] if lines else [])

    source = write_lines({"prompt": "a", "max_tokens": 2}, {"prompt": "a", "max_tokens": 400})
    run(source, functools.partial(start, runner=WatchedRunner(look)))
    assert [[(line["i"], line["r"]["index"]) for line in lines] for lines in seen] == [[(0, 0)]]


def test_a_full_disk_is_an_error(write_lines: WriteLines, start: Start) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    source = write_lines({"prompt": "a", "max_tokens": 2})
    with pytest.raises(JobError, match="cannot write to /dev/full: No space left on device; 0 lines were written"):
        run_job(JobSpec(input=str(source), output="/dev/full"), start=start, quiet=True)


# Refused before the model is loaded.


def never(*arguments: Any, **options: Any) -> Engine:
    raise AssertionError("the model was loaded")


def test_an_existing_output_is_kept(write_lines: WriteLines) -> None:
    source = write_lines({"prompt": "a"})
    output = source.parent / "out.jsonl"
    output.write_text("earlier answers\n")
    with pytest.raises(JobError, match="exists; give another file, or --overwrite"):
        run(source, never)
    assert output.read_text() == "earlier answers\n"


def test_a_failed_start_leaves_the_output_to_be_overwritten_as_it_was(write_lines: WriteLines) -> None:
    source = write_lines({"prompt": "a"})
    output = source.parent / "out.jsonl"
    output.write_text("earlier answers\n")
    with pytest.raises(AssertionError, match="the model was loaded"):
        run(source, never, overwrite=True)
    assert output.read_text() == "earlier answers\n"


@pytest.mark.parametrize(
    "given, output, message",
    [
        ("in.jsonl", "in.jsonl", "is the input itself"),
        ("in.jsonl", "./in.jsonl", "is the input itself"),
        ("in.jsonl", ".", "is a directory"),
        ("in.jsonl", "missing/out.jsonl", "missing does not exist"),
        ("nothing.jsonl", "out.jsonl", "the input nothing.jsonl does not exist"),
        (".", "out.jsonl", "is a directory; name a file of JSON lines"),
    ],
)
def test_paths_that_cannot_work_are_refused(
    write_lines: WriteLines, monkeypatch: pytest.MonkeyPatch, given: str, output: str, message: str
) -> None:
    monkeypatch.chdir(write_lines({"prompt": "a"}).parent)
    with pytest.raises(JobError, match=message):
        run_job(JobSpec(input=given, output=output), start=never)


def test_a_directory_that_cannot_be_written_is_refused(
    write_lines: WriteLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines({"prompt": "a"})
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(JobError, match="cannot be written: permission denied"):
        run(source, never)


def test_stages_of_the_start_and_warnings_are_told(
    write_lines: WriteLines, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = (StartupStage("load", 2**30, 2**30, 2.0), StartupStage("compile", 9, 9, 0.5))

    def start_engine(config: EngineConfig, deliver: Deliver, *, report: Report) -> Engine:
        engine = start(config, deliver)
        for stage in stages:
            report(stage)
        settings = dataclasses.replace(engine.settings, warnings=("max_num_seqs=8 is odd",))
        return dataclasses.replace(engine, settings=settings, start_stages=stages)

    monkeypatch.setattr("headrace.jobs.run.run_job.start_engine", start_engine)
    source, told = write_lines({"prompt": "a"}), io.StringIO()
    report = run_job(JobSpec(input=str(source), output=str(source.parent / "out.jsonl")), stream=told)
    assert told.getvalue().splitlines()[:5] == [
        "headrace: loading smollm2 ...",
        "headrace: loaded weights (1.00 GiB) in 2.0 s",
        "headrace: prepared kernels (9) in 0.5 s",
        "headrace: warning: max_num_seqs=8 is odd",
        "headrace: ready in 0.5 s on cpu in float32; answering 1 line",
    ]
    assert dataclasses.replace(report, spec=None).as_json()["start_stages"] == {"load": 2.0, "compile": 0.5}
    assert "to start (load 2.0 s, compile 0.5 s)" in plain_summary(report)
