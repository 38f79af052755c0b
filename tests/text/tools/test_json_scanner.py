"""The scanner agrees with the standard library's parser on every text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.text.tools.json_scanner import Found, JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=4)


def end_of(text: str) -> int | None:
    """Returns where the object ended; None if it did not, or was invalid."""
    scanner = JsonScanner()
    for index, char in enumerate(text):
        found = scanner.feed(char)
        if found is Found.OBJECT_END:
            return index
        if found is Found.ERROR:
            return None
    return None


@given(OBJECTS, st.sampled_from([None, 1]), st.booleans())
def test_an_object_ends_where_it_ends(value: dict[str, Any], indent: int | None, ensure_ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)
    assert end_of(text) == len(text) - 1


@given(OBJECTS, st.data())
def test_a_changed_text_is_judged_as_the_standard_library_does(value: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(value)
    index = data.draw(st.integers(0, len(text) - 1))
    char = data.draw(st.sampled_from('{}[]",:\\ue0123456789+-.tfna \n\x01é'))
    changed = text[:index] + char + text[index + data.draw(st.integers(0, 1)) :]
    try:
        parsed, end = json.JSONDecoder().raw_decode(changed.lstrip())
        expected = end - 1 + len(changed) - len(changed.lstrip()) if isinstance(parsed, dict) else None
    except json.JSONDecodeError:
        expected = None
    assert end_of(changed) == expected


@pytest.mark.parametrize("text", ["[1]", '"a"', "1", "null", "}", "{,}", "{1:2}", '{"a":01}', '{"a":1.}', '{"a":[}'])
def test_what_is_no_object_is_an_error(text: str) -> None:
    assert end_of(text + " ,") is None


def test_keys_and_values_of_the_object_itself_are_told() -> None:
    text = '{"a": {"b": [1, "x"]}, "c":null, "d": 5, "e": "t"}'
    scanner = JsonScanner()
    found = [(index, scanner.feed(char)) for index, char in enumerate(text)]
    keys = [text[:index].rpartition('"')[2] for index, what in found if what is Found.KEY_END]
    starts = [text[index] for index, what in found if what is Found.VALUE_START]
    ends = [text[index] for index, what in found if what is Found.VALUE_END]
    assert keys == ["a", "c", "d", "e"]
    assert starts == ["{", "n", "5", '"']
    assert ends == ["}", "l", '"']
