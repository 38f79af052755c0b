"""Jobs over all file formats that run again: what is refused, what continues, how it is published."""

from __future__ import annotations

import csv
import functools
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.engine.start import Engine
from headrace.errors import JobError, ResumableJobError
from headrace.jobs.input.template import LineTemplate
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec, job_directory
from headrace.jobs.status.report import JobReport
from headrace.jobs.store.job_view import find_job, view_job
from headrace.runner.fake import FakeRunner
from headrace.steps import StepPlan, StepResult

Start = Callable[..., Engine]
WriteLines = Callable[..., Path]
SAY = LineTemplate.of(prompt="Say {text}")


class Breaking(FakeRunner):
    def __init__(self, step: int) -> None:
        super().__init__(max_num_seqs=8, vocab_size=128)
        self._step = step

    def submit(self, plan: StepPlan) -> StepResult:
        if self.num_steps == self._step:
            raise RuntimeError("CUDA error: the device is gone")
        return super().submit(plan)


def run(source: object, output: object, start: Start, **options: Any) -> JobReport:
    options = {"defaults": {"max_tokens": 3}, "template": SAY, **options}
    return run_job(JobSpec(input=str(source), output=str(output), **options), start=start, quiet=True)


def never(*arguments: Any, **options: Any) -> Engine:
    raise AssertionError("the model was loaded")


def lengths(num_lines: int) -> list[dict[str, Any]]:
    """Lines of two prefix groups, whose answers get shorter: the planner does not keep their order."""
    return [
        {"prompt": f"{'ab'[number % 2] * 40} {number}", "max_tokens": num_lines - number, "ignore_eos": True}
        for number in range(num_lines)
    ]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield "memory://again"
    files = fsspec.filesystem("memory")
    if files.exists("/again"):
        files.rm("/again", recursive=True)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"template": LineTemplate.of(prompt="Tell {text}")},
            "started with prompt='Say {text}', now prompt='Tell {text}'",
        ),
        ({"template": LineTemplate.of(prompt="Say {text}", is_chat=True)}, "started with chat=False, now chat=True"),
        ({"template": LineTemplate.of(prompt="Say {text}", system="Now.")}, "started with chat=False, now chat=True"),
        ({"input_format": "tsv"}, "started with input_format='csv', now input_format='tsv'"),
        ({"template": None}, "started with prompt='Say {text}', now prompt=nothing"),
    ],
)
def test_a_changed_prompt_template_is_refused(
    tmp_path: Path, start: Start, options: dict[str, Any], message: str
) -> None:
    (tmp_path / "in.csv").write_text("text\nprompt\n" if "input_format" in options else "text,prompt\na,b\n")
    run(tmp_path / "in.csv", tmp_path / "out.jsonl", start)
    with pytest.raises(JobError) as raised:
        run(tmp_path / "in.csv", tmp_path / "out.jsonl", never, **options)
    assert message in str(raised.value)


def test_lines_may_be_added_to_csv_and_none_may_be_edited(tmp_path: Path, start: Start) -> None:
    source, output = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text("id,text\n1,a\n2,b\n")
    run(source, output, start)
    source.write_text("id,text\n1,a\n2,b\n3,c\n")
    assert (run(source, output, start).num_before, run(source, output, never).num_before) == (2, 3)
    with output.open(newline="") as file:
        assert sorted(row["id"] for row in csv.DictReader(file)) == ["1", "2", "3"]
    source.write_text("id,text\n1,a\n2,B\n3,c\n")
    with pytest.raises(JobError, match=r"the input has changed since .*in.csv has changed between byte 0"):
        run(source, output, never)


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.parquet"])
def test_formats_that_cannot_grow_are_refused_when_they_did(tmp_path: Path, start: Start, name: str) -> None:
    def write(num_rows: int) -> None:
        rows = [{"text": f"{number}"} for number in range(num_rows)]
        if name.endswith("parquet"):
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
        else:
            lines = [json.dumps(row).encode() + b"\n" for row in rows]
            (tmp_path / name).write_bytes(b"".join(gzip.compress(line, mtime=0) for line in lines))

    write(3)
    run(tmp_path / name, tmp_path / "out.jsonl", start)
    assert run(tmp_path / name, tmp_path / "out.jsonl", never).num_before == 3
    write(4)
    with pytest.raises(JobError, match="the input has changed since"):
        run(tmp_path / name, tmp_path / "out.jsonl", never)


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz", "out.jsonl.zst", "out.csv", "out.tsv.gz", "out.parquet"])
def test_every_output_format_can_keep_the_order_of_the_input(
    write_lines: WriteLines, start: Start, tmp_path: Path, name: str
) -> None:
    from headrace.jobs.formats import open_source

    source = write_lines(*lengths(20))
    run(source, tmp_path / name, start, template=None, keep_order=True)
    published = open_source(str(tmp_path / name))
    rows = [json.loads(line.data) for batch in published.read_batches() for line in batch]
    published.close()
    assert [int(row["index"]) for row in rows] == list(range(20))
    committed = [record.index for record in view_job(find_job(str(tmp_path / name))).records()]
    assert committed != list(range(20)), "there was nothing to restore"


