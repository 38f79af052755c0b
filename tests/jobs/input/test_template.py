from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError, JobError, RequestError
from headrace.jobs.formats import open_source
from headrace.jobs.formats.reader import InputLine
from headrace.jobs.input.lines import BadLine, LineParser, LineRequest
from headrace.jobs.input.template import LineTemplate, Template


def parse(row: Any, **template: Any) -> LineRequest | BadLine:
    parser = LineParser({}, seed=0, model_name="fake", template=LineTemplate.of(**template))
    return parser.parse(InputLine(3, 0, json.dumps(row).encode()))


def good(row: Any, **template: Any) -> LineRequest:
    request = parse(row, **template)
    assert isinstance(request, LineRequest), request
    return request


def bad(row: Any, **template: Any) -> RequestError:
    line = parse(row, **template)
    assert isinstance(line, BadLine), line
    return line.error


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("Summarise: {text}", "Summarise: Hi {x}"),
        ("{text}{text}", "Hi {x}Hi {x}"),
        ("{{text}} {{{ text }}}", "{text} {Hi {x}}"),
        ("{number} {list} {flag}", '1.5 [1,"a"] true'),
        ("{author.name} {dotted.name}", "Ann direct"),
        ("no column", "no column"),
    ],
)
def test_columns_are_inserted(template: str, text: str) -> None:
    row = {
        "text": "Hi {x}",
        "number": 1.5,
        "list": [1, "a"],
        "flag": True,
        "author": {"name": "Ann"},
        "dotted.name": "direct",
    }
    assert Template.parse(template).render(row) == text


@pytest.mark.parametrize("template", ["{", "}", "{}", "a { b", "{a}}", "{ }", "{{}"])
def test_an_unmatched_brace_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match="double the brace"):
        Template.parse(template)


def test_a_row_becomes_a_prompt_and_its_columns_are_copied_to_the_output() -> None:
    request = good({"text": "Hi", "id": 7, "max_tokens": 5}, prompt="Say {text}")
    assert (request.prompt, request.messages) == ("Say Hi", None)
    assert request.params.max_tokens == 256
    assert request.notes == ("column 'max_tokens' is data and sets nothing",)
    written = json.loads(request.reply.error(RequestError("x"), None))  # type: ignore[arg-type]
    assert written["input"] == {"text": "Hi"} and written["id"] == 7 and written["max_tokens"] == 5


def test_a_system_prompt_or_chat_makes_messages() -> None:
    user = {"role": "user", "content": "Hi"}
    assert good({"q": "Hi"}, prompt="{q}", is_chat=True).messages == [user]
    request = good({"q": "Hi", "lang": "German"}, prompt="{q}", system="Answer in {lang}.")
    assert request.messages == [{"role": "system", "content": "Answer in German."}, user]
    assert request.params.max_tokens is None


@pytest.mark.parametrize("as_text", [False, True])
def test_a_column_may_hold_the_messages(as_text: bool) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    row = {"conversation": json.dumps(messages) if as_text else messages, "id": 1}
    request = good(row, messages_column="conversation", system="Be brief.")
    assert request.messages == [{"role": "system", "content": "Be brief."}, *messages]
    assert b"conversation" not in request.reply.error(RequestError("x"), None)  # type: ignore[arg-type]


def test_a_row_without_a_column_is_an_error_line() -> None:
    error = bad({"a": 1, "b": 2}, prompt="{text}")
    assert (error.code, str(error)) == ("missing_column", "column 'text' is missing; the row has a, b")
    assert "is null" in str(bad({"text": None}, prompt="{text}"))
    assert "not a JSON list of messages" in str(bad({"m": "Hi"}, messages_column="m"))
    assert "must be a list of messages" in str(bad({"m": 1}, messages_column="m"))
    for system in (None, "Be brief."):
        assert "at least one message" in str(bad({"m": []}, messages_column="m", system=system))


def test_with_a_template_a_line_in_request_format_is_data() -> None:
    request = good({"prompt": "Hi", "url": "x", "body": 1}, prompt="Say {prompt}")
    assert request.prompt == "Say Hi"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"system": "x"}, "a system prompt needs a prompt"),
        ({"is_chat": True}, "chat needs a prompt"),
        ({"prompt": "x", "messages_column": "m"}, "give one"),
    ],
)
def test_an_incomplete_template_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        LineTemplate.of(**options)
    assert LineTemplate.of() is None


@pytest.mark.parametrize(
    ("name", "data"), [("in.csv", "id,text\n1,2\n"), ("in.jsonl", 'broken\n{"id": 1}\n{"text": {"deep": 2}}\n')]
)
def test_an_unknown_column_is_refused_before_anything_runs(tmp_path: Path, name: str, data: str) -> None:
    path = tmp_path / name
    path.write_text(data)
    with closing(open_source(str(path))) as source:
        for known in ("{text}", "{text.deep} {id}"):
            template = LineTemplate.of(prompt=known)
            assert template is not None
            template.check(source)
        unknown = LineTemplate.of(prompt="{txt}")
        assert unknown is not None
        with pytest.raises(JobError, match=r"no column 'txt', did you mean 'text'.*columns id, text"):
            unknown.check(source)
        assert next(source.read_batches())[0].index == 0
