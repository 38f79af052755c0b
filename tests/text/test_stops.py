"""Stop strings, against a search of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text import StopMatcher


def search(text: str, stops: list[str], *, include_stop: bool) -> tuple[str, str | None]:
    """The specification: the first position at which a stop string ends, and the longest that ends there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


def push_all(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    shown = ""
    for piece in pieces:
        emitted, matched = matcher.push(piece)
        shown += emitted
        if matched is not None:
            return shown, matched
    return shown + matcher.flush(), None


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    include_stop=st.booleans(),
)
def test_pieces_give_what_a_search_of_the_whole_text_gives(
    pieces: list[str], stops: list[str], include_stop: bool
) -> None:
    expected = search("".join(pieces), stops, include_stop=include_stop)
    assert push_all(StopMatcher(stops, include_stop), pieces) == expected


@settings(max_examples=150, deadline=None)
@given(text=st.text("abc", max_size=30), stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3))
def test_exactly_the_text_that_may_become_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops, False)
    shown, matched = matcher.push(text)
    if matched is None:
        held = max(
            (size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])),
            default=0,
        )
        assert len(text) - len(shown) == held


def test_a_stop_may_be_split_over_pushes() -> None:
    matcher = StopMatcher(["<end>"], False)
    assert [matcher.push(piece) for piece in ("a<", "en", "d", "d>", "<end")] == [
        ("a", None),
        ("", None),
        ("", None),
        ("<endd>", None),
        ("", None),
    ]
    assert matcher.push("> b") == ("", "<end>")


def test_the_stop_that_ends_first_wins_though_a_longer_one_began_before_it() -> None:
    assert StopMatcher(["abcd", "bc"], False).push("xabcd") == ("xa", "bc")


def test_of_stops_that_end_together_the_longest_wins() -> None:
    assert StopMatcher(["c", "abc"], False).push("xabc") == ("x", "abc")


def test_the_stop_is_shown_when_asked_and_nothing_after_it() -> None:
    matcher = StopMatcher(["\n\n"], True)
    assert matcher.push("one\n\ntwo") == ("one\n\n", "\n\n")
    assert matcher.push("three") == ("", "\n\n")
    assert matcher.flush() == ""


def test_without_stops_nothing_is_held() -> None:
    assert StopMatcher([], False).push("anything") == ("anything", None)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["a", ""], False)
