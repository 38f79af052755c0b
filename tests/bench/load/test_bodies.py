"""Addresses and encoded requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.bench.load.bodies import compatibility_warnings, encode_requests
from headrace.bench.load.target import Target
from headrace.bench.workloads import WorkloadSpec, build
from headrace.errors import ConfigError

TOKENS = build(WorkloadSpec(name="random", num_requests=2, input_len=4, output_len=3))
CHAT = build(WorkloadSpec(name="uniform", num_requests=2))


@pytest.mark.parametrize(
    ("address", "host", "port", "prefix"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, ""),
        ("127.0.0.1:8000", "127.0.0.1", 8000, ""),
        ("http://host:1/v1/", "host", 1, ""),
        ("https://host/openai/v1", "host", 443, "/openai"),
        ("http://[::1]:80", "::1", 80, ""),
    ],
)
def test_an_address_is_split_into_host_port_and_prefix(address: str, host: str, port: int, prefix: str) -> None:
    target = Target.parse(address)
    assert (target.host, target.port, target.prefix) == (host, port, prefix)
    assert target.is_tls == address.startswith("https")


@pytest.mark.parametrize(
    "address", ["", "ftp://host", "http://", "http://host:99999", "http://host?x=1", "http://u:p@h"]
)
def test_an_address_that_cannot_be_used_is_refused(address: str) -> None:
    with pytest.raises(ConfigError):
        Target.parse(address)


def fields_of(request: bytes) -> tuple[str, dict[str, Any]]:
    head, _, body = request.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head.split(b"\r\n")
    return head.decode(), json.loads(body)


def test_a_request_is_complete() -> None:
    target = Target.parse("http://host:8000/some/v1")
    head, body = fields_of(encode_requests(TOKENS, target, "m", headers={"Authorization": "Bearer k"})[1])
    assert head.startswith("POST /some/v1/completions HTTP/1.1\r\nHost: host:8000\r\n")
    assert "\r\nAuthorization: Bearer k\r\n" in head
    assert body["prompt"] == TOKENS.requests[1].prompt
    assert body["model"] == "m"
    assert body["stream"] is True


def test_messages_go_to_the_chat_endpoint() -> None:
    head, body = fields_of(encode_requests(CHAT, Target("h", 80), "m")[0])
    assert head.startswith("POST /v1/chat/completions ")
    assert body["messages"] == CHAT.requests[0].messages


def test_compatibility_leaves_fields_out_and_warns() -> None:
    def names(compatibility: Any) -> set[str]:
        return set(fields_of(encode_requests(TOKENS, Target("h", 80), "m", compatibility=compatibility)[0])[1])

    assert names("vllm") - names("openai") == {"min_tokens", "ignore_eos"}
    assert names("openai") - names("minimal") == {"stream_options"}
    assert compatibility_warnings(TOKENS, "vllm") == []
    assert "lengths differ" in compatibility_warnings(TOKENS, "openai")[0]


@pytest.mark.parametrize("headers", [{"Host": "x"}, {"X": "a\r\nY: b"}, {"A:B": "x"}, {"": "x"}, {"X": "é"}])
def test_headers_that_would_break_the_request_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="header"):
        encode_requests(TOKENS, Target("h", 80), "m", headers=headers)
