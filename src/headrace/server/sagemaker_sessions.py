"""SageMaker's stateful sessions: /invocations opens and closes them, and SageMaker sends the requests of a session to
the same server. They hold nothing here but their names; what they bring is the server's prefix cache.

On if the environment has SAGEMAKER_ENABLE_STATEFUL_SESSIONS=true, as SageMaker sets it.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from time import time

from headrace.openai.errors import bad_request

VARIABLE = "SAGEMAKER_ENABLE_STATEFUL_SESSIONS"
SESSION = "X-Amzn-SageMaker-Session-Id"
LIFETIME_S = 1200.0
MAX_SESSIONS = 100_000


class SageMakerSessions:
    """Owns the names of the open sessions. The oldest are dropped when there are too many."""

    def __init__(self, clock: Callable[[], float] = time) -> None:
        self._clock = clock
        self._ends: OrderedDict[str, float] = OrderedDict()

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> SageMakerSessions | None:
        """None: they are off."""
        return cls() if environ.get(VARIABLE, "").lower() in ("true", "1") else None

    def open(self) -> tuple[str, float]:
        """The name of a new session, and the time at which it ends."""
        now, name = self._clock(), str(uuid.uuid4())
        while self._ends and (len(self._ends) >= MAX_SESSIONS or next(iter(self._ends.values())) <= now):
            self._ends.popitem(last=False)
        self._ends[name] = now + LIFETIME_S
        return name, self._ends[name]

    def check(self, name: str) -> None:
        if self._ends.get(name, 0.0) <= self._clock():
            raise bad_request(f"session not found: {name[:80]!r} was not opened here, was closed or has ended", SESSION)

    def close(self, name: str) -> None:
        self.check(name)
        del self._ends[name]
