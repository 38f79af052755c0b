"""The dashboard page in a real Chromium, driven on the event loop of the server under test. All tests of a process
share the Chromium; each has a context of its own, without the cookies and caches of others.

    async with dashboard(made) as page:
        await expect(page.tab.locator("#state")).to_have_text("ready")

The page may not use `eval` (its Content-Security-Policy), so tests wait with `expect` and never with functions.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, Request, Route, async_playwright

from tests.server.whole_server import Running

COMMANDS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = os.environ.get("HEADRACE_CHROMIUM") or next(filter(None, map(shutil.which, COMMANDS)), None)

ADDRESS_VARIABLE = "HEADRACE_TEST_CHROMIUM_ADDRESS"
# Pages in the background run as others do, and nothing but the page is asked for anything.
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
FLAGS += ("--disable-background-networking", "--disable-background-timer-throttling", "--disable-sync")
FLAGS += ("--disable-backgrounding-occluded-windows", "--disable-renderer-backgrounding", "--disable-extensions")
FLAGS += ("--disable-component-update", "--disable-default-apps", "--force-color-profile=srgb")

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


@contextmanager
def running_chromium(directory: Path) -> Iterator[None]:
    """A Chromium without a window, for `dashboard`."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={directory}", "about:blank"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            told = next(line for line in process.stderr if line.startswith("DevTools listening on "))
            reader = threading.Thread(target=process.stderr.read)  # or it would wait once the pipe is full
            reader.start()
            os.environ[ADDRESS_VARIABLE] = told.split()[-1]
            yield
        finally:
            os.environ.pop(ADDRESS_VARIABLE, None)
            process.terminate()
            process.wait()
            reader.join()


@asynccontextmanager
async def dashboard(made: Running, **context: Any) -> AsyncIterator[Dashboard]:
    """Open the page. `context` are the options of a browser context: viewport, color_scheme."""
    url = str(made.client.base_url)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.connect_over_cdp(os.environ[ADDRESS_VARIABLE])
        try:
            tab = await browser.new_page(**context)
            page = Dashboard(tab, url)
            tab.on("console", lambda message: page.complaints.append(f"{message.type}: {message.text}"))
            tab.on("pageerror", lambda error: page.complaints.append(str(error)))
            await tab.route("**", page.keep_inside)
            await tab.goto(f"{url}/")
            yield page
        finally:
            await browser.close()  # the context: the browser goes on
