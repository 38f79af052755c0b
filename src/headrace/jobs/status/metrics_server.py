"""Serves a job's metrics to this machine only, while the job runs."""

from __future__ import annotations

import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from headrace.errors import ConfigError
from headrace.jobs.status.metrics import page
from headrace.jobs.store.status_file import JobStatus

HOST = "127.0.0.1"
POLL_SECONDS = 0.05  # how soon it notices that it is to end
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsServer:
    """Told of each status as it is made; a scrape shows the last. Without a port it listens to nobody."""

    def __init__(self, port: int | None) -> None:
        """Port 0: any that is free."""
        self._status: JobStatus | None = None
        self._server: ThreadingHTTPServer | None = None
        if port is None:
            return
        try:
            self._server = ThreadingHTTPServer((HOST, port), self._handler())
        except OSError as error:
            raise ConfigError(
                f"metrics cannot be served on {HOST}:{port}: {error.strerror}; give another --metrics-port, "
                "or 0 for any"
            ) from error
        self._server.daemon_threads = True
        serve = partial(self._server.serve_forever, poll_interval=POLL_SECONDS)
        self._thread = threading.Thread(target=serve, name="headrace-metrics", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str | None:
        return None if self._server is None else f"http://{HOST}:{self._server.server_address[1]}/metrics"

    def update(self, status: JobStatus) -> None:
        self._status = status

    def close(self) -> None:
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

    def _page(self) -> bytes:
        return b"# the job has not begun yet\n" if self._status is None else page(self._status).encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_known = self.path.partition("?")[0] == "/metrics"
                body = server._page() if is_known else b"only /metrics is here\n"
                self.send_response(200 if is_known else 404)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass  # stderr is the job's

        return Handler
