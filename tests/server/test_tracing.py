"""Traces of requests, as a collector receives them over OTLP."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import time_ns
from typing import Any

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.monitor.times import RequestTimes
from headrace.server import tracing
from headrace.server.options import ServerOptions
from headrace.server.tracing import LINE_S, LimitedLog, RequestTraces
from headrace.types import Request, SamplingParams
from tests.hand_timer import HandTimer
from tests.server.whole_server import LimitedEngine, Running, with_server

otel = pytest.importorskip("opentelemetry.sdk.trace", reason="needs pip install 'headrace[otel]'")

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}


class Collector:
    """Takes traces on a free port."""

    def __init__(self) -> None:
        self.resources: list[dict[str, Any]] = []
        self.spans: list[Any] = []
        taken = self._take

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
                taken(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *line: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(attributes(group.resource))
            self.spans += [span for scope in group.scope_spans for span in scope.spans]


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="module")
def engine(tiny_directory: Path) -> Iterator[LimitedEngine]:
    made = LimitedEngine.of(EngineConfig(model=str(tiny_directory), max_num_seqs=4, num_gpu_blocks_override=256))
    yield made
    asyncio.run(made.close())


@pytest.fixture(autouse=True)
def usual_logs() -> Iterator[None]:
    """The SDK's logger as it was: `RequestTraces` changes it for the process."""
    logger = logging.getLogger("opentelemetry")
    handlers, propagates = list(logger.handlers), logger.propagate
    yield
    logger.handlers, logger.propagate = handlers, propagates


def attributes(of: Any) -> dict[str, Any]:
    def value(given: Any) -> Any:
        kind = given.WhichOneof("value")
        if kind == "array_value":
            return [value(each) for each in given.array_value.values]
        return getattr(given, kind)

    return {each.key: value(each.value) for each in of.attributes}


def test_a_request_is_a_child_of_the_callers_span(engine: LimitedEngine, collector: Collector) -> None:
    traces = RequestTraces(collector.url, model_name="tiny", environ={})
    before = time_ns()

    async def body(made: Running) -> None:
        made.server.services.traces = traces
        asked = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 7, "ignore_eos": True}
        answer = await made.complete({**SAMPLED, "X-Request-Id": "mine"}, **asked)
        assert answer.status_code == 200

    with_server(engine, body)
    traces.close()
    (span,) = collector.spans
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("llm_request", TRACE_ID, PARENT_ID)
    assert before <= span.start_time_unix_nano < span.end_time_unix_nano <= time_ns()
    found = attributes(span)
    latencies = {name: found.pop(name) for name in list(found) if name.startswith("gen_ai.latency.")}
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.id": "mine",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.n": 2,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.seed": 7,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.prompt_tokens": found["gen_ai.usage.input_tokens"],
        "gen_ai.usage.input_tokens": found["gen_ai.usage.prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.completion_tokens": 10,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.num_sequences": 2,
        "headrace.num_preemptions": 0,
    }
    assert found["gen_ai.usage.prompt_tokens"] > 10
    seconds = {name.removeprefix("gen_ai.latency."): value for name, value in latencies.items()}
    assert set(seconds) == {
        *("time_in_queue", "time_to_first_token", "e2e"),
        *("time_in_model_prefill", "time_in_model_decode", "time_in_model_inference"),
    }
    assert 0 <= seconds["time_in_queue"] <= seconds["time_to_first_token"] <= seconds["e2e"]
    assert seconds["e2e"] == pytest.approx((span.end_time_unix_nano - span.start_time_unix_nano) / 1e9, abs=1e-6)
    assert collector.resources[0]["service.name"] == "headrace"


def test_the_callers_decision_about_sampling_is_honoured(engine: LimitedEngine, collector: Collector) -> None:
    traces = RequestTraces(collector.url, model_name="tiny", environ={})

    async def body(made: Running) -> None:
        made.server.services.traces = traces
        for headers in (NOT_SAMPLED, {"X-Request-Id": "own"}, {"traceparent": "nonsense", "X-Request-Id": "broken"}):
            assert (await made.complete(headers)).status_code == 200

    with_server(engine, body)
    traces.close()
    assert [attributes(span)["gen_ai.request.id"] for span in collector.spans] == ["own", "broken"]
    assert all(span.parent_span_id == b"" and span.trace_id.hex() != TRACE_ID for span in collector.spans)


def test_every_route_that_runs_the_model_has_spans(engine: LimitedEngine, collector: Collector) -> None:
    traces = RequestTraces(collector.url, model_name="tiny", environ={})

    async def body(made: Running) -> None:
        made.server.services.traces = traces
        messages = [{"role": "user", "content": "hi"}]
        for path, asked in (
            ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}),
            ("/v1/completions", {"prompt": "a", "max_tokens": 2, "use_beam_search": True, "n": 2}),
            ("/v1/chat/completions", {"messages": messages, "max_tokens": 2, "stream": True}),
            ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
            ("/v1/embeddings", {"input": "hi"}),
            ("/v1/completions", {"prompt": "a", "max_tokens": 0, "nonsense": 1}),  # refused: no span
        ):
            answer = await made.client.post(path, json=asked, headers=SAMPLED)
            assert answer.status_code == (400 if "nonsense" in asked else 200), answer.text

    with_server(engine, body)
    traces.close()
    found = [attributes(span) for span in collector.spans]
    assert [each["gen_ai.operation.name"] for each in found] == [
        *("text_completion", "text_completion"),  # one per prompt
        *("text_completion", "chat", "chat", "embeddings"),
    ]
    assert [each.get("gen_ai.usage.completion_tokens") for each in found] == [2, 2, 4, 2, 2, None]
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}


