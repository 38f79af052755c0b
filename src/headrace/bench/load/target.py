"""The address of a server, parsed."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from headrace.errors import ConfigError

PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Target:
    """`http://host:port/prefix`. A trailing `/v1` is left out: the paths of requests begin with it."""

    host: str
    port: int
    is_tls: bool = False
    prefix: str = ""

    @classmethod
    def parse(cls, address: str) -> Target:
        text = address.strip()
        parts = urlsplit(text if "://" in text else f"http://{text}")
        try:
            port = parts.port
        except ValueError:
            raise ConfigError(f"the port in the address {address!r} is not a number from 0 to 65535") from None
        if parts.scheme not in PORTS or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"{address!r} is not the address of a server; an example: http://127.0.0.1:8000")
        if parts.username is not None:
            raise ConfigError("an address must not contain a user name or password; give the API key in a header")
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or PORTS[parts.scheme], parts.scheme == "https", prefix)

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS["https" if self.is_tls else "http"] else f"{host}:{self.port}"

    def tls(self) -> ssl.SSLContext | None:
        """Certificates are verified. SSL_CERT_FILE in the environment names another authority."""
        return ssl.create_default_context() if self.is_tls else None

    def __str__(self) -> str:
        return f"{'https' if self.is_tls else 'http'}://{self.host_header}{self.prefix}"
