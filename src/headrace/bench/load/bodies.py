"""Requests as bytes, encoded before the clock starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from headrace.bench.load.target import Target
from headrace.bench.workloads import Workload
from headrace.errors import ConfigError

# Which fields a server accepts. `vllm`: all. `openai`: no field of vLLM's own. `minimal`: no stream_options either.
Compatibility = Literal["vllm", "openai", "minimal"]
COMPATIBILITIES: tuple[str, ...] = get_args(Compatibility)
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "vllm": (),
    "openai": ("min_tokens", "ignore_eos", "stop_token_ids", "allowed_token_ids"),
    "minimal": ("min_tokens", "ignore_eos", "stop_token_ids", "allowed_token_ids", "stream_options"),
}
OWN_HEADERS = ("host", "content-type", "content-length", "accept", "connection", "transfer-encoding")


def encode_requests(
    workload: Workload,
    target: Target,
    model_name: str,
    *,
    headers: Mapping[str, str] | None = None,
    compatibility: Compatibility = "vllm",
) -> list[bytes]:
    """The whole HTTP request of each of a workload's requests: head and body."""
    if compatibility not in COMPATIBILITIES:
        raise ConfigError(f"compatibility must be one of {', '.join(COMPATIBILITIES)}, got {compatibility!r}")
    head = _head(target, headers or {})
    encoder = msgspec.json.Encoder()
    requests = []
    for index in range(len(workload.requests)):
        path, fields = workload.body(index, model_name)
        body = encoder.encode(without(fields, compatibility))
        line = f"POST {target.prefix}{path} HTTP/1.1\r\n"
        requests.append(f"{line}{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return requests


def without(fields: dict[str, Any], compatibility: Compatibility) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in LEFT_OUT[compatibility]}


def compatibility_warnings(workload: Workload, compatibility: Compatibility) -> list[str]:
    warnings = []
    if compatibility != "vllm" and workload.spec.ends != "eos":
        warnings.append(
            f"fields of vLLM's API were left out of requests (compatibility {compatibility}): answers end where the "
            "model ends them, so their lengths differ between servers and runs"
        )
    return warnings


def _head(target: Target, headers: Mapping[str, str]) -> str:
    for name, value in headers.items():
        if name.lower() in OWN_HEADERS:
            raise ConfigError(f"the header {name!r} is set by the client and cannot be given")
        if not name or not f"{name}{value}".isprintable() or ":" in name or not f"{name}{value}".isascii():
            raise ConfigError(f"the header {name!r} is not valid: printable ASCII characters only")
    own = {
        "Host": target.host_header,
        "Content-Type": "application/json",
        "Accept": "text/event-stream, application/json",
    }
    return "".join(f"{name}: {value}\r\n" for name, value in {**own, **headers}.items())
