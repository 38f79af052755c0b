from __future__ import annotations

from headrace.config import EngineConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.engine.client import Client, Deliver
from headrace.engine.start import Engine, start_engine


class LimitedEngine(AsyncEngine):
    """An engine whose number of running sequences a test can limit."""

    client: Client

    @classmethod
    def of(cls, config: EngineConfig) -> LimitedEngine:
        started: list[Engine] = []

        def start(deliver: Deliver) -> Engine:
            started.append(start_engine(config, deliver))
            return started[0]

        made = cls.over(start)
        assert isinstance(made, LimitedEngine)
        made.client = started[0].client
        return made
