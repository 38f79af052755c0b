from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.config import EngineConfig
from headrace.engine.checks import RequestChecks
from headrace.errors import JobError
from headrace.jobs.preflight.check import check_job
from headrace.jobs.preflight.front import Front
from headrace.jobs.preflight.rate import Rate
from headrace.jobs.preflight.report import CheckReport, Problem
from headrace.jobs.spec import JobSpec
from headrace.models.spec import ModelSpec
from headrace.text import Tokenizer
from tests.jobs.conftest import EOS_TOKEN_ID, VOCAB_SIZE, settings_of

WriteLines = Callable[..., Path]


@pytest.fixture
def front(tokenizer: Tokenizer) -> Front:
    checks = RequestChecks(settings_of(EngineConfig()).limits, (EOS_TOKEN_ID,), VOCAB_SIZE)
    spec = SimpleNamespace(vocab_size=VOCAB_SIZE, hidden_size=8, pooler=None, is_encoder=False)
    return Front("fake", tokenizer, cast(ModelSpec, spec), checks)


def check(source: Path, front: Front, rate: Rate | None = None, **options: Any) -> tuple[CheckReport, list[Problem]]:
    problems: list[Problem] = []
    job = JobSpec(input=str(source), output=str(source.parent / "out.jsonl"), **options)
    return check_job(job, front, report_problem=problems.append, rate=rate), problems


