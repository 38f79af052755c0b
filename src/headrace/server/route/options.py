"""The settings of the router. Flags are generated from these fields."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.arguments import refuses_unknown
from headrace.balance.choice import Policy
from headrace.config import setting
from headrace.errors import ConfigError
from headrace.logs import LogFormat
from headrace.server.options import ServerOptions


@refuses_unknown(ConfigError)
@dataclass(frozen=True, kw_only=True)
class RouteOptions:
    """The settings of one router."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 opens the router to the network")
    port: int = setting(8080, "port to listen on; 0 takes a free one")
    ssl_certfile: str | None = setting(None, "TLS certificate; default: no TLS")
    ssl_keyfile: str | None = setting(None, "TLS key; default: inside the certificate's file")
    allowed_origins: str = setting("", "CORS origins allowed to call the router, separated by commas; default: none")
    policy: Policy = setting("prefix", "prefix: by prefix, load and health; round-robin: in turn, to compare with")
    target_requests: float | None = setting(
        None, "requests per replica for headrace:desired_replicas; default: 0.8 x max_num_seqs of Headrace, else 32"
    )
    min_replicas: int = setting(1, "smallest value of headrace:desired_replicas")
    max_replicas: int = setting(1_000, "largest value of headrace:desired_replicas")
    max_body_bytes: int = setting(4 * 2**20, "maximum size of a request body")
    shutdown_timeout_s: float = setting(30.0, "time for running requests to finish after SIGTERM")
    log_format: LogFormat = setting("text", "format of the log: text, or json for one object per line")

    def __post_init__(self) -> None:
        self.server_options()  # checks what it has in common
        target = self.target_requests
        if target is not None and not (math.isfinite(target) and target > 0):
            raise ConfigError(f"target_requests must be a number above 0, got {target!r}")
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ConfigError(
                f"min_replicas must be from 1 to max_replicas, which is {self.max_replicas}, got {self.min_replicas}"
            )

    def server_options(self) -> ServerOptions:
        """The same for the HTTP transport."""
        return ServerOptions(
            host=self.host,
            port=self.port,
            ssl_certfile=self.ssl_certfile,
            ssl_keyfile=self.ssl_keyfile,
            allowed_origins=self.allowed_origins,
            max_body_bytes=self.max_body_bytes,
            shutdown_timeout_s=self.shutdown_timeout_s,
            log_format=self.log_format,
        )
