"""The dashboard page in a real Chromium, driven on the event loop of the server under test.

    async with dashboard(made) as page:
        await expect(page.tab.locator("#state")).to_have_text("ready")

The page may not use `eval` (its Content-Security-Policy), so tests wait with `expect` and never with functions.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.async_api import Page, Request, Route, async_playwright

from tests.server.whole_server import Running

COMMANDS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = os.environ.get("HEADRACE_CHROMIUM") or next(filter(None, map(shutil.which, COMMANDS)), None)

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None,
    reason="no Chromium: install the package `chromium`, or set HEADRACE_CHROMIUM to the path of one",
)


@dataclass
class Dashboard:
    """A tab with the page, and what went wrong in it: messages of the console, errors of scripts, outside requests."""

    tab: Page
    url: str
    complaints: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)  # every address

    def figure(self, name: str) -> Any:
        return self.tab.locator(f'[data-figure="{name}"]')

    async def keep_inside(self, route: Route, request: Request) -> None:
        self.requested.append(request.url)
        if request.url.startswith((self.url, "data:")):
            await route.continue_()
        else:
            self.outside.append(request.url)
            await route.abort()


@asynccontextmanager
async def dashboard(made: Running, **context: Any) -> AsyncIterator[Dashboard]:
    """Open the page. `context` are the options of a browser context: viewport, color_scheme."""
    url = str(made.client.base_url)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            tab = await browser.new_page(**context)
            page = Dashboard(tab, url)
            tab.on("console", lambda message: page.complaints.append(f"{message.type}: {message.text}"))
            tab.on("pageerror", lambda error: page.complaints.append(str(error)))
            await tab.route("**", page.keep_inside)
            await tab.goto(f"{url}/")
            yield page
        finally:
            await browser.close()
