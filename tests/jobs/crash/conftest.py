from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.jobs.crash.forge import Forge


@pytest.fixture(scope="session")
def forge() -> Iterator[Forge]:
    with Forge() as forge:
        yield forge
