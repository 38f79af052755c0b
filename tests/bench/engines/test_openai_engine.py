"""A server at an address: what it reports, and clear errors for what is wrong with the address."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from headrace.bench.engines import EngineFailure, metrics
from headrace.bench.engines.http import base_address
from headrace.bench.engines.openai_engine import OpenAIEngine

MODELS = {"object": "list", "data": [{"id": "some-model", "object": "model", "max_model_len": 2048}]}
VLLM_METRICS = """\
# HELP vllm:num_preemptions_total Cumulative number of preemptions.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="some-model"} 2.0
vllm:num_preemptions_total{engine="1",model_name="some-model"} 3.0
vllm:prefix_cache_hits_total{engine="0"} 64.0
vllm:prefix_cache_queries_total{engine="0"} 128.0
vllm:generation_tokens_total{engine="0"} 1e+03
vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="True",engine="0",num_gpu_blocks="910",\
gpu_memory_utilization="0.9",sliding_window="None"} 1.0
"""
SGLANG_METRICS = """\
sglang:num_retracted_requests_total{model_name="m"} 4.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 5.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 2.0
sglang:prompt_tokens_total{model_name="m"} 70.0
"""


class Pages(dict[str, tuple[int, str]]):
    """Status and body by path, and the keys that were sent."""

    def __init__(self, pages: dict[str, str | tuple[int, str]]) -> None:
        super().__init__({path: page if isinstance(page, tuple) else (200, page) for path, page in pages.items()})
        self.keys_sent: list[str | None] = []


@contextmanager
def serving(pages: Pages, tls: tuple[Path, Path] | None = None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pages.keys_sent.append(self.headers["Authorization"])
            status, body = pages.get(self.path, (404, "no"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    class QuietServer(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A client without TLS is expected."""

    server = QuietServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def failure_of(address: str, **options: str) -> EngineFailure:
    with pytest.raises(EngineFailure) as error:
        OpenAIEngine(address, **options).start({}, serves=True)
    return error.value


def test_headrace_reports_the_time_of_its_engine_loop_by_part() -> None:
    text = """\
headrace:engine_seconds_total{engine="0",part="host"} 1.5
headrace:engine_seconds_total{engine="1",part="host"} 0.5
headrace:engine_seconds_total{engine="0",part="wait"} 8.0
headrace:steps_total{engine="0"} 100
"""
    assert metrics.counters(text) == {"num_steps": 100.0, "host_seconds": 2.0, "wait_seconds": 8.0}


def test_vllm_reports_counters_and_cache_settings() -> None:
    pages = {"/v1/models": json.dumps(MODELS), "/metrics": VLLM_METRICS, "/version": '{"version": "0.32.0"}'}
    with serving(Pages(pages)) as address, OpenAIEngine(f"{address}/v1/").start({}, serves=True) as running:
        assert (running.address, running.model_name) == (address, "some-model")
        counters = running.counters()
        assert counters["num_preemptions"] == 5 and counters["num_generated_tokens"] == 1000
        assert (counters["prefix_hit_tokens"], counters["prefix_queried_tokens"]) == (64, 128)
        found = running.settings_in_force()
        assert {setting.source for setting in found.values()} == {"reported"}
        values = {name: setting.value for name, setting in found.items()}
        assert values["block_size"] == 16 and values["enable_prefix_caching"] is True
        assert values["gpu_memory_utilization"] == 0.9 and values["sliding_window"] is None
        assert values["max_model_len"] == 2048 and "engine" not in values
        assert running.versions() == {"server": "0.32.0"}
        assert running.is_alive()
    assert not running.is_alive()


def test_sglang_has_names_of_its_own() -> None:
    with serving(Pages({"/v1/models": json.dumps(MODELS), "/metrics": SGLANG_METRICS})) as address:
        counters = OpenAIEngine(address).start({}, serves=True).counters()
        assert counters == {
            "num_preemptions": 4,
            "num_prompt_tokens": 70,
            "prefix_queried_tokens": 70,
            "prefix_hit_tokens": 7,
        }


