"""Jobs that run more than once: what is skipped, what is refused, what is computed again."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.engine.start import Engine
from headrace.errors import ConfigError, JobError
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec, job_directory
from headrace.jobs.status.report import JobReport
from headrace.jobs.store.cancel import cancel, undo
from headrace.jobs.store.clean import clean
from headrace.jobs.store.job_view import find_job, view_job
from headrace.runner.fake import FakeRunner
from headrace.steps import StepPlan, StepResult

Start = Callable[..., Engine]
WriteLines = Callable[..., Path]


class Breaking(FakeRunner):
    """Its device fails at a step, or the job is cancelled at that step."""

    def __init__(self, step: int, *, cancels: Path | None = None) -> None:
        super().__init__(max_num_seqs=8, vocab_size=128)
        self._step = step
        self._cancels = cancels

    def submit(self, plan: StepPlan) -> StepResult:
        if self.num_steps == self._step:
            if self._cancels is None:
                raise RuntimeError("CUDA error: the device is gone")
            cancel(self._cancels)
        return super().submit(plan)


def output_of(source: Path) -> Path:
    return source.parent / "out.jsonl"


def run(source: Path, start: Start, **options: Any) -> JobReport:
    return run_job(JobSpec(input=str(source), output=str(output_of(source)), **options), start=start, quiet=True)


def read(path: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["index"] for line in lines}) == len(lines)
    return {line["index"]: line for line in lines}


def interrupt(source: Path, start: Start, step: int = 12, **options: Any) -> None:
    with pytest.raises(Exception, match="the device is gone"):
        run(source, functools.partial(start, runner=Breaking(step)), **options)


def never(*arguments: Any, **options: Any) -> Engine:
    raise AssertionError("the model was loaded")


def prompts(num_lines: int, max_tokens: int = 4) -> list[dict[str, Any]]:
    return [{"prompt": f"line {number}", "max_tokens": max_tokens, "ignore_eos": True} for number in range(num_lines)]


def test_the_same_command_computes_the_rest(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(40))
    interrupt(source, start)
    assert not output_of(source).exists()
    done = view_job(job_directory(str(output_of(source)))).committed.num_done
    assert 0 < done < 40
    report = run(source, start)
    assert (report.exit_code, report.num_before, report.tally.num_done) == (0, done, 40 - done)
    assert read(output_of(source)).keys() == set(range(40))


def test_a_completed_job_has_nothing_left_to_do_and_loads_no_model(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(5), "{broken")
    assert run(source, start).exit_code == 3
    before = os.stat(output_of(source))
    assert run(source, never).exit_code == 3
    assert os.stat(output_of(source)).st_ino == before.st_ino


def test_a_lost_output_is_published_again_without_the_model(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(5))
    run(source, start)
    published = output_of(source).read_bytes()
    output_of(source).unlink()
    run(source, never)
    assert output_of(source).read_bytes() == published


def test_the_output_can_keep_the_order_of_the_input(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*[{"prompt": "a", "max_tokens": 20 - number, "ignore_eos": True} for number in range(20)])
    run(source, start)
    assert list(read(output_of(source))) != list(range(20))
    run(source, never, keep_order=True)
    assert list(read(output_of(source))) == list(range(20))


def test_lines_may_be_added_to_the_input(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(5))
    run(source, start)
    with open(source, "a") as file:
        file.write(json.dumps({"prompt": "one more", "max_tokens": 2}) + "\n")
    report = run(source, start)
    assert (report.num_before, report.tally.num_done) == (5, 1)
    assert read(output_of(source)).keys() == set(range(6))


def test_whole_batches_of_done_lines_are_skipped(write_lines: WriteLines, start: Start) -> None:
    lines = prompts(64 * 6, max_tokens=1)
    source = write_lines(*lines)
    run(source, start)
    write_lines(*lines, *prompts(1))
    assert run(source, start).tally.num_done == 1


def test_a_larger_limit_continues_the_job(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(6))
    run(source, start, limit=2)
    assert run(source, start, limit=4).tally.num_done == 2
    assert read(output_of(source)).keys() == {0, 1, 2, 3}


def test_an_id_is_a_duplicate_even_if_the_first_was_done_before(write_lines: WriteLines, start: Start) -> None:
    body = {"prompt": "a", "max_tokens": 2}
    line = {"custom_id": "same", "method": "POST", "url": "/v1/completions", "body": body}
    source = write_lines(line, line)
    run(source, start, limit=1)
    report = run(source, start)
    assert dict(report.tally.errors) == {"duplicate_custom_id": 1}


def test_the_answers_of_all_runs_share_a_job_id(write_lines: WriteLines, start: Start) -> None:
    def line(number: int) -> dict[str, Any]:
        body = {"prompt": "a", "max_tokens": 2}
        return {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}

    source = write_lines(line(0), line(1))
    run(source, start, limit=1)
    run(source, start)
    ids = [json.loads(text)["id"] for text in output_of(source).read_text().splitlines()]
    assert len({name.rpartition("-")[0] for name in ids}) == 1


# Checks against the first run.


@pytest.mark.parametrize(
    "options, message",
    [
        ({"defaults": {"max_tokens": 9}}, r"started with sampling.max_tokens=nothing, now sampling.max_tokens=9"),
        ({"config": EngineConfig(model="other")}, r"started with model='smollm2', now model='other'"),
        ({"config": EngineConfig(seed=4)}, r"started with seed=0, now seed=4"),
        ({"config": EngineConfig(dtype="bfloat16")}, r"started with dtype='auto', now dtype='bfloat16'"),
    ],
)
def test_changed_settings_are_refused_by_name_with_both_values(
    write_lines: WriteLines, start: Start, options: dict[str, Any], message: str
) -> None:
    source = write_lines(*prompts(5))
    run(source, start)
    with pytest.raises(JobError, match=message):
        run(source, never, **options)
    assert run(source, start, overwrite=True, **options).num_before == 0


def test_settings_that_change_no_answer_may_change(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(40))
    interrupt(source, start)
    assert run(source, start, config=EngineConfig(max_num_seqs=2)).exit_code == 0


def test_another_template_is_refused(
    write_lines: WriteLines, start: Start, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(*prompts(5))
    run(source, start, limit=2)
    monkeypatch.setattr(tokenizer.chat_template, "templates", {"default": "another"})
    with pytest.raises(JobError, match=r"started with template='\w+', now template='\w+'"):
        run(source, start)


def test_another_model_under_the_same_name_is_refused(write_lines: WriteLines, start: Start, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    source = write_lines(*prompts(3))
    run(source, start, config=EngineConfig(model=str(model)))
    (model / "config.json").write_text('{"changed": 1}')
    with pytest.raises(JobError, match="started with model_files="):
        run(source, never, config=EngineConfig(model=str(model)))


LARGE = 17 << 20  # past what is read whole


def fine_tuned(file: Path) -> None:
    """Other weights under the same name, size and time of modification."""
    before = os.stat(file)
    with open(file, "r+b") as weights:
        weights.seek(-(1 << 20), os.SEEK_END)
        weights.write(b"x" * (1 << 20))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def model_of(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(LARGE))
    return model


def test_other_weights_of_the_same_name_and_size_are_refused(
    write_lines: WriteLines, start: Start, tmp_path: Path
) -> None:
    model = model_of(tmp_path)
    source = write_lines(*prompts(3))
    run(source, start, config=EngineConfig(model=str(model)), limit=1)
    fine_tuned(model / "model.safetensors")
    with pytest.raises(JobError, match="started with model_weights="):
        run(source, never, config=EngineConfig(model=str(model)))


def test_another_tokenizer_under_the_same_name_is_refused(
    write_lines: WriteLines, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "tokenizer.json").write_text('{"a": 1}')
    config = EngineConfig(model="fake", tokenizer=str(tmp_path / "words"))
    source = write_lines(*prompts(3))
    run(source, start, config=config, limit=1)
    (tmp_path / "words" / "tokenizer.json").write_text('{"b": 1}')
    with pytest.raises(JobError, match="started with tokenizer_files="):
        run(source, never, config=config)


def test_a_job_of_an_earlier_version_is_continued_and_gets_the_digests_that_it_lacks(
    write_lines: WriteLines, start: Start, tmp_path: Path
) -> None:
    model = model_of(tmp_path)
    config = EngineConfig(model=str(model))
    source = write_lines(*prompts(3))
    run(source, start, config=config, limit=1)
    manifest = job_directory(str(output_of(source))) / "manifest.json"
    written = json.loads(manifest.read_text())
    for name in ("model_weights", "tokenizer_files"):
        del written["fingerprint"][name]
    manifest.write_text(json.dumps(written))
    assert run(source, start, config=config, limit=2).num_before == 1
    fine_tuned(model / "model.safetensors")
    with pytest.raises(JobError, match="started with model_weights="):
        run(source, never, config=config)


@pytest.mark.parametrize(
    "before, after, message",
    [
        ("one\ntwo\n", "one\nTWO\n", "has changed between byte 0 and byte 8"),
        ("one\ntwo\n", "one\n", "had 8 bytes and has 4"),
        ("one\ntwo", "one\ntwo more\n", "the last line of .* has changed"),
        ("one\ntwo", "one\ntwo\nthree\n", None),
        ("one\n", "one\ntwo\n", None),
        ("", "one\n", None),
    ],
)
def test_lines_of_the_input_may_not_change(
    tmp_path: Path, start: Start, before: str, after: str, message: str | None
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(before)
    run(path, start)
    path.write_text(after)
    if message is None:
        assert run(path, start).num_before == len(before.split())
    else:
        with pytest.raises(JobError, match=f"the input has changed since .*: .*{message}"):
            run(path, never)


def test_a_changed_chunk_is_located(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.jobs.formats.identity.CHUNK_BYTES", 10)
    path = tmp_path / "in.jsonl"
    path.write_text("0123456789" * 4)
    run(path, start)
    path.write_text("0123456789" * 2 + "012345678x" + "0123456789")
    with pytest.raises(JobError, match="between byte 20 and byte 30"):
        run(path, never)


def test_a_job_from_a_pipe_cannot_be_resumed_and_says_so(write_lines: WriteLines, start: Start, tmp_path: Path) -> None:
    source = write_lines(*prompts(5))
    read_end, write_end = os.pipe()
    os.write(write_end, source.read_bytes())
    os.close(write_end)
    job = JobSpec(input=f"/dev/fd/{read_end}", output=str(tmp_path / "out.jsonl"))
    assert run_job(job, start=start, quiet=True).exit_code == 0
    assert read(tmp_path / "out.jsonl").keys() == set(range(5))
    with pytest.raises(JobError, match="read its input from a pipe, which cannot be read again"):
        run_job(job, start=never, quiet=True)
    os.close(read_end)


def test_a_failed_start_leaves_no_job_behind(write_lines: WriteLines) -> None:
    source = write_lines(*prompts(2))
    with pytest.raises(AssertionError, match="the model was loaded"):
        run(source, never)
    assert [path.name for path in source.parent.iterdir()] == ["in.jsonl"]


def test_overwrite_keeps_the_old_job_until_the_model_is_there(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(40))
    interrupt(source, start)
    with pytest.raises(AssertionError, match="the model was loaded"):
        run(source, never, overwrite=True)
    assert run(source, start).num_before > 0
    assert run(source, start, overwrite=True).num_before == 0


def test_a_damaged_manifest_is_refused_and_can_be_overwritten(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(3))
    run(source, start)
    (job_directory(str(output_of(source))) / "manifest.json").write_text("{")
    with pytest.raises(JobError, match=r"is damaged: .* start the job over with --overwrite"):
        run(source, never)
    assert run(source, start, overwrite=True).tally.num_done == 3


def test_segments_without_a_manifest_do_not_count(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(3))
    run(source, start)
    (job_directory(str(output_of(source))) / "manifest.json").unlink()
    output_of(source).unlink()
    report = run(source, start)
    assert (report.num_before, report.tally.num_done) == (0, 3)


# Lines computed again.


def test_truncated_lines_are_computed_again_with_more_tokens(write_lines: WriteLines, start: Start) -> None:
    everywhere = [chr(code) for code in range(128)]
    source = write_lines(*prompts(4, max_tokens=2), {"prompt": "a", "stop": everywhere})
    run(source, start)
    before = read(output_of(source))
    report = run(source, start, redo="finish_reason=length", overrides={"max_tokens": 6})
    after = read(output_of(source))
    assert (report.num_before, report.tally.num_done) == (1, 4)
    assert after[4] == before[4]
    assert [after[index]["usage"]["completion_tokens"] for index in range(4)] == [6] * 4
    assert all(after[index]["text"].startswith(before[index]["text"]) for index in range(4))


def test_error_lines_are_retried_and_an_answer_replaces_them(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(3), {"prompt": "a" * 600}, {"prompt": "b", "max_tokens": 0})
    assert run(source, start).exit_code == 3
    report = run(source, start, redo="error=invalid_request and line=5", overrides={"max_tokens": 4})
    assert (report.tally.num_answered, report.tally.num_failed, report.exit_code) == (1, 0, 3)
    after = read(output_of(source))
    assert [index for index, line in after.items() if "error" in line] == [3]
    assert run(source, start, redo="error").tally.num_done == 1


def test_an_interrupted_redo_continues(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(40, max_tokens=2))
    run(source, start)
    again: dict[str, Any] = {"redo": "finish_reason=length", "overrides": {"max_tokens": 4}}
    interrupt(source, start, **again)
    report = run(source, start, **again)
    assert 0 < report.tally.num_done < 40
    assert {line["usage"]["completion_tokens"] for line in read(output_of(source)).values()} == {4}
    assert run(source, start, **again).tally.num_done == 40, "a redo that was completed begins again"


def test_an_error_in_a_redo_does_not_replace_an_answer(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(2))
    run(source, start)
    before = read(output_of(source))
    report = run(source, start, redo="finish_reason=length", overrides={"max_tokens": 0})
    assert (report.tally.num_failed, report.exit_code) == (2, 0)
    assert read(output_of(source)) == before


@pytest.mark.parametrize(
    "options, message",
    [
        ({"redo": "finish_raeson=length"}, "no result has a field 'finish_raeson', did you mean 'finish_reason'"),
        ({"redo": "length"}, "is not a condition"),
    ],
)
def test_invalid_conditions_are_refused(
    write_lines: WriteLines, start: Start, options: dict[str, Any], message: str
) -> None:
    source = write_lines(*prompts(2))
    run(source, start)
    with pytest.raises((JobError, ConfigError), match=message):
        run(source, never, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"overrides": {"max_tokens": 3}},
        {"redo": "error", "overwrite": True},
        {"output": "-", "keep_order": True},
        {"output": "-", "redo": "error"},
        {"grace_s": -1.0},
    ],
)
def test_invalid_combinations_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        JobSpec(**{"input": "in.jsonl", "output": "out.jsonl", **options})


# cancel and clean.


def test_a_running_job_is_cancelled_and_stays_so_until_undone(
    write_lines: WriteLines, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.jobs.run.stop_state.CANCEL_SECONDS", 0.0)
    source = write_lines(*prompts(4), *prompts(400, max_tokens=400))
    directory = job_directory(str(output_of(source)))
    report = run(source, functools.partial(start, runner=Breaking(20, cancels=directory)), grace_s=0)
    assert (report.exit_code, report.was_cancelled) == (4, True)
    assert view_job(directory).state == "cancelled"
    with pytest.raises(JobError, match="was cancelled; 'headrace cancel --undo"):
        run(source, never)
    undo(directory)
    assert run(source, start, limit=6).exit_code == 0


def test_a_cancel_that_comes_too_late_changes_nothing(
    write_lines: WriteLines, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.jobs.run.stop_state.CANCEL_SECONDS", 1e6)
    source = write_lines(*prompts(4))
    directory = job_directory(str(output_of(source)))
    assert run(source, functools.partial(start, runner=Breaking(2, cancels=directory))).exit_code == 0
    assert run(source, never).exit_code == 0


def test_a_stopped_job_is_marked_and_a_completed_one_is_not(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(40))
    interrupt(source, start)
    directory = find_job(str(output_of(source)))
    cancel(directory)
    assert view_job(directory).state == "cancelled"
    with pytest.raises(JobError, match="was cancelled"):
        run(source, never)
    undo(directory)
    run(source, start)
    with pytest.raises(JobError, match="is completed"):
        cancel(directory)
    with pytest.raises(JobError, match="is not cancelled, it is completed"):
        undo(directory)


def test_only_completed_jobs_are_removed(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(40))
    interrupt(source, start)
    directory = find_job(str(output_of(source)))
    with pytest.raises(JobError, match="is not completed, its work would be lost"):
        clean(directory)
    run(source, start)
    assert clean(directory) > 0
    assert not directory.exists() and output_of(source).exists()
    with pytest.raises(JobError, match="exists; give another file, or --overwrite"):
        run(source, never)


def test_force_removes_any_job(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(40))
    interrupt(source, start)
    clean(find_job(str(output_of(source))), force=True)
    with pytest.raises(JobError, match="there is no job"):
        find_job(str(output_of(source)))


def test_all_names_of_an_output_are_one_job(write_lines: WriteLines, start: Start, tmp_path: Path) -> None:
    source = write_lines(*prompts(3))
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "out.jsonl")
    run_job(JobSpec(input=str(source), output=str(tmp_path / "link.jsonl")), start=start, quiet=True)
    assert (tmp_path / "link.jsonl").is_symlink()
    assert run(source, never).num_before == 3


class Changing(FakeRunner):
    """Changes the input at the third step. A small input has been read by then."""

    def __init__(self, change: Callable[[], Any]) -> None:
        super().__init__(max_num_seqs=8, vocab_size=128)
        self._change = change

    def submit(self, plan: StepPlan) -> StepResult:
        if self.num_steps == 3:
            self._change()
        return super().submit(plan)


def test_an_input_that_changes_while_the_job_runs_is_not_published_until_it_is_restored(
    write_lines: WriteLines, start: Start
) -> None:
    source = write_lines(*prompts(40))
    before = source.read_bytes()
    for change in (before[:100], before.replace(b"line", b"LINE")):
        source.write_bytes(before)
        os.utime(source, (1, 1))
        runner = Changing(functools.partial(source.write_bytes, change))
        with pytest.raises(JobError, match="the input has changed while the job was running"):
            run(source, functools.partial(start, runner=runner), overwrite=True)
        assert not output_of(source).exists()
        assert view_job(job_directory(str(output_of(source)))).state == "stopped"
    with pytest.raises(JobError, match="the input has changed since the job"):
        run(source, never)
    source.write_bytes(before)
    assert run(source, start).exit_code == 0
    assert read(output_of(source)).keys() == set(range(40))


def test_an_input_that_is_removed_while_the_job_runs_is_answered_to_its_end(
    write_lines: WriteLines, start: Start
) -> None:
    source = write_lines(*prompts(40), "{broken")
    report = run(source, functools.partial(start, runner=Changing(source.unlink)))
    assert (report.exit_code, report.tally.num_answered) == (3, 40)
    assert read(output_of(source)).keys() == set(range(41))
