"""The tables of docs/plan.md are those that the code makes from the committed record."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headrace.plan.markdown import accuracy_table, gpu_table, serving_table

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "benchmarks/results/plan-accuracy.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("table", [accuracy_table(RECORD), serving_table(RECORD), gpu_table()])
def test_a_table_is_as_new_as_its_source(table: str) -> None:
    """If this fails, run `make tables`."""
    assert table in (ROOT / "docs/plan.md").read_text(encoding="utf-8")


def test_the_python_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/plan.md").read_text(), flags=re.M | re.S)
    exec(compile(example, "docs/plan.md", "exec"), {})
    assert "gemm" in capsys.readouterr().out