def test_headrace_reports_every_setting_with_its_source() -> None:
    setting = {"value": 64, "source": "automatic", "reason": "of the machine"}
    info = {"version": "0.1.0", "model": {"name": "m", "vocab_size": 512}, "settings": {"max_num_seqs": setting}}
    pages = {"/v1/models": json.dumps(MODELS), "/server_info": json.dumps(info), "/version": '{"version": "0.1.0"}'}
    with serving(Pages(pages)) as address:
        running = OpenAIEngine(address).start({}, serves=True)
        found = running.settings_in_force()["max_num_seqs"]
        assert (found.value, found.source, found.reason) == (64, "automatic", "of the machine")
        assert running.versions() == {"headrace": "0.1.0"}
        assert running.model_facts() == {"name": "some-model", "vocab_size": 512}


def test_a_server_that_reports_nothing_is_measured_all_the_same() -> None:
    with serving(Pages({"/v1/models": json.dumps({"data": [{"id": "m"}]})})) as address:
        running = OpenAIEngine(address).start({}, serves=True)
        assert running.settings_in_force() == {} and running.counters() == {}
        assert running.versions() == {"server": "not reported"}
        assert running.model_facts() == {"name": "m"}


def test_a_key_is_sent_and_never_shown() -> None:
    pages = Pages({"/v1/models": (401, '{"error": "bad key sesame"}')})
    with serving(pages) as address:
        failure = failure_of(address, api_key="sesame")
    assert pages.keys_sent == ["Bearer sesame"]
    assert failure.kind == "unreachable" and "API key" in str(failure) and "sesame" not in str(failure)


@pytest.mark.parametrize(
    ("models", "asked", "said"),
    [
        ([{"id": "a"}, {"id": "b"}], None, "--model: a, b"),
        ([{"id": "a"}, {"id": "b"}], "c", "does not serve the model 'c'; it serves a, b"),
    ],
)
def test_the_model_must_be_one_that_is_served(models: list[dict[str, str]], asked: str | None, said: str) -> None:
    with serving(Pages({"/v1/models": json.dumps({"data": models})})) as address:
        failure = failure_of(address, **({} if asked is None else {"model": asked}))
        assert failure.kind == "bad_setting" and said in str(failure)


def test_adapters_are_no_models_to_choose_from() -> None:
    models = [{"id": "m", "parent": None}, {"id": "sql", "parent": "m"}]
    with serving(Pages({"/v1/models": json.dumps({"data": models})})) as address:
        assert OpenAIEngine(address).start({}, serves=True).model_facts() == {"name": "m"}
        assert OpenAIEngine(address, model="sql").start({}, serves=True).model_facts() == {"name": "sql"}


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ((404, "no"), "no OpenAI-compatible server"),
        ((503, "wait"), "HTTP 503"),
        ("<html>", "does not answer with JSON"),
        ("[]", "lists no models"),
    ],
)
def test_another_kind_of_server_is_said_to_be_one(page: str | tuple[int, str], said: str) -> None:
    with serving(Pages({"/v1/models": page})) as address:
        assert said in str(failure_of(address))


def test_nothing_listens_on_the_port() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but does not listen
        failure = failure_of(f"127.0.0.1:{unused.getsockname()[1]}")
    assert failure.kind == "unreachable" and "nothing listens on this port" in str(failure)


def test_a_server_on_this_machine_is_not_asked_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    with serving(Pages({"/v1/models": json.dumps(MODELS)})) as address:
        assert OpenAIEngine(address).start({}, serves=True).model_name == "some-model"


def test_a_host_that_does_not_exist() -> None:
    assert "host name is not known" in str(failure_of("http://no-such-host.invalid:8000"))


def test_https_to_a_server_without_tls() -> None:
    with serving(Pages({})) as address:
        assert "http:// address" in str(failure_of(address.replace("http:", "https:")))


def test_tls_that_is_not_trusted_and_http_to_a_server_with_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    with serving(Pages({}), tls=(certificate, key)) as address:
        assert "certificate is not trusted" in str(failure_of(address))
        assert "https:// address" in str(failure_of(address.replace("https:", "http:")))


@pytest.mark.parametrize("address", ["ftp://host", "http://", "http://host:port", ""])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(EngineFailure, match="is not an address"):
        base_address(address)


def test_settings_of_a_running_server_cannot_be_changed() -> None:
    with pytest.raises(EngineFailure, match="max_num_seqs cannot be set") as error:
        OpenAIEngine("http://127.0.0.1:1").start({"max_num_seqs": 4}, serves=True)
    assert error.value.kind == "unsupported"
    with pytest.raises(EngineFailure, match="only serves over HTTP"):
        OpenAIEngine("http://127.0.0.1:1").start({}, serves=False)
