"""Lines prepared by another process are the same as those prepared by the job itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.prompts import PromptReader
from headrace.engine.start import Engine
from headrace.jobs.formats.reader import InputLine
from headrace.jobs.input import prepare_process
from headrace.jobs.input.lines import BadLine
from headrace.jobs.input.prepare import LinePreparer, Work
from headrace.jobs.input.prepare_process import NUM_AHEAD, PreparingProcess
from headrace.jobs.input.prepare_wire import SentTokenizer, Setup
from headrace.jobs.input.template import LineTemplate
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec
from headrace.text import Tokenizer

SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


def chat(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Grüße 🙂"}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


LINES: list[Any] = [
    {"prompt": "Hi", "id": 7, "nested": {"a": [1, None, 2.5]}, "text": "mine"},
    {"prompt": "Hi", "large": 123456789012345678901234567890},
    {"prompt": [1, 2, 3], "temperature": 0},
    {"prompt": [9999]},
    {"prompt": "Hi", "seed": 2**64 - 1, "stop": ["a", "b"], "logit_bias": {"5": 1.5}},
    {"prompt": "Hi", "max_tokens": -1},
    {"prompt": "Hi", "max_token": 4},
    {"messages": [{"role": "user", "content": "x"}], "temperature": 0.5, "n": 2},
    {"messages": [{"role": "user", "content": {"no": "text"}}]},
    chat("a", max_tokens=4, temperature=0, cache_salt="s", model="other"),
    chat("b", response_format=SCHEMA, bad_words=["no"]),
    chat("c", stream=True),
    {"custom_id": "d", "method": "GET", "url": "/v1/chat/completions", "body": {}},
    {"neither": 1},
    "no object",
]


def batches(lines: list[Any], *, size: int = 4) -> list[list[InputLine]]:
    numbered = [InputLine(index, 0, json.dumps(line).encode()) for index, line in enumerate(lines)]
    numbered += [InputLine(len(lines), 0, b"{torn"), InputLine(len(lines) + 1, 0, b"", problem="no row")]
    return [numbered[start : start + size] for start in range(0, len(numbered), size)]


def setup(tokenizer: Tokenizer | None, template: LineTemplate | None = None) -> Setup:
    return Setup(
        defaults={"top_p": 0.9},
        seed=3,
        model_name="fake",
        template=template,
        vocab_size=258,
        tokenizer=None if tokenizer is None else SentTokenizer.of(tokenizer),
    )


def shown(item: Work | BadLine) -> Any:
    """Errors have no equality: compare their contents."""
    return item if isinstance(item, Work) else (item.reply, str(item.error), item.error.param, item.error.code)


def prepared(found: Iterator[list[Work | BadLine]]) -> list[Any]:
    return [shown(item) for items in found for item in items]


def of(setup: Setup) -> PreparingProcess:
    return PreparingProcess(lambda: setup, setup.preparer())


def test_every_kind_of_line_is_prepared_the_same_in_the_process(tokenizer: Tokenizer) -> None:
    plan, given = setup(tokenizer), batches(LINES)
    process = of(plan)
    assert prepared(process.prepare_all(given)) == prepared(plan.preparer().prepare_all(given))
    assert process.process is not None and process.process.returncode == 0


def test_the_process_handles_templates_and_a_model_without_a_tokenizer() -> None:
    plan = setup(None, LineTemplate.of(prompt="Say {text}", system="Be {mood}."))
    given = batches([{"text": "Hi", "mood": "brief"}, {"text": "Hi"}])
    assert prepared(of(plan).prepare_all(given)) == prepared(plan.preparer().prepare_all(given))


def test_equal_parameters_are_one_object_in_all_batches(tokenizer: Tokenizer) -> None:
    items = list(of(setup(tokenizer)).prepare_all(batches([{"prompt": "a", "max_tokens": 3}] * 12)))
    assert len({id(item.params) for batch in items for item in batch if isinstance(item, Work)}) == 1


def test_when_the_process_dies_the_job_prepares_the_rest(tokenizer: Tokenizer) -> None:
    plan, given = setup(tokenizer), batches(LINES * 5)
    assert len(given) > 2 * NUM_AHEAD
    process = of(plan)
    found = process.prepare_all(given)
    first = next(found)
    assert process.process is not None
    process.process.kill()
    process.process.wait()
    assert prepared(iter([first, *found])) == prepared(plan.preparer().prepare_all(given))


def test_a_tokenizer_that_cannot_be_serialized_stays_in_the_job(tokenizer: Tokenizer) -> None:
    def refuse() -> Setup:
        raise ValueError("a part of it is written in Python")

    plan, given = setup(tokenizer), batches(LINES)
    process = PreparingProcess(refuse, plan.preparer())
    assert prepared(process.prepare_all(given)) == prepared(plan.preparer().prepare_all(given))
    assert process.process is None


def test_closing_the_iterator_early_ends_the_process(tokenizer: Tokenizer) -> None:
    process = of(setup(tokenizer))
    found = process.prepare_all(batches(LINES))
    next(found)
    found.close()  # type: ignore[attr-defined]
    assert process.process is not None and process.process.returncode == 0


def test_a_job_with_a_process_gives_the_same_answers(
    start: Callable[..., Engine], write_lines: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"prompt": f"line {number}", "max_tokens": 4, "number": number} for number in range(1500)]
    source = write_lines(*lines, {"prompt": 5}, lines[0])
    alone = JobSpec(input=str(source), output=str(tmp_path / "alone.jsonl"), keep_order=True)
    run_job(alone, start=start, quiet=True)
    monkeypatch.setattr(prepare_process, "num_cores", lambda: 2)
    monkeypatch.setattr(LinePreparer, "prepare", _refuse)  # the job itself must not prepare any line
    together = JobSpec(input=str(source), output=str(tmp_path / "together.jsonl"), keep_order=True)
    report = run_job(together, start=start, min_lines_for_process=1, quiet=True)
    assert report.tally.num_done == 1502 and report.tally.sample is not None
    assert Path(together.output).read_bytes() == Path(alone.output).read_bytes()


def _refuse(*arguments: Any) -> Any:
    raise AssertionError("prepared by the job itself")


def test_an_id_used_twice_is_found_across_batches(
    start: Callable[..., Engine], write_lines: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_process, "num_cores", lambda: 2)
    source = write_lines(*(chat(str(number % 599), max_tokens=1, temperature=0) for number in range(600)))
    job = JobSpec(input=str(source), output=str(tmp_path / "out.jsonl"))
    report = run_job(job, start=start, min_lines_for_process=1, quiet=True)
    assert dict(report.tally.errors) == {"duplicate_custom_id": 1}


@pytest.mark.parametrize("num_lines, is_worth", [(None, False), (49_999, False), (50_000, True)])
def test_only_many_lines_are_worth_a_process(
    num_lines: int | None, is_worth: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_process, "num_cores", lambda: 2)
    assert prepare_process.is_worth_a_process(num_lines) is is_worth
    monkeypatch.setattr(prepare_process, "num_cores", lambda: 1)
    assert not prepare_process.is_worth_a_process(num_lines)


def test_a_sent_tokenizer_gives_the_same_tokens(tokenizer: Tokenizer) -> None:
    restored = SentTokenizer.of(tokenizer).restored()
    text = "Grüße, <s>world</s> 🙂"
    assert restored.encode(text) == tokenizer.encode(text)
    assert restored.special_tokens == tokenizer.special_tokens and restored.eos_token_ids == tokenizer.eos_token_ids
    messages = [{"role": "user", "content": "Hi"}]
    assert PromptReader(restored, 258).render(messages) == PromptReader(tokenizer, 258).render(messages)
