from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.prompts import PromptReader
from headrace.jobs.formats.reader import InputLine
from headrace.jobs.input.id_filter import IdFilter
from headrace.jobs.input.job_checks import JobChecks
from headrace.jobs.input.lines import BadLine, LineParser
from headrace.jobs.input.prepare import LinePreparer, Work
from headrace.jobs.input.prepare_wire import SentTokenizer, Setup
from headrace.text import Tokenizer


def prepare(
    tokenizer: Tokenizer | None, *lines: dict[str, Any], max_model_len: int | None = None
) -> list[Work | BadLine]:
    numbered = [InputLine(index, 0, json.dumps(line).encode()) for index, line in enumerate(lines)]
    prompts = PromptReader(tokenizer, 258, max_model_len=max_model_len)
    preparer = LinePreparer(LineParser({}, seed=0, model_name="fake"), prompts)
    return JobChecks(prompts).check(preparer.prepare(numbered))


def text_of(item: Work | BadLine, tokenizer: Tokenizer) -> str:
    assert isinstance(item, Work), item
    return tokenizer.decode(item.token_ids)


def code_of(item: Work | BadLine) -> str:
    assert isinstance(item, BadLine), item
    return item.error.code


def chat(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Hi"}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_prompts_and_messages_are_tokenized_in_the_order_of_their_lines(tokenizer: Tokenizer) -> None:
    items = prepare(
        tokenizer,
        {"messages": [{"role": "user", "content": "a"}]},
        {"prompt": "b"},
        chat("c"),
        {"prompt": [100]},
    )
    assert [text_of(item, tokenizer) for item in items] == ["[user]a[reply]", "b", "[user]Hi[reply]", "d"]


def test_a_bad_line_does_not_spoil_its_batch(tokenizer: Tokenizer) -> None:
    items = prepare(
        tokenizer,
        {"prompt": "a"},
        {"prompt": [9999]},
        {"messages": [{"role": "user", "content": {"no": "text"}}]},
        {"prompt": "b"},
    )
    assert [isinstance(item, BadLine) for item in items] == [False, True, True, False]
    assert isinstance(items[1], BadLine)
    assert "token id 9999 is out of vocabulary, which has 258 tokens" in str(items[1].error)


def test_an_id_used_twice_is_an_error_that_names_the_first_line(tokenizer: Tokenizer) -> None:
    items = prepare(
        tokenizer, chat("a"), chat("b"), chat("a"), chat("b", stream=True), {"prompt": "x", "custom_id": "a"}
    )
    assert [isinstance(item, BadLine) for item in items] == [False, False, True, True, False]
    assert isinstance(items[2], BadLine)
    assert str(items[2].error).startswith("custom_id 'a' is already used by line 1")
    assert [code_of(item) for item in items[2:4]] == ["duplicate_custom_id"] * 2


def test_without_a_tokenizer_only_token_ids_are_answered() -> None:
    items = prepare(None, {"prompt": [1, 2]}, {"prompt": "text"}, {"messages": [{"role": "user", "content": "x"}]})
    assert isinstance(items[0], Work)
    assert [code_of(item) for item in items[1:]] == ["no_tokenizer"] * 2


@pytest.mark.parametrize("filter_bits", [3, 12])
@pytest.mark.parametrize("max_run", [4, 20, 1000])
@pytest.mark.parametrize("recent", [1, 3, 8, 1000])
def test_an_id_filter_agrees_with_a_dictionary(recent: int, max_run: int, filter_bits: int, tmp_path: Path) -> None:
    seen, expected = IdFilter(recent, max_run=max_run, filter_bits=filter_bits, directory=tmp_path), {}
    for start in range(1, 200, 5):
        numbers = list(range(start, start + 5))
        ids = [str(number * 7919 % 61) for number in numbers]
        found = seen.add(ids, numbers)
        for custom_id, number, first in zip(ids, numbers, found, strict=True):
            assert first == expected.get(custom_id)
            expected.setdefault(custom_id, number)
    assert not list(tmp_path.iterdir())  # its files are unnamed


def test_an_id_filter_stays_in_memory_where_no_file_can_be_written(tmp_path: Path) -> None:
    seen = IdFilter(2, max_run=4, directory=tmp_path / "missing")
    for number in range(1, 20):
        assert seen.add([str(number)], [number]) == [None]
    assert seen.add(["1", "19", "20"], [21, 22, 23]) == [1, 19, None]


def test_a_prompt_that_is_much_too_long_is_refused_by_its_start(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizing 50 MB takes a minute and gigabytes."""
    num_characters = []

    def encode_batch(texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        num_characters.extend(map(len, texts))
        return [list(text.encode()) for text in texts]

    monkeypatch.setattr(tokenizer, "encode_batch", encode_batch)
    huge = "x" * 1_000_000
    messages = [{"role": "user", "content": huge}]
    items = prepare(tokenizer, {"prompt": huge}, {"prompt": "ok"}, chat("1", messages=messages), max_model_len=64)
    assert [code_of(item) for item in (items[0], items[2])] == ["context_length_exceeded"] * 2
    assert isinstance(items[1], Work)
    assert isinstance(items[0], BadLine) and "1000000 characters" in str(items[0].error)
    assert sum(num_characters) < 2_000


def test_a_long_text_of_few_tokens_is_not_refused(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer may have tokens of many spaces, or drop them."""
    few = [1] * 128
    monkeypatch.setattr(tokenizer, "encode_batch", lambda texts, add_special_tokens=True: [few] * len(texts))
    (item,) = prepare(tokenizer, {"prompt": " " * 100_000}, max_model_len=64)
    assert isinstance(item, Work), "the engine checks the number of tokens"


def test_the_process_that_prepares_lines_knows_the_context(tokenizer: Tokenizer) -> None:
    setup = Setup(
        defaults={},
        seed=0,
        model_name="fake",
        template=None,
        vocab_size=258,
        tokenizer=SentTokenizer.of(tokenizer),
        max_model_len=64,
    )
    line = InputLine(0, 0, json.dumps({"prompt": "x" * 100_000}).encode())
    (item,) = setup.preparer().prepare([line])
    assert code_of(item) == "context_length_exceeded"
