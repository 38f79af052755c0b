"""Small requests to a server that is being measured: `headrace.scrape.client` with the errors of engines."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.bench.engines import metrics
from headrace.bench.engines.base import EngineFailure, RunningEngine
from headrace.scrape import client
from headrace.scrape.client import TIMEOUT_S, HttpError, UnreachableError

__all__ = ["HttpError", "ServerClient", "base_address", "counters_of_server"]


class ServerClient(client.ServerClient):
    """Asks one server. `api_key` is sent as a header and appears in no error."""

    def __init__(self, address: str, *, api_key: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        try:
            super().__init__(address, api_key=api_key, timeout_s=timeout_s)
        except UnreachableError as error:
            raise EngineFailure("unreachable", str(error)) from error

    def _ask(
        self,
        path: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        data: bytes = b"",
    ) -> bytes:
        """Raises HttpError for an error status, EngineFailure if there is no answer."""
        try:
            return super()._ask(path, method=method, headers=headers, timeout_s=timeout_s, data=data)
        except UnreachableError as error:
            raise EngineFailure("unreachable", str(error)) from error


def counters_of_server(engine: RunningEngine, client: ServerClient) -> dict[str, float]:
    """The counters of the server's metrics. If it does not answer because it has ended, raises why."""
    try:
        return metrics.counters(client.get("/metrics").decode())
    except (EngineFailure, HttpError):
        failure = engine.failure()
        if failure is None:
            raise
        raise failure from None


def base_address(address: str) -> str:
    try:
        return client.base_address(address)
    except UnreachableError as error:
        raise EngineFailure("unreachable", str(error)) from error
