"""A batcher whose model and timer a test drives by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from headrace import DynamicBatcher
from tests.hand_timer import HandTimer

TEST_TIMEOUT_S = 60.0  # ends a test that hangs; no result depends on it


class HandModel:
    """A coroutine function that records its batches and completes each when `release` is called with its index."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self._gates: dict[int, asyncio.Event] = {}

    async def __call__(self, items: list[Any]) -> list[Any]:
        index = len(self.batches)
        self.batches.append(items)
        await self._gates.setdefault(index, asyncio.Event()).wait()
        return [f"<{item}>" for item in items]

    def release(self, *indexes: int) -> None:
        for index in indexes:
            self._gates.setdefault(index, asyncio.Event()).set()


async def settle() -> None:
    """Let everything that is ready run."""
    for _ in range(20):
        await asyncio.sleep(0)


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), TEST_TIMEOUT_S))


def by_hand(**options: Any) -> tuple[DynamicBatcher[Any, Any], HandModel, HandTimer]:
    model, timer = HandModel(), HandTimer()
    return DynamicBatcher(model, timer=timer, size=options.pop("size", lambda item: 1), **options), model, timer
