"""What runs a batch job again."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.checkpoint.jobs import arguments_to_run_again, digest_of_input


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["in", "-o", "out"], ["{input}"]),
        (["-oout", "in", "--limit", "3"], ["{input}", "--limit", "3"]),
        (["--output=out", "in", "--json-summary", "s", "--quiet"], ["{input}"]),
        (["--prompt", "in", "in", "-o", "o", "--overwrite"], ["--prompt", "in", "{input}"]),
        (
            ["in", "-o", "o", "--checkpoint=c", "--model", "m", "--temperature", "0"],
            "{input} --model m --temperature 0",
        ),
    ],
)
def test_the_places_of_outputs_are_left_out(given: list[str], kept: list[str] | str) -> None:
    assert arguments_to_run_again(given, "in") == (kept.split() if isinstance(kept, str) else kept)


def test_a_stream_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").write_text("y")
    assert digest_of_input(Path("-")) is None
    assert digest_of_input(tmp_path / "a") != digest_of_input(tmp_path / "b")
