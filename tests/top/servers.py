"""A client of a server that answers with what a test gives it."""

from __future__ import annotations

import json
from typing import Any

from headrace.scrape.client import HttpError, ServerClient, UnreachableError


class FakeServer(ServerClient):
    """`pages` are the next scrapes: a page, a status, or an exception. `documents` are the JSON paths it has."""

    def __init__(self, *pages: str | int | Exception) -> None:
        super().__init__("http://gpu-7:8000")
        self.pages = list(pages)
        self.documents: dict[str, Any] = {}
        self.asked: list[str] = []

    def _ask(self, path: str, **options: Any) -> bytes:
        self.asked.append(path)
        if path != "/metrics":
            if path not in self.documents:
                raise HttpError(404, "not found")
            return json.dumps(self.documents[path]).encode()
        page = self.pages.pop(0)
        if isinstance(page, Exception):
            raise page
        if isinstance(page, int):
            raise HttpError(page, "")
        return page.encode()


def gone() -> UnreachableError:
    return UnreachableError("http://gpu-7:8000: connection refused: nothing listens on this port")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