def test_an_unreachable_collector_changes_no_answer(
    engine: LimitedEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "CLOSE_S", 0.1)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "600")  # the SDK tries again for about a minute
    before = set(threading.enumerate())

    async def body(made: Running) -> None:
        made.server.services.traces = traces
        answers = await asyncio.gather(*(made.complete(SAMPLED) for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # bound, but does not listen
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        traces = RequestTraces(url, model_name="tiny", environ={})
        with_server(engine, body)
        traces.close()
    assert len([line for line in caplog.messages if line.startswith("traces: ")]) <= 1
    for thread in set(threading.enumerate()) - before:
        if "traces" in thread.name or "Span" in thread.name:
            thread.join(20)
            assert not thread.is_alive(), "it would go on logging"


@pytest.mark.parametrize(("reason", "is_failed"), [("stop", False), ("abort", False), ("error", True)])
def test_a_failed_request_is_a_failed_span(reason: str, is_failed: bool, collector: Collector) -> None:
    traces = RequestTraces(collector.url, model_name="tiny", environ={"OTEL_SERVICE_NAME": "set elsewhere"})
    request = Request("r", np.array([1, 2], np.int32), SamplingParams())
    times = RequestTimes(arrived=1.0, finished=3.0)
    traces.finished({"headers": [], "path": "/v1/completions"}, request, times, reason)
    traces.close()
    (span,) = collector.spans
    assert (span.status.code == span.status.STATUS_CODE_ERROR) == is_failed
    found = attributes(span)
    assert found["gen_ai.latency.e2e"] == 2.0 and "gen_ai.latency.time_to_first_token" not in found


def test_a_missing_package_is_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[otel\]'") as refused:
        RequestTraces("http://127.0.0.1:4318/v1/traces", model_name="tiny", environ={})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"])
def test_another_protocol_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=grpc is not supported"):
        RequestTraces("http://127.0.0.1:4318/v1/traces", model_name="tiny", environ={name: "grpc"})


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://127.0.0.1:4318/v1/traces", "http://127.0.0.1:4318/v1/traces"),
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("https://collector.example/", "https://collector.example/v1/traces"),
        ("https://collector.example/otlp/traces?a=b", "https://collector.example/otlp/traces?a=b"),
        (None, None),
    ],
)
def test_the_usual_path_is_added_to_an_address_without_one(given: str | None, url: str | None) -> None:
    assert ServerOptions(otlp_traces_endpoint=given).traces_url == url


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("grpc://collector:4317", "give the collector's HTTP port, such as http://collector:4318/v1/traces"),
        ("http://collector:4317", "is for gRPC"),
        ("collector:4318", "must be like http://"),
        ("", "must be like http://"),
        ("http://", "must be like http://"),
    ],
)
def test_an_endpoint_that_cannot_work_is_refused(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerOptions(otlp_traces_endpoint=given)


def test_failed_exports_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = HandTimer()
    handler = LimitedLog(clock)
    for seconds in (0.0, 5.0, 5.0, LINE_S):
        clock.move(seconds)
        handler.emit(logging.makeLogRecord({"msg": "cannot\nexport", "levelno": logging.ERROR}))
    assert caplog.messages == [
        "traces: cannot export",
        "traces: cannot export (2 more messages since the last line)",
    ]


def test_nothing_is_imported_without_an_endpoint() -> None:
    program = (
        "import sys, headrace.server.serve as serve\n"
        "from headrace.config import EngineConfig\n"
        "from headrace.server.options import ServerOptions\n"
        "assert serve._traces(EngineConfig(), ServerOptions()) is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.slow
@pytest.mark.processes
def test_the_command_sends_its_last_spans_before_it_ends(tiny_directory: Path, collector: Collector) -> None:
    command = [sys.executable, "-m", "headrace", "serve", str(tiny_directory), "--port", "0"]
    command += ["--served-model-name", "tiny", "--otlp-traces-endpoint", collector.url.removesuffix("/v1/traces")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        address = next(line for line in process.stderr if "headrace: serving tiny on " in line).split()[-1]
        headers = {"Content-Type": "application/json", **SAMPLED}
        asked = json.dumps({"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}).encode()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(urllib.request.Request(f"{address}/v1/completions", asked, headers), timeout=60).close()
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(60) == 0
    (span,) = collector.spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert attributes(span)["gen_ai.usage.prompt_tokens"] == 3
