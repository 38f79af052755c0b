"""docs/doctor.md has the rules that the code has, and explains each rule of the guides that they cite."""

from __future__ import annotations

import re
from pathlib import Path

from headrace.doctor.report import rules_table
from headrace.doctor.rules import RULES

PAGE = (Path(__file__).parents[2] / "docs/doctor.md").read_text(encoding="utf-8")


def test_the_table_of_rules_is_as_new_as_the_code() -> None:
    """If this fails, run `make tables`."""
    assert rules_table() in PAGE


def test_every_cited_rule_of_the_guides_is_explained() -> None:
    explained = set(re.findall(r"^\| ([A-D]\d+) \|", PAGE, flags=re.MULTILINE))
    cited = {guide for rule in RULES for guide in rule.guide.split(", ") if guide}
    assert cited <= explained
