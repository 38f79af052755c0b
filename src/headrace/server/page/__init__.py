"""The pages of the server: each an HTML file, style.css and scripts beside it, joined into one that loads nothing else.

The browser may run and style only what is in these files (their hashes are in the Content-Security-Policy header), and
may ask this server alone. A page has no data: its script asks for them, with the key that the user types.

The dashboard:

    index.html    the sections, and a place for style and script
    format.js     numbers, times and shares as text
    api.js        requests to the server with the key; errors in words
    chart.js      a chart of the last hour, in SVG
    cards.js      the cards of figures, and what each line of a chart is
    panels.js     alerts, bottleneck, GPUs, batches and settings
    prompt.js     the box to try a prompt
    main.js       the loop that asks for new figures

The documentation of the API, /docs:

    docs.html     the places for routes and schemas; it uses api.js too
    docs.js       the OpenAPI document as HTML
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

DOCS_SCRIPTS = ("api.js", "docs.js")
SCRIPTS = ("format.js", "api.js", "chart.js", "cards.js", "panels.js", "prompt.js", "main.js")
STYLE_MARK, SCRIPT_MARK = "/* style.css */", "/* scripts */"


@dataclass(frozen=True, slots=True)
class Page:
    body: bytes
    headers: dict[str, str]


@cache
def dashboard_page() -> Page:
    """The page and its headers. Read once."""
    return _page("index.html", SCRIPTS)


@cache
def docs_page() -> Page:
    return _page("docs.html", DOCS_SCRIPTS)


def _page(html_name: str, scripts: tuple[str, ...]) -> Page:
    style = _read("style.css")
    script = '"use strict";\n(() => {\n' + "\n".join(_read(name) for name in scripts) + "})();\n"
    html = _read(html_name)
    assert html.count(STYLE_MARK) == html.count(SCRIPT_MARK) == 1, "one place for style and script"
    policy = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return Page(
        html.replace(STYLE_MARK, style).replace(SCRIPT_MARK, script).encode(),
        {
            "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        },
    )


def _read(name: str) -> str:
    return (files(__name__) / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
