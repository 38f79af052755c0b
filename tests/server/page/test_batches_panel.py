"""The panel of batches on the dashboard page, in a real Chromium."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.server.batch.batch_server import config_of, create, line, serving_batches, wait_for
from tests.server.whole_server import LimitedEngine

pytest.importorskip("playwright", reason="no playwright: pip install playwright")

from playwright.async_api import expect

from tests.server.page.browser import Dashboard, dashboard, needs_chromium

pytestmark = [pytest.mark.browser, needs_chromium]


@pytest.fixture(scope="module")
def engine(tiny_directory: Path) -> Iterator[LimitedEngine]:
    made = LimitedEngine.of(config_of(tiny_directory))
    yield made
    asyncio.run(made.close())


def look(url: str, body: Callable[[Dashboard], Awaitable[None]]) -> None:
    async def call() -> None:
        made: Any = SimpleNamespace(client=SimpleNamespace(base_url=url))
        async with dashboard(made) as page:
            await body(page)
            assert page.complaints == []

    asyncio.run(call())


def test_batches_are_listed_with_their_progress(engine: LimitedEngine, tiny_directory: Path, tmp_path: Path) -> None:
    with serving_batches(engine, config_of(tiny_directory), tmp_path) as served, served.client() as client:

        async def none_yet(page: Dashboard) -> None:
            await expect(page.tab.locator("#no-batches")).to_be_visible()
            await expect(page.tab.locator("#batches tr")).to_have_count(0)

        look(served.url, none_yet)
        batch = create(client, [line("a"), line("b"), line("c")])
        wait_for(client, batch.id, "completed")

        async def one(page: Dashboard) -> None:
            cells = page.tab.locator("#batches tr td")
            await expect(cells).to_have_count(6)
            assert (await cells.all_inner_texts())[:5] == [batch.id, "completed", "3", "0", "3"]
            await expect(page.tab.locator("#no-batches")).to_be_hidden()

        look(served.url, one)