def test_another_format_is_published_without_the_model(write_lines: WriteLines, start: Start, tmp_path: Path) -> None:
    source = write_lines({"text": "a"}, {"text": "b"})
    run(source, tmp_path / "out", start)
    run(source, tmp_path / "out", never, output_format="csv")
    assert (tmp_path / "out").read_text().startswith("index,")
    assert run(source, tmp_path / "out", never, output_format="csv").num_before == 2


def test_a_duplicate_whose_original_was_done_in_an_earlier_run_is_computed(
    write_lines: WriteLines, start: Start, tmp_path: Path
) -> None:
    line = {"prompt": "Hello", "max_tokens": 5, "seed": 3}
    source = write_lines(*[{**line, "id": number} for number in range(6)])
    run(source, tmp_path / "out.jsonl", start, template=None, limit=2)
    report = run(source, tmp_path / "out.jsonl", start, template=None)
    assert (report.num_before, report.tally.num_answered, report.saved.duplicate_lines) == (2, 4, 3)
    rows = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted((row["index"], row["id"]) for row in rows) == [(number, number) for number in range(6)]
    assert len({row["text"] for row in rows}) == 1


def test_a_line_refused_for_its_id_does_not_own_it_in_a_later_run(
    write_lines: WriteLines, start: Start, tmp_path: Path
) -> None:
    """The second of two equal ids is committed at once, as an error; the first was in flight when the job failed."""
    body = {"prompt": "a", "max_tokens": 50, "ignore_eos": True}
    line = {"custom_id": "same", "method": "POST", "url": "/v1/completions", "body": body}
    source, output = write_lines(line, line), tmp_path / "out.jsonl"
    with pytest.raises(ResumableJobError):
        run(source, output, functools.partial(start, runner=Breaking(10)), template=None)
    assert [record.index for record in view_job(find_job(str(output))).records()] == [1]
    report = run(source, output, start, template=None)
    assert (report.tally.num_answered, report.tally.num_failed, report.exit_code) == (1, 0, 3)


# Object stores.


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz", "out.parquet"])
def test_a_job_into_an_object_store_continues_and_is_published_whole(
    write_lines: WriteLines, start: Start, store: str, name: str
) -> None:
    source, output = write_lines(*lengths(20)), f"{store}/{name}"
    with pytest.raises(ResumableJobError, match="the same command"):
        run(source, output, functools.partial(start, runner=Breaking(24)), template=None, keep_order=True)
    files = fsspec.filesystem("memory")
    assert not files.exists(output)
    done = view_job(job_directory(output)).committed.num_done
    assert 0 < done < 20
    report = run(source, output, start, template=None, keep_order=True)
    assert (report.num_before, report.exit_code) == (done, 0)
    assert files.ls("/again", detail=False) == [f"/again/{name}"]
    with fsspec.open(output, "rb") as file:
        if name.endswith("parquet"):
            indexes = pq.read_table(file)["index"].to_pylist()
        else:
            data = file.read()
            lines = (gzip.decompress(data) if name.endswith("gz") else data).splitlines()
            indexes = [json.loads(line)["index"] for line in lines]
    assert indexes == list(range(20))


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.parquet"])
def test_a_failed_publication_leaves_no_object(
    write_lines: WriteLines, start: Start, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.jobs.store import publish

    def broken(sink: Any, results: Any) -> None:
        sink.append(next(iter(results)))
        raise OSError(28, "No space left on device")

    monkeypatch.chdir(tmp_path)
    source, output = write_lines({"text": "a"}, {"text": "b"}), f"local://{tmp_path}/{name}"
    monkeypatch.setattr(publish, "copy_results", broken)
    with pytest.raises(JobError, match="cannot be written: No space left on device; its results are safe in"):
        run(source, output, start, disk_wait_s=0.0)
    assert not (tmp_path / name).exists()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert run(source, output, never).num_before == 2
    assert (tmp_path / name).exists()
