"""The server, and logs, metrics and profiles. Data of `other_flags`."""

from __future__ import annotations

from headrace.flag_groups import FlagGroup

SERVER: tuple[FlagGroup, ...] = (
    # ---- the server
    FlagGroup("refused", "the server speaks HTTP only", values="grpc-port", switches="grpc"),
    FlagGroup("refused", "all routes are served; close some of them in a proxy", switches="tokens-only"),
    FlagGroup("refused", "use a proxy in front of the server", lists="middleware"),
    FlagGroup("refused", "there are no cookies; keys are sent in headers", switches="allow-credentials"),
    FlagGroup(
        "refused", "--allowed-origins is sufficient for browsers", values='allowed-methods=["*"] allowed-headers=["*"]'
    ),
    FlagGroup("refused", "a new certificate needs a restart", switches="enable-ssl-refresh"),
    FlagGroup("refused", "Python's defaults are used; a TLS proxy can use others", values="ssl-ciphers"),
    FlagGroup(
        "refused",
        "clients authenticate with keys, not certificates; a TLS proxy can require certificates",
        values="ssl-ca-certs ssl-cert-reqs=0",
    ),
    FlagGroup("ignored", "/load is always available", switches="enable-server-load-tracking"),
    FlagGroup("ignored", "/tokenizer_info is always available", switches="enable-tokenizer-info-endpoint"),
    FlagGroup("ignored", "--max-header-bytes is the limit", values="h11-max-incomplete-event-size"),
    FlagGroup("ignored", "--max-num-headers is the limit", values="h11-max-header-count"),
    FlagGroup(
        "ignored",
        "/docs and /openapi.json are always available, and load nothing from elsewhere",
        switches="disable-fastapi-docs enable-offline-docs",
    ),
    # ---- logs, metrics and profiles
    FlagGroup("ignored", "it is the default; --enable-log-requests turns logging on", switches="disable-log-requests"),
    FlagGroup(
        "ignored",
        "the log has one line a minute while there is work; statistics are on /metrics",
        switches="disable-log-stats aggregate-engine-logging enable-logging-iteration-details",
    ),
    FlagGroup(
        "ignored",
        "there is no access log without --enable-log-requests",
        values="disable-access-log-for-endpoints",
        switches="disable-uvicorn-access-log",
    ),
    FlagGroup(
        "ignored",
        "errors are logged to stderr; --enable-log-requests logs requests, --log-format chooses the format",
        values="uvicorn-log-level log-level log-config-file logging-config",
        switches="log-error-stack",
    ),
    FlagGroup("ignored", "prompts and answers are never logged", values="max-log-len", switches="enable-log-deltas"),
    FlagGroup("refused", "prompts and answers are never logged", switches="enable-log-outputs"),
    FlagGroup("ignored", "older metric names are always on /metrics", values="show-hidden-metrics-for-version"),
    FlagGroup(
        "ignored",
        "/metrics has the times of all requests, and --otlp-traces-endpoint those of each",
        lists="collect-detailed-traces",
        switches="enable-mfu-metrics",
    ),
    FlagGroup(
        "refused",
        "answers have no times; /metrics has those of all requests, and --otlp-traces-endpoint those of each",
        switches="enable-per-request-metrics",
    ),
    FlagGroup(
        "refused",
        "the buckets are vLLM's; metrics with headrace: names have finer ones",
        lists="custom-histogram-buckets",
    ),
    FlagGroup(
        "refused",
        "use --profiler-dir DIR, which turns on /start_profile and /stop_profile",
        values="profiler-config",
        switches="enable-layerwise-nvtx-tracing",
    ),
    FlagGroup(
        "ignored",
        "output is always processed on another thread than the engine's",
        switches="disable-async-output-proc",
    ),
    FlagGroup("ignored", "only the variables that Headrace documents are read", switches="fail-on-environ-validation"),
    FlagGroup("refused", "it is for plug-ins of vLLM, which are not loaded", values="additional-config"),
)
