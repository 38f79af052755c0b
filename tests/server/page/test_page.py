"""The files of the pages: all of them are joined, in the package, and match their hashes."""

from __future__ import annotations

import hashlib
import re
import tomllib
from base64 import b64encode
from fnmatch import fnmatch
from pathlib import Path

from headrace.server.page import DOCS_SCRIPTS, SCRIPTS, dashboard_page, docs_page

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "src/headrace/server/page"
FILES = {path.name for path in FOLDER.iterdir() if path.is_file() and path.suffix != ".py"}


def test_every_file_is_part_of_a_page() -> None:
    assert {"index.html", "docs.html", "style.css", *SCRIPTS, *DOCS_SCRIPTS} == FILES
    for page, scripts in ((dashboard_page(), SCRIPTS), (docs_page(), DOCS_SCRIPTS)):
        for name in ("style.css", *scripts):
            assert (FOLDER / name).read_text(encoding="utf-8") in page.body.decode(), name


def test_every_file_is_in_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["headrace.server.page"]
    assert all(any(fnmatch(name, pattern) for pattern in patterns) for name in FILES)


def test_the_hashes_are_those_of_style_and_script() -> None:
    page = dashboard_page()
    policy = page.headers["Content-Security-Policy"]
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page.body.decode(), re.DOTALL)
        digest = b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_every_place_that_a_script_looks_for_is_in_the_page() -> None:
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    ids = re.findall(r'\bid="([\w-]+)"', html)
    assert len(ids) == len(set(ids))
    wanted = {name for script in SCRIPTS for name in re.findall(r'byId\("([\w-]+)"\)', (FOLDER / script).read_text())}
    assert wanted <= set(ids)
    described = set(re.findall(r'(?:for|aria-labelledby)="([\w-]+)"', html))
    assert described <= set(ids)


def test_lines_are_short() -> None:
    for name in FILES:
        assert max(map(len, (FOLDER / name).read_text(encoding="utf-8").splitlines())) <= 120, name
