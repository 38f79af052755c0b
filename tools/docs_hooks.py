"""Puts the documents of the repository's root on the site, so that they exist once.

Links into docs/ become links between pages. Links to other files of the repository become plain text, as the site
does not hold those files. Long names in tables may break after an underscore.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "architecture.md": "ARCHITECTURE.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
CODE = re.compile(r"<code>([^<]*)</code>")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    for page, document in PAGES.items():
        text = (ROOT / document).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=LINK.sub(_on_site, text)))
    return files


def _on_site(link: re.Match[str]) -> str:
    text, target = link.groups()
    path, _, anchor = target.partition("#")
    page = next((page for page, document in PAGES.items() if path == document), None)
    if path.startswith("docs/"):
        page = path.removeprefix("docs/")
    if page is not None:
        return f"[{text}]({page}{'#' + anchor if anchor else ''})"
    return link.group() if not path or "://" in path else text


def on_page_content(html: str, **_: Any) -> str:
    return CELL.sub(lambda cell: CODE.sub(_breakable, cell.group()), html)


def _breakable(code: re.Match[str]) -> str:
    return "<code>" + re.sub(r"([_/:])(?=[a-z])", r"\1<wbr>", code.group(1)) + "</code>"
