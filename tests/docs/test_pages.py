"""Documents of the repository: links that lead somewhere, and lines that fit. `make docs` checks the site's links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / ".github").glob("*.md")])
GENERATED = {"architecture.md", "changelog.md", "contributing.md"}  # made of the root's documents by the site's hook
MAX_WIDTH = 120


def without_code(text: str) -> str:
    return re.sub(r"^\s*```.*?^\s*```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", without_code(document.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_link_leads_somewhere(document: Path) -> None:
    text = without_code(document.read_text(encoding="utf-8"))
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    for target in targets:
        path, _, anchor = target.partition("#")
        if path in GENERATED:
            continue
        aim = (document.parent / path).resolve() if path else document
        assert aim.exists(), f"{name_of(document)} links to {target}"
        assert not anchor or anchor in anchors(aim), f"{name_of(document)} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_lines_of_prose_fit(document: Path) -> None:
    lines = without_code(document.read_text(encoding="utf-8")).splitlines()
    assert [line for line in lines if len(line) > MAX_WIDTH and not line.startswith("|")] == []


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_source_file_that_is_named_exists(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:\.py|/))`", text))
    assert named, "the page names no file"
    assert [path for path in sorted(named) if not any((ROOT / at / path).exists() for at in ("src/headrace", ""))] == []


def test_every_page_is_named_in_the_readme_or_the_index() -> None:
    named = (ROOT / "README.md").read_text(encoding="utf-8") + (ROOT / "docs/index.md").read_text(encoding="utf-8")
    pages = [path.name for path in (ROOT / "docs").glob("*.md") if path.name != "index.md"]
    assert [page for page in pages if page not in named] == []
