"""The settings of the server. Flags and the keys of the TOML file are generated from these fields."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from headrace.arguments import refuses_unknown
from headrace.config import MAX_ENGINES, setting
from headrace.errors import ConfigError
from headrace.logs import LogFormat
from headrace.openai.parser_names import ParserNames, check_parser_names
from headrace.openai.sampling import MAX_N

TRACES_PATH = "/v1/traces"  # of OTLP over HTTP

QueuePolicy = Literal["reject", "delay"]


@refuses_unknown(ConfigError)
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The settings of one server; those of its engine are in `EngineConfig`."""

    # address
    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 opens the server to the network")
    port: int = setting(8000, "port to listen on; 0 takes a free one")
    uds: str | None = setting(None, "path of a Unix socket to listen on, in place of host and port; default: none")
    root_path: str = setting("", "path prefix under which a proxy serves this server; default: none")
    ssl_certfile: str | None = setting(None, "TLS certificate; default: no TLS")
    ssl_keyfile: str | None = setting(None, "TLS key; default: inside the certificate's file")
    served_model_name: str | tuple[str, ...] | None = setting(
        None, "names of the model in requests; the first is in answers; default: --model"
    )
    data_parallel_size: int = setting(
        1, "number of engines, each in its own process with its share of the GPUs, cores and memory"
    )

    # access
    api_key: str | tuple[str, ...] | None = setting(
        None, "keys of which clients must send one; prefer HEADRACE_API_KEY or --api-key-file; default: none"
    )
    api_key_file: str | None = setting(None, "file with lines 'key' or 'name key', reloaded on SIGHUP; default: none")
    admin_key: str | None = setting(None, "key of the /admin routes, which do not exist without it; default: none")
    allowed_origins: str = setting("", "CORS origins allowed to call the server, separated by commas; default: none")
    cache_salt_per_key: bool = setting(True, "do not share the prefix cache between different keys")

    # limits
    max_num_queued_reqs: int | None = setting(
        None, "maximum number of waiting requests; default: 4 x max_num_seqs, at least 1,024"
    )
    max_num_queued_tokens: int | None = setting(
        None, "maximum number of waiting prompt tokens; default: 4 x the KV cache, at least 1,048,576"
    )
    overload_status: int = setting(503, "HTTP status when the queue is full: 503 or 429")
    request_timeout_s: float | None = setting(
        None, "maximum time of a request, queueing included; X-Request-Timeout may shorten it; default: none"
    )
    max_body_bytes: int = setting(4 * 2**20, "maximum size of a request body")
    max_header_bytes: int = setting(64 * 2**10, "maximum size of the request headers")
    max_num_headers: int = setting(256, "maximum number of request headers")
    max_connections: int | None = setting(
        None, "maximum number of open connections; default: from the open-files limit"
    )
    read_timeout_s: float = setting(30.0, "maximum time for a client to send its request")
    write_timeout_s: float = setting(30.0, "disconnect a client that reads nothing for this long")
    max_n: int = setting(MAX_N, "maximum n of a request")
    max_logprobs: int = setting(20, "maximum number of log-probabilities per token; -1: the whole vocabulary")

    max_stored_responses: int = setting(
        10_000, "maximum number of responses kept in memory for previous_response_id; 0: none are stored"
    )
    max_stored_response_bytes: int = setting(256 * 2**20, "maximum size of all stored responses")
    response_dir: str | None = setting(
        None, "directory in which stored responses survive a restart; default: none, they are in memory only"
    )

    # Triton-style dynamic batching
    max_queue_delay_us: int = setting(0, "batching delay: maximum wait for more requests to form a batch; 0: none")
    preferred_batch_size: str = setting("", "batch sizes that start at once, separated by commas; default: none")
    queue_timeout_us: int = setting(0, "queue timeout after which a request is rejected or delayed; 0: never")
    queue_timeout_action: QueuePolicy = setting(
        "reject", "on a queue timeout: reject the request, or delay it to the end of the queue"
    )
    allow_timeout_override: bool = setting(False, "let requests shorten their queue timeout with X-Queue-Timeout")

    # the Batch API
    batch_dir: str | None = setting(
        None, "directory for files and batches; turns on /v1/files and /v1/batches; default: none, they are refused"
    )
    max_batch_requests: int = setting(50_000, "maximum number of requests in a batch")
    max_file_bytes: int = setting(200 * 2**20, "maximum size of an uploaded file")
    max_files_per_key: int = setting(1_000, "maximum number of files that a key may store")
    max_file_bytes_per_key: int = setting(20 * 2**30, "maximum size of all files that a key may store")
    max_batches_per_key: int = setting(100, "maximum number of unfinished batches of a key")

    # behaviour
    sse_keep_alive_interval_s: float = setting(15.0, "send comments on silent streams, so that proxies keep them open")
    shutdown_timeout_s: float = setting(30.0, "time for running requests to finish after SIGTERM")
    enable_request_id_headers: bool = setting(True, "return the request id in X-Request-Id")
    enable_force_include_usage: bool = setting(False, "send the usage at the end of every stream, asked for or not")
    return_tokens_as_token_ids: bool = setting(
        False, "name tokens in log-probabilities by their ids, as token_id:42, unless a request says otherwise"
    )
    enable_log_requests: bool = setting(False, "log each request (never its text)")
    log_format: LogFormat = setting("text", "format of the log: text, or json for one object per line")
    otlp_traces_endpoint: str | None = setting(
        None, "URL to which OpenTelemetry traces are sent, such as http://127.0.0.1:4318/v1/traces; default: none"
    )
    enable_auto_tool_choice: bool = setting(True, "parse tool calls in answers when tool_choice is 'auto'")
    tool_call_parser: str = setting("auto", "format of tool calls in answers; default: by the chat template")
    reasoning_parser: str = setting(
        "auto", "format of reasoning in answers, or none to leave it in the text; default: by the chat template"
    )
    profiler_dir: str | None = setting(
        None, "directory for profiles; turns on /start_profile and /stop_profile; default: none, they are refused"
    )
    enable_sleep_mode: bool = setting(
        False, "turn on /sleep and /wake_up, which free the memory of the engine and load it again"
    )
    step_timeout_s: float = setting(120.0, "restart an engine whose step takes longer than this")
    max_engine_restarts: int = setting(5, "maximum number of engine restarts within ten minutes")

    def __post_init__(self) -> None:
        for names, is_right, rule in _RULES:
            for name in names:
                value = getattr(self, name)
                if value is not None and not is_right(value):
                    raise ConfigError(f"{name} must be {rule}, got {value!r}")
        if self.uds == "":
            raise ConfigError("uds must be a path, got ''")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile needs ssl_certfile")
        if self.allow_timeout_override and not self.queue_timeout_us:
            raise ConfigError("allow_timeout_override shortens queue_timeout_us, which is not set")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"root_path must begin with a slash and not end with one, got {self.root_path!r}")
        check_parser_names(self.parser_names)
        _ = self.preferred_batch_sizes, self.origins, self.traces_url  # raise here if they cannot be parsed

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names given to the model; empty: it has its own."""
        return _words(self.served_model_name)

    @property
    def api_keys(self) -> tuple[str, ...]:
        return _words(self.api_key)

    @property
    def parser_names(self) -> ParserNames:
        return ParserNames(self.tool_call_parser, self.reasoning_parser)

    @property
    def preferred_batch_sizes(self) -> tuple[int, ...]:
        """The sizes in ascending order."""
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

    @property
    def traces_url(self) -> str | None:
        """Where traces are sent. The usual path is added to an address without one."""
        if self.otlp_traces_endpoint is None:
            return None
        url = urlsplit(self.otlp_traces_endpoint)
        if url.scheme == "grpc" or (url.scheme in ("http", "https") and url.netloc.endswith(":4317")):
            raise ConfigError(
                f"otlp_traces_endpoint {self.otlp_traces_endpoint!r} is for gRPC, which is not supported; give the "
                f"collector's HTTP port, such as http://{url.hostname or 'HOST'}:4318/v1/traces"
            )
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(
                f"otlp_traces_endpoint must be like http://127.0.0.1:4318/v1/traces, got {self.otlp_traces_endpoint!r}"
            )
        return url._replace(path=TRACES_PATH).geturl() if url.path in ("", "/") else self.otlp_traces_endpoint


GROUPS = {  # the first field of each group, its title and description
    "host": ("server", "address, model name and engines"),
    "api_key": ("access", "keys and origins"),
    "max_num_queued_reqs": ("limits", "queue, timeouts and sizes"),
    "max_queue_delay_us": ("batching", "Triton-style dynamic batching"),
    "batch_dir": ("batch API", "files and batches"),
    "sse_keep_alive_interval_s": ("behaviour", "responses, shutdown and restarts"),
}


def _words(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)


def _items(text: str) -> list[str]:
    """Items separated by commas, or a JSON list as in vLLM."""
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
    (
        ("served_model_name", "api_key"),
        lambda value: isinstance(value, str) or (bool(value) and all(isinstance(word, str) for word in value)),
        "text or a list of texts",
    ),
    (("port",), _integer(0, 65535), "between 0 and 65535"),
    (("data_parallel_size",), _integer(1, MAX_ENGINES), f"an integer from 1 to {MAX_ENGINES}"),
    (("overload_status",), lambda value: value in (503, 429), "503 or 429"),
    (("log_format",), lambda value: value in get_args(LogFormat), " or ".join(get_args(LogFormat))),
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
            "max_batch_requests",
            "max_file_bytes",
            "max_files_per_key",
            "max_file_bytes_per_key",
            "max_batches_per_key",
            "max_stored_response_bytes",
        ),
        _integer(1),
        "an integer of at least 1",
    ),
    (
        ("max_queue_delay_us", "queue_timeout_us", "max_engine_restarts", "max_stored_responses"),
        _integer(0),
        "an integer of at least 0",
    ),
    (("max_logprobs",), _integer(-1), "an integer of at least -1"),
    (("request_timeout_s", "read_timeout_s", "write_timeout_s", "step_timeout_s"), _seconds, "a number above 0"),
    (
        ("shutdown_timeout_s", "sse_keep_alive_interval_s"),
        lambda value: value == 0 or _seconds(value),
        "a number of at least 0",
    ),
]
