"""What a user may set of the server. Flags and the keys of a TOML file are generated from these fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.config import setting
from headrace.errors import ConfigError
from headrace.types import refuses_unknown

QueuePolicy = Literal["reject", "delay"]


@refuses_unknown(ConfigError)
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The settings of one server; those of its engine are in `EngineConfig`."""

    # where it listens
    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 opens the server to the network")
    port: int = setting(8000, "port to listen on; 0 takes a free one")
    root_path: str = setting("", "path under which a proxy serves this server")
    ssl_certfile: str | None = setting(None, "TLS certificate; default: no TLS")
    ssl_keyfile: str | None = setting(None, "TLS key; default: inside the certificate's file")
    served_model_name: str | None = setting(None, "name of the model in requests and answers; default: --model")

    # who may use it
    api_key: str | None = setting(None, "key that clients must send; better in HEADRACE_API_KEY or a file")
    api_key_file: str | None = setting(None, "file with one key a line, optionally 'name key'; read again on SIGHUP")
    admin_key: str | None = setting(None, "key of the control routes; without one they do not exist")
    allowed_origins: str = setting("", "origins that browsers may call from, separated by commas; default: none")
    cache_salt_per_key: bool = setting(True, "keep the prefix caches of different keys apart")

    # how much it takes on
    max_num_queued_reqs: int | None = setting(None, "most requests waiting; default: 4 x max_num_seqs")
    max_num_queued_tokens: int | None = setting(None, "most prompt tokens waiting; default: 4 x the KV cache")
    overload_status: int = setting(503, "status of a refusal when the queue is full: 503 or 429")
    request_timeout_s: float | None = setting(None, "longest time of a request, queueing included; default: none")
    max_body_bytes: int = setting(4 * 2**20, "longest body of a request")
    max_header_bytes: int = setting(64 * 2**10, "longest headers of a request")
    read_timeout_s: float = setting(30.0, "longest time to send a request")
    write_timeout_s: float = setting(30.0, "a client that reads nothing for so long is cut off")
    max_n: int = setting(64, "most answers to one request")
    max_logprobs: int = setting(20, "most log-probabilities of a token")

    # dynamic batching, as Triton means it
    max_queue_delay_us: int = setting(0, "wait so long for a preferred batch size before starting requests")
    preferred_batch_size: str = setting("", "batch sizes to wait for, separated by commas; default: none")
    queue_timeout_us: int = setting(0, "a request that has waited so long is refused or delayed; 0: never")
    queue_timeout_action: QueuePolicy = setting("reject", "what happens to it: a refusal, or the end of the queue")
    allow_timeout_override: bool = setting(False, "requests may bring a shorter queue timeout of their own")

    # how it behaves
    sse_keep_alive_interval_s: float = setting(15.0, "comment lines on silent streams, so that proxies keep them open")
    shutdown_timeout_s: float = setting(30.0, "time that running requests get to finish after SIGTERM")
    enable_request_id_headers: bool = setting(True, "answer with the request's id in X-Request-Id")
    enable_log_requests: bool = setting(False, "a log line for each request (never its text)")
    enable_auto_tool_choice: bool = setting(True, "find tool calls in answers when tool_choice is 'auto'")
    tool_call_parser: str = setting("auto", "form of tool calls in answers; default: by the chat template")
    step_timeout_s: float = setting(120.0, "an engine whose step takes longer counts as hung and is restarted")
    max_engine_restarts: int = setting(5, "restarts of a dead engine within ten minutes before giving up")
