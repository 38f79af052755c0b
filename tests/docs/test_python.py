"""The examples of docs/python.md are programs that run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "python.md"


def blocks_of(section: str) -> list[str]:
    """The Python blocks of the section whose title begins so."""
    (text,) = [part for part in DOCUMENT.read_text().split("\n## ") if part.startswith(section)]
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def test_the_example_of_the_batcher_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks_of("DynamicBatcher")
    exec(compile(block, str(DOCUMENT), "exec"), {})
    assert capsys.readouterr().out == "['short', 'short', 'long'] 3.0\n"
