"""OpenTelemetry traces: one span per request, with vLLM's name and attributes, exported in the background.

    request ends ─▶ finished(): the span with its times ─▶ queue ─▶ a thread of the SDK ─▶ collector (OTLP over HTTP)

A span is made when its request has ended, so running requests cost nothing. If the collector cannot be reached, spans
are dropped. OpenTelemetry is imported only if an endpoint is given.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from time import monotonic, time_ns
from typing import Any

from headrace.errors import ConfigError
from headrace.monitor.times import RequestTimes
from headrace.types import Request
from headrace.version import __version__

SPAN_NAME = "llm_request"
PROTOCOL = "http/protobuf"
CLOSE_S = 5.0  # for the last spans; the collector may be gone
LINE_S = 60.0  # at least between two lines about failed exports

_HEADERS = (b"traceparent", b"tracestate")
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OPERATIONS = {  # by route, under the names of the semantic conventions
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}

log = logging.getLogger("headrace.traces")


class RequestTraces:
    """Owns the provider of spans and its thread. `finished` is for the event loop's thread."""

    def __init__(self, url: str, *, model_name: str, environ: Mapping[str, str] = os.environ) -> None:
        """`url`: where the collector takes traces, such as http://127.0.0.1:4318/v1/traces."""
        check_protocol(environ)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
            from opentelemetry.trace import SpanKind, Status, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"--otlp-traces-endpoint needs OpenTelemetry ({error}): pip install 'headrace[otel]'"
            ) from error
        self._model_name = model_name
        # The sampler follows the caller's decision, or OTEL_TRACES_SAMPLER.
        self._provider = TracerProvider(resource=Resource.create(_resource(environ)))
        self._exporter: SpanExporter = OTLPSpanExporter(endpoint=url)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("headrace.server", __version__)
        self._parent_of = TraceContextTextMapPropagator().extract
        self._kind, self._failed = SpanKind.SERVER, Status(StatusCode.ERROR)
        _limit_lines()

    def finished(self, scope: Mapping[str, Any], request: Request, times: RequestTimes, reason: str) -> None:
        """Record a request that has ended. Its parent is the span of the caller, from the headers of its `scope`."""
        zero = time_ns() - int(monotonic() * 1e9)  # of the monotonic clock
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _HEADERS}
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._parent_of(headers),
            kind=self._kind,
            start_time=zero + int(times.arrived * 1e9),
        )
        if span.is_recording():
            span.set_attributes(self._attributes(scope, request, times, reason))
            if reason == "error":
                span.set_status(self._failed)
        span.end(zero + int(times.finished * 1e9))

    def _attributes(
        self, scope: Mapping[str, Any], request: Request, times: RequestTimes, reason: str
    ) -> dict[str, Any]:
        """vLLM's names, and those of the semantic conventions where they differ. What is not known is left out."""
        params, started, first, last = request.params, times.queued_until, times.first_token, times.last_token
        is_sampled = request.readout is None
        found = {
            "gen_ai.operation.name": _OPERATIONS.get(scope["path"]),
            "gen_ai.provider.name": "headrace",
            "gen_ai.request.id": scope.get("headrace", {}).get("request_id"),
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.finish_reasons": [reason],
            "gen_ai.usage.prompt_tokens": times.num_prompt,
            "gen_ai.usage.input_tokens": times.num_prompt,
            "gen_ai.usage.cache_read.input_tokens": times.num_cached,
            "gen_ai.latency.time_in_queue": _seconds(times.arrived, started),
            "gen_ai.latency.time_to_first_token": _seconds(times.arrived, first),
            "gen_ai.latency.time_in_model_prefill": _seconds(started, first),
            "gen_ai.latency.time_in_model_decode": _seconds(first, last),
            "gen_ai.latency.time_in_model_inference": _seconds(started, last),
            "gen_ai.latency.e2e": _seconds(times.arrived, times.finished),
            "headrace.num_preemptions": times.num_preemptions,
        }
        if is_sampled:
            found |= {
                "gen_ai.request.max_tokens": params.max_tokens,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.n": params.n,
                "gen_ai.request.choice.count": params.n,
                "gen_ai.request.seed": params.seed,
                "gen_ai.usage.num_sequences": times.n,
                "gen_ai.usage.completion_tokens": times.num_generated,
                "gen_ai.usage.output_tokens": times.num_generated,
            }
        return {name: value for name, value in found.items() if value is not None}

    def close(self) -> None:
        """Export what is left, for a limited time. The SDK's threads have ended afterwards, unless a request hangs."""
        closing = threading.Thread(target=self._provider.shutdown, name="headrace-traces-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            self._exporter.shutdown()  # it waits to try again, for up to a minute
            closing.join(CLOSE_S)


def check_protocol(environ: Mapping[str, str]) -> None:
    """Refuse another protocol than the one that there is."""
    for name in _PROTOCOL_VARIABLES:
        if environ.get(name, PROTOCOL) != PROTOCOL:
            raise ConfigError(
                f"{name}={environ[name]} is not supported: traces are sent with {PROTOCOL}; unset it, and give "
                "--otlp-traces-endpoint the collector's HTTP port, such as http://HOST:4318/v1/traces"
            )


def _resource(environ: Mapping[str, str]) -> dict[str, Any]:
    """The name of the service, unless the environment has one."""
    is_named = "OTEL_SERVICE_NAME" in environ or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return {"service.version": __version__} | ({} if is_named else {"service.name": "headrace"})


def _seconds(since: float | None, until: float | None) -> float | None:
    return None if since is None or until is None else max(0.0, until - since)


def _limit_lines() -> None:
    """Let the SDK's loggers write to ours, one line a minute: it logs every failed export, with tracebacks."""
    logger = logging.getLogger("opentelemetry")
    if not any(isinstance(handler, LimitedLog) for handler in logger.handlers):
        logger.addHandler(LimitedLog())
        logger.propagate = False


class LimitedLog(logging.Handler):
    """Passes on one record a minute, as one line, with the number of those in between."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock
        self._written_at: float | None = None
        self._num_left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        now = self._clock()
        if self._written_at is not None and now < self._written_at + LINE_S:
            self._num_left_out += 1
            return
        more = f" ({self._num_left_out} more messages since the last line)" if self._num_left_out else ""
        self._written_at, self._num_left_out = now, 0
        log.warning("traces: %s%s", " ".join(record.getMessage().split()), more)
