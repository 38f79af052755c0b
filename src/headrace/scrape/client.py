"""Small requests to a running server: is it there, what does it say about itself. Not for load."""

from __future__ import annotations

import json
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from headrace.errors import HeadraceError

TIMEOUT_S = 10.0


class UnreachableError(HeadraceError):
    """No answer: the message has the address and the reason."""


class HttpError(Exception):
    """An answer with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ServerClient:
    """Asks one server. `api_key` is sent as a header and appears in no error."""

    def __init__(self, address: str, *, api_key: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.address = base_address(address)
        self._headers = {"User-Agent": "headrace"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._timeout_s = timeout_s
        host = urlsplit(self.address).hostname or ""
        # A proxy of the environment is for other machines.
        handlers = [urllib.request.ProxyHandler({})] if host == "localhost" or host.startswith("127.") else []
        self._opener = urllib.request.build_opener(*handlers)

    def get(self, path: str) -> bytes:
        return self._ask(path)

    def get_json(self, path: str) -> Any:
        return json.loads(self._ask(path))

    def post(self, path: str, *, headers: Mapping[str, str] | None = None) -> bytes:
        return self._ask(path, method="POST", headers=headers)

    def post_json(self, path: str, body: Any, *, timeout_s: float | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        data = json.dumps(body).encode()
        return json.loads(self._ask(path, method="POST", headers=headers, timeout_s=timeout_s, data=data))

    def maybe_json(self, path: str, *, timeout_s: float | None = None) -> Any:
        """The JSON of a path, or None if the server has none there."""
        try:
            return json.loads(self._ask(path, timeout_s=timeout_s))
        except (HttpError, HeadraceError, ValueError):
            return None

    def maybe_text(self, path: str) -> str | None:
        try:
            return self.get(path).decode(errors="replace")
        except (HttpError, HeadraceError):
            return None

    def _ask(
        self,
        path: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        data: bytes = b"",
    ) -> bytes:
        """Raises HttpError for an error status, UnreachableError if there is no answer."""
        asked = urllib.request.Request(
            self.address + path,
            data=data if method == "POST" else None,
            method=method,
            headers={**self._headers, **(headers or {})},
        )
        try:
            with self._opener.open(asked, timeout=timeout_s or self._timeout_s) as answer:
                body: bytes = answer.read()
                return body
        except urllib.error.HTTPError as error:
            with error:
                raise HttpError(error.code, error.read(500).decode(errors="replace")) from None
        except (OSError, ValueError) as error:
            raise UnreachableError(f"{self.address}: {_why(error, self.address)}") from error
        except Exception as error:  # http.client's errors have no common parent but Exception
            if type(error).__module__ != "http.client":
                raise
            raise UnreachableError(
                f"{self.address} does not answer with HTTP ({type(error).__name__}); check the port"
            ) from error


def base_address(address: str) -> str:
    """`http://host:port` of what a user gives: with or without a scheme, a slash at the end, or /v1."""
    given = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(given)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 0) >= 0
    except ValueError:  # a port that is no number
        is_right = False
    if not is_right:
        raise UnreachableError(f"{address!r} is not an address; it reads like http://127.0.0.1:8000")
    return given.rstrip("/").removesuffix("/v1").rstrip("/")


def _why(error: OSError | ValueError, address: str) -> str:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ConnectionRefusedError):
        return "connection refused: nothing listens on this port"
    if isinstance(reason, socket.gaierror):
        return f"the host name is not known ({reason.strerror})"
    if isinstance(reason, ssl.SSLCertVerificationError):
        return f"its TLS certificate is not trusted ({reason.verify_message}); SSL_CERT_FILE names a file of others"
    if isinstance(reason, ssl.SSLError):
        return "TLS failed; a server without TLS has an http:// address"
    if isinstance(reason, TimeoutError):
        return "no answer in time"
    if isinstance(reason, ConnectionResetError) and address.startswith("http://"):
        return "the connection was closed; a server with TLS has an https:// address"
    return str(reason) or type(reason).__name__
