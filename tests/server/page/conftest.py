from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from tests.server.page.browser import running_chromium  # needs playwright

    with running_chromium(tmp_path_factory.mktemp("chromium")):
        yield
