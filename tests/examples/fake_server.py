"""A server that is ready at once, for tests: `python fake_server.py --host HOST --port PORT`. SIGTERM ends it."""

from __future__ import annotations

import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = str(os.getpid()).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    HTTPServer((given["--host"], int(given["--port"])), Handler).serve_forever()
