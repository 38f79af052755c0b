from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.server.batch.validation import MAX_ERRORS, Validated, validate
from tests.server.batch.batch_server import CHAT, COMPLETIONS, MODEL, as_jsonl, line


def validated(path: Path, lines: list[Any], *, max_requests: int = 50_000, endpoint: str = COMPLETIONS) -> Validated:
    path /= "in.jsonl"
    path.write_bytes(as_jsonl(lines))
    return validate(path, endpoint=endpoint, model_name=MODEL, max_requests=max_requests)


def test_good_lines_are_counted(tmp_path: Path) -> None:
    found = validated(tmp_path, [line("a"), "", line("b")])
    assert (found.num_lines, found.errors) == (2, [])


def test_the_model_may_be_left_out(tmp_path: Path) -> None:
    given = line("a")
    del given["body"]["model"]
    assert not validated(tmp_path, [given]).errors


def test_all_names_of_the_model_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(as_jsonl([line("a", model="alias")]))
    assert not validate(path, endpoint=COMPLETIONS, model_name=MODEL, max_requests=1, other_names=["alias"]).errors


@pytest.mark.parametrize(
    ("bad", "code", "param"),
    [
        ("not json", "invalid_json_line", None),
        ("[1]", "invalid_json_line", None),
        (line("a"), "duplicate_custom_id", "custom_id"),
        (line("b", url=CHAT), "url_mismatch", "url"),
        (line("b", url="/v1/nothing"), "invalid_line", "url"),
        (line("b") | {"method": "GET"}, "invalid_line", "method"),
        (line("b") | {"custom_id": 7}, "invalid_line", "custom_id"),
        (line("b", model="another"), "model_not_found", "body.model"),
        (line("b", stream=True), "unsupported_parameter", "body.stream"),
    ],
)
def test_a_bad_line_is_reported_with_its_number(tmp_path: Path, bad: Any, code: str, param: str | None) -> None:
    (error,) = validated(tmp_path, [line("a"), bad, line("c")]).errors
    assert (error.code, error.line, error.param) == (code, 2, param)
    assert error.message


def test_every_bad_line_is_reported(tmp_path: Path) -> None:
    found = validated(tmp_path, ["{", line("a"), line("a"), "x", line("b", stream=True)])
    assert [(error.line, error.code) for error in found.errors] == [
        (1, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "invalid_json_line"),
        (5, "unsupported_parameter"),
    ]


def test_a_long_list_of_errors_ends_with_their_number(tmp_path: Path) -> None:
    found = validated(tmp_path, ["x"] * (MAX_ERRORS + 5))
    assert len(found.errors) == MAX_ERRORS + 1 and found.errors[-1].message == "5 more errors are not listed"


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (error,) = validated(tmp_path, ["", ""]).errors
    assert (error.code, error.line) == ("empty_file", None)


def test_one_line_too_many_is_refused(tmp_path: Path) -> None:
    lines = [line(str(number)) for number in range(4)]
    assert not validated(tmp_path, lines, max_requests=4).errors
    (error,) = validated(tmp_path, lines, max_requests=3).errors
    assert error.code == "too_many_tasks" and "more than 3 requests" in error.message