def chat(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


DEEP = '{"prompt": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"

CASES: list[tuple[Any, str | None]] = [
    (b'{"prompt": "\xff"}', "invalid_utf8"),
    (b"\xef\xbb\xbf" + b'{"prompt": "a"}', "invalid_json"),  # a mark is only accepted at the start of the file
    (DEEP, "invalid_json"),
    ('{"prompt": "a", "temperature": NaN}', "invalid_json"),
    ('{"prompt": "a", "score": 1e999}', "invalid_json"),
    ('{"prompt": "a", "id": 123456789012345678901234567890}', None),
    ('{"prompt": "a", "max_tokens": 99999999999999999999}', None),
    ('{"prompt": "a", "prompt": "b"}', None),  # the last one counts, as in most parsers
    ('{"prompt": "a"', "invalid_json"),
    ("[1]", "invalid_json"),
    ('"text"', "invalid_json"),
    ('{"text": "a"}', "missing_prompt"),
    ({"prompt": "x" * 600}, "context_length_exceeded"),
    ({"prompt": ""}, "empty_prompt"),
    ({"prompt": [9999]}, "invalid_request"),
    (chat("a"), None),
    (chat("a"), "duplicate_custom_id"),
    (chat("b", tools=[{}]), "invalid_request"),
    (chat("c", temprature=1), "unknown_parameter"),
    ({**chat("g"), "url": "/v1/completions", "body": {"prompt": ["a", "b"]}}, None),
    ({**chat("h"), "url": "/v1/completions", "body": {"prompt": ["a", "x" * 600]}}, "context_length_exceeded"),
    ({**chat("d"), "url": "/v1/embeddings", "body": {"input": ["a", "b"]}}, None),
    ({**chat("e"), "url": "/v1/embeddings", "body": {"input": ["a", ""]}}, "empty_prompt"),
    ({**chat("f"), "url": "/v1/embeddings", "body": {"input": "a", "dimensions": 1}}, "unsupported_parameter"),
]


def test_every_problem_is_in_one_report_with_its_place(write_lines: WriteLines, front: Front) -> None:
    source = write_lines({"prompt": "first"}, "", *[line for line, _ in CASES])
    data = source.read_bytes()
    report, problems = check(source, front)
    expected = [(number, code) for number, (_, code) in enumerate(CASES, 3) if code]
    assert [(problem.line, problem.code) for problem in problems] == expected
    for problem in problems:
        assert data[: problem.offset].count(b"\n") == problem.line - 1
        assert problem.offset == 0 or data[problem.offset - 1 : problem.offset] == b"\n"
    assert (report.num_lines, report.num_bad) == (len(CASES) + 1, len(expected))
    assert report.exit_code == 3
    assert "line 18" in str(problems[-6])


def test_a_check_finds_what_a_run_would(write_lines: WriteLines, front: Front, start: Any) -> None:
    from headrace.jobs.run.run_job import run_job

    source = write_lines(*[line for line, _ in CASES])
    job = JobSpec(input=str(source), output=str(source.parent / "out.jsonl"))
    report, _ = check(source, front)
    assert report.errors == run_job(job, start=start, quiet=True).tally.errors


def test_tokens_disk_and_time_are_estimated(write_lines: WriteLines, front: Front) -> None:
    source = write_lines({"prompt": "abcd", "max_tokens": 10, "n": 2}, {"messages": [{"role": "user", "content": "a"}]})
    report, problems = check(source, front, Rate(100.0, "as given"))
    chat_len = len("[user]a[reply]")
    assert problems == [] and report.exit_code == 0
    assert report.num_prompt_tokens == 4 + chat_len and report.longest_prompt == chat_len
    assert report.max_completion_tokens == 20 + 512 - chat_len
    assert report.seconds == pytest.approx(report.max_completion_tokens / 100)
    assert report.max_completion_tokens < report.max_output_bytes < report.max_completion_tokens + 1000
    assert "at most 5 s at 100 tokens/s, as given" in report.text()
    assert json.loads(json.dumps(report.as_json()))["rate"]["source"] == "as given"


def embed(custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/embeddings", "body": body}


def test_embeddings_need_tokens_and_disk_but_no_answers(write_lines: WriteLines, front: Front) -> None:
    spec = SimpleNamespace(vocab_size=VOCAB_SIZE, hidden_size=100, pooler=None, is_encoder=False)
    front = replace(front, spec=cast(ModelSpec, spec))
    lines = [embed("a", input=["abcd", "ab"]), embed("b", input="abc"), embed("c", input=["a", "x" * 600])]
    report, problems = check(write_lines(*lines), front)
    assert [(problem.line, problem.code) for problem in problems] == [(3, "context_length_exceeded")]
    assert (report.num_prompt_tokens, report.longest_prompt, report.max_completion_tokens) == (9, 4, 0)
    assert 3 * 100 * 20 < report.num_sampled_bytes < 3 * 100 * 30


def test_several_prompts_are_counted_one_by_one(write_lines: WriteLines, front: Front) -> None:
    body = {"prompt": ["abcd", "ab"], "max_tokens": 10, "n": 3}
    report, _ = check(write_lines({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}), front)
    assert (report.num_prompt_tokens, report.longest_prompt, report.max_completion_tokens) == (6, 4, 60)


def test_without_a_rate_no_time_is_estimated(write_lines: WriteLines, front: Front) -> None:
    report, _ = check(write_lines({"prompt": "a"}), front)
    assert report.seconds is None and "not known; give --rate" in report.text()


def test_the_summary_of_an_earlier_run_gives_rate_and_answer_length(
    tmp_path: Path, write_lines: WriteLines, front: Front
) -> None:
    summary = {"completion_tokens_per_second": 50.0, "answered": 10, "completion_tokens": 300, "model": "m"}
    (tmp_path / "s.json").write_text(json.dumps(summary))
    rate = Rate.read(str(tmp_path / "s.json"))
    report, _ = check(write_lines(*[{"prompt": "a"}] * 5), front, rate)
    assert report.expected_completion_tokens == 150
    assert report.seconds == pytest.approx(3.0)
    assert f"about 3 s at 50 tokens/s, as in {tmp_path / 's.json'} (m)" in report.text()


@pytest.mark.parametrize("given", ["0", "-1", "no-such-file", "{}"])
def test_an_invalid_rate_is_refused(tmp_path: Path, given: str) -> None:
    if given == "{}":
        given = str(tmp_path / "s.json")
        Path(given).write_text("{}")
    with pytest.raises(JobError, match=r"rate|neither a number"):
        Rate.read(given)


@pytest.mark.parametrize("text", ["", "\n \n\t\n"])
def test_a_file_without_lines_is_no_problem(tmp_path: Path, front: Front, text: str) -> None:
    (tmp_path / "in.jsonl").write_text(text)
    report, _ = check(tmp_path / "in.jsonl", front)
    assert (report.num_lines, report.exit_code) == (0, 0)


def test_a_truncated_input_is_reported_after_the_lines_that_were_read(tmp_path: Path, front: Front) -> None:
    data = gzip.compress(b"".join(b'{"prompt": "%d"}\n' % (i * 7919 % 10007) for i in range(5000)))
    (tmp_path / "in.jsonl.gz").write_bytes(data[: len(data) // 2])
    report, _ = check(tmp_path / "in.jsonl.gz", front)
    assert report.exit_code == 3 and "is truncated" in report.text()


def test_the_limit_and_a_template_apply(tmp_path: Path, front: Front) -> None:
    from headrace.jobs.input.template import LineTemplate

    (tmp_path / "in.csv").write_text("a,b\n1,2\n3\n4,5\n")
    template = LineTemplate.of(prompt="{a}+{b}")
    report, problems = check(tmp_path / "in.csv", front, template=template, limit=2)
    assert report.num_lines == 2
    assert [str(problem) for problem in problems] == ["line 2, byte 8: invalid_row: 1 cell, the header has 2"]
