"""What a user may set of the server. Flags and the keys of a TOML file are generated from these fields."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from headrace.config import setting
from headrace.errors import ConfigError
from headrace.openai.sampling import MAX_N
from headrace.types import refuses_unknown

QueuePolicy = Literal["reject", "delay"]


@refuses_unknown(ConfigError)
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The settings of one server; those of its engine are in `EngineConfig`."""

    # where it listens
    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 opens the server to the network")
    port: int = setting(8000, "port to listen on; 0 takes a free one")
    root_path: str = setting("", "path under which a proxy serves this server; default: none")
    ssl_certfile: str | None = setting(None, "TLS certificate; default: no TLS")
    ssl_keyfile: str | None = setting(None, "TLS key; default: inside the certificate's file")
    served_model_name: str | None = setting(None, "name of the model in requests and answers; default: --model")

    # who may use it
    api_key: str | None = setting(
        None, "key that clients must send; better in HEADRACE_API_KEY or a file; default: none"
    )
    api_key_file: str | None = setting(None, "file of lines 'key' or 'name key', read again on SIGHUP; default: none")
    admin_key: str | None = setting(None, "key of the control routes, which else do not exist; default: none")
    allowed_origins: str = setting("", "origins that browsers may call from, separated by commas; default: none")
    cache_salt_per_key: bool = setting(True, "keep the prefix caches of different keys apart")

    # how much it takes on
    max_num_queued_reqs: int | None = setting(None, "most requests waiting; default: 4 x max_num_seqs")
    max_num_queued_tokens: int | None = setting(None, "most prompt tokens waiting; default: 4 x the KV cache")
    overload_status: int = setting(503, "status of a refusal when the queue is full: 503 or 429")
    request_timeout_s: float | None = setting(
        None, "longest time of a request, queueing included; X-Request-Timeout may shorten it; default: none"
    )
    max_body_bytes: int = setting(4 * 2**20, "longest body of a request")
    max_header_bytes: int = setting(64 * 2**10, "longest headers of a request")
    max_num_headers: int = setting(256, "most headers of a request")
    max_connections: int | None = setting(None, "most open connections; default: from the limit of open files")
    read_timeout_s: float = setting(30.0, "longest time to send a request")
    write_timeout_s: float = setting(30.0, "a client that reads nothing for so long is cut off")
    max_n: int = setting(MAX_N, "most answers to one request")
    max_logprobs: int = setting(20, "most log-probabilities of a token")

    # dynamic batching, as Triton means it
    max_queue_delay_us: int = setting(0, "longest wait of a request for company in the queue; 0: none")
    preferred_batch_size: str = setting("", "batch sizes that start at once, separated by commas; default: none")
    queue_timeout_us: int = setting(0, "a request that has waited so long is refused or delayed; 0: never")
    queue_timeout_action: QueuePolicy = setting("reject", "what happens to it: a refusal, or the end of the queue")
    allow_timeout_override: bool = setting(False, "X-Queue-Timeout of a request may shorten its queue timeout")

    # how it behaves
    sse_keep_alive_interval_s: float = setting(15.0, "comment lines on silent streams, so that proxies keep them open")
    shutdown_timeout_s: float = setting(30.0, "time that running requests get to finish after SIGTERM")
    enable_request_id_headers: bool = setting(True, "answer with the request's id in X-Request-Id")
    enable_log_requests: bool = setting(False, "a log line for each request (never its text)")
    enable_auto_tool_choice: bool = setting(True, "find tool calls in answers when tool_choice is 'auto'")
    tool_call_parser: str = setting("auto", "form of tool calls in answers; default: by the chat template")
    step_timeout_s: float = setting(120.0, "an engine whose step takes longer counts as hung and is restarted")
    max_engine_restarts: int = setting(5, "restarts of a dead engine within ten minutes before giving up")

    def __post_init__(self) -> None:
        for names, is_right, rule in _RULES:
            for name in names:
                value = getattr(self, name)
                if value is not None and not is_right(value):
                    raise ConfigError(f"{name} must be {rule}, got {value!r}")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile is of no use without ssl_certfile")
        if self.allow_timeout_override and not self.queue_timeout_us:
            raise ConfigError("allow_timeout_override shortens queue_timeout_us, which is not set")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"root_path must begin with a slash and not end with one, got {self.root_path!r}")
        _ = self.preferred_batch_sizes, self.origins  # refused here if they cannot be read

    @property
    def preferred_batch_sizes(self) -> tuple[int, ...]:
        """In ascending order."""
        sizes = [text for text in _items(self.preferred_batch_size) if text]
        if not all(text.isdecimal() and int(text) > 0 for text in sizes):
            raise ConfigError(f"preferred_batch_size must be whole numbers from 1, got {self.preferred_batch_size!r}")
        return tuple(sorted({int(text) for text in sizes}))

    @property
    def origins(self) -> frozenset[str]:
        origins = frozenset(_items(self.allowed_origins))
        for origin in origins - {"*", "null"}:
            if "://" not in origin or origin.endswith("/"):
                raise ConfigError(f"allowed_origins must be like https://example.com, got {origin!r}")
        return origins


GROUPS = {  # the first field of each, its title and what it is about
    "host": ("server", "where it listens"),
    "api_key": ("access", "who may use it"),
    "max_num_queued_reqs": ("limits", "how much it takes on"),
    "max_queue_delay_us": ("batching", "dynamic batching, as Triton means it"),
    "sse_keep_alive_interval_s": ("behaviour", "how it answers, stops and recovers"),
}


def _items(text: str) -> list[str]:
    """Separated by commas, or a list in JSON as vLLM takes it."""
    if text.startswith("["):
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"not a list in JSON: {text!r}") from error
        return [str(item) for item in given]
    return [item.strip() for item in text.split(",") if item.strip()]


def _integer(least: int, most: int | None = None) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, int) and not isinstance(value, bool) and least <= value and (most is None or value <= most)
    )


def _seconds(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


_RULES: list[tuple[tuple[str, ...], Callable[[Any], bool], str]] = [
    (("port",), _integer(0, 65535), "between 0 and 65535"),
    (("overload_status",), lambda value: value in (503, 429), "503 or 429"),
    (("queue_timeout_action",), lambda value: value in get_args(QueuePolicy), " or ".join(get_args(QueuePolicy))),
    (
        (
            "max_num_queued_reqs",
            "max_num_queued_tokens",
            "max_body_bytes",
            "max_header_bytes",
            "max_num_headers",
            "max_connections",
            "max_n",
        ),
        _integer(1),
        "an integer of at least 1",
    ),
    (
        ("max_queue_delay_us", "queue_timeout_us", "max_engine_restarts", "max_logprobs"),
        _integer(0),
        "an integer of at least 0",
    ),
    (("request_timeout_s", "read_timeout_s", "write_timeout_s", "step_timeout_s"), _seconds, "a number above 0"),
    (
        ("shutdown_timeout_s", "sse_keep_alive_interval_s"),
        lambda value: value == 0 or _seconds(value),
        "a number of at least 0",
    ),
]
