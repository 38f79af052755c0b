from __future__ import annotations

import pytest

from headrace.top.lines import bar, clean, duration, gibibytes, number, percent, sparkline


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "–"),
        (0.0, "0.0 µs"),
        (0.0000123, "12 µs"),
        (0.0042, "4.2 ms"),
        (0.0999, "100 ms"),
        (0.9996, "1.0 s"),
        (12.34, "12.3 s"),
        (300, "5 min"),
    ],
)
def test_a_duration_has_the_unit_that_fits(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown


def test_numbers_are_short_and_unknown_ones_a_dash() -> None:
    assert [number(value) for value in (None, 0, 0.254, 2.54, 12345.6)] == ["–", "0", "0.25", "2.5", "12,346"]
    assert number(3.0, "tokens/s") == "3 tokens/s" and number(None, "tokens/s") == "–"
    assert [percent(value) for value in (None, 0, 0.0001, 0.004, 0.0999)] == ["–", "0 %", "<0.1 %", "0.4 %", "10 %"]
    assert percent(0.123) == "12 %"
    assert (gibibytes(None, 1.0), gibibytes(2**30, None)) == ("–", "1.0 GiB")
    assert gibibytes(2**30, 2**31) == "1.0 of 2.0 GiB"


def test_a_bar_fills_with_the_share() -> None:
    assert [bar(share, 4) for share in (0.0, 0.5, 1.0, 1.7, -1)] == ["░░░░", "██░░", "████", "████", "░░░░"]
    assert bar(0.125, 2) == "▎░"
    assert bar(None, 4) == ""


def test_a_sparkline_shows_the_newest_values_at_the_right() -> None:
    assert sparkline([0, 1, 2, 4, 8], 4) == "▂▃▅█"
    assert sparkline([8, None, 4], 5) == "  █ ▅"
    assert sparkline([0.5], 2, highest=1.0) == " ▅"
    assert sparkline([0, 0], 2) == "▁▁"
    assert sparkline([], 3) == "   " and sparkline([1], 0) == ""


def test_text_of_a_server_cannot_move_the_cursor() -> None:
    assert clean("a\x1b[2Jb\nc\u202ed") == "a�[2Jb c�d"
    assert clean("abcdef", 4) == "abc…" and clean("abcd", 4) == "abcd"
