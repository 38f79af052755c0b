"""Serves a job's metrics with prometheus_client on 127.0.0.1, while the job runs."""

from __future__ import annotations

from functools import partial
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.jobs.status.metrics import JobCollector
    from headrace.jobs.store.status_file import JobStatus

HOST = "127.0.0.1"
POLL_SECONDS = 0.05  # `close` waits that long at most


class MetricsServer:
    """A scrape shows the last status that `update` was given. Without a port, nothing is served."""

    def __init__(self, port: int | None) -> None:
        """Port 0: any free port."""
        self._collector: JobCollector | None = None
        self._server: WSGIServer | None = None
        if port is not None:
            self._start(port)

    @property
    def url(self) -> str | None:
        return None if self._server is None else f"http://{HOST}:{self._server.server_port}/metrics"

    def update(self, status: JobStatus) -> None:
        if self._collector is not None:
            self._collector.status = status

    def close(self) -> None:
        """Frees the port."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, port: int) -> None:
        from prometheus_client import CollectorRegistry, make_wsgi_app
        from prometheus_client.exposition import ThreadingWSGIServer

        from headrace.jobs.status.metrics import JobCollector

        self._collector, registry = JobCollector(), CollectorRegistry()
        registry.register(self._collector)
        try:
            self._server = make_server(HOST, port, make_wsgi_app(registry), ThreadingWSGIServer, _SilentHandler)
        except OSError as error:
            raise ConfigError(
                f"metrics cannot be served on {HOST}:{port}: {error.strerror}; give another --metrics-port, "
                "or 0 for any free port"
            ) from error
        serve = partial(self._server.serve_forever, poll_interval=POLL_SECONDS)
        self._thread = Thread(target=serve, name="headrace-metrics", daemon=True)
        self._thread.start()


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass  # stderr is the console of the job
