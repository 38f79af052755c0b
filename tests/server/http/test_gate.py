from __future__ import annotations

import asyncio
import logging

import pytest

from tests.server.asgi import Answer, GateBench

BEARER = {"Authorization": "Bearer secret"}
PATHS = [
    "/v1/models",
    "/v1/chat/completions",
    "/metrics",
    "/tokenize",
    "/version",
    "/load",
    "/openapi.json",
    "/nowhere",
    "/dashboard/data",
]
TRICKS = [
    "//v1/models",
    "//health",
    "/health/",
    "/health/../v1/models",
    "/health/..",
    "/health;/v1/models",
    "/HEALTH",
    "/ready/x",
    "/health\x00",
    "/./health",
    "health",
    "",
    "*",
]


def closed(**options: object) -> GateBench:
    return GateBench(api_key="secret", **options)


# ---- authentication


@pytest.mark.parametrize("path", [*PATHS, *TRICKS])
def test_every_path_except_the_public_ones_needs_a_key(path: str) -> None:
    bench = closed()
    answer = bench.ask(path)
    assert answer.status == 401
    assert bench.echo.scopes == [] and bench.refused == ["auth"]
    assert bench.ask(path, BEARER).status == 200


@pytest.mark.parametrize("path", ["/", "/health", "/ready"])
def test_the_public_paths_need_no_key(path: str) -> None:
    assert closed().ask(path).status == 200


def test_the_application_is_told_which_keys_there_are() -> None:
    for bench, expected in ((GateBench(), (False, False)), (closed(admin_key="other"), (True, True))):
        bench.ask("/version", BEARER)
        facts = bench.echo.scopes[-1]["headrace"]
        assert (facts["needs_key"], facts["has_admin"]) == expected


def test_a_refusal_has_openais_shape_and_explains_how_to_send_a_key() -> None:
    answer = closed().ask()
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["content-type"] == "application/json"
    assert answer.error == {
        "message": "a valid API key is needed, as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'",
        "type": "authentication_error",
        "param": None,
        "code": "invalid_api_key",
    }


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("Authorization", "Bearer secret")], 200),
        ([("authorization", "bearer  secret ")], 200),
        ([("X-Api-Key", "secret")], 200),
        ([("Authorization", "Bearer EMPTY"), ("X-Api-Key", "secret")], 200),
        ([("X-Api-Key", "Secret")], 401),
        ([("Authorization", "secret")], 401),
        ([("Authorization", "Basic secret")], 401),
        ([("Authorization", "Bearer")], 401),
        ([("Authorization", "Bearer secret2")], 401),
        ([("X-Api-Key", "")], 401),
        ([("X-Api-Key", f"{number}") for number in range(50)] + [("X-Api-Key", "secret")], 401),
    ],
)
def test_keys_are_accepted_in_either_header(headers: list[tuple[str, str]], status: int) -> None:
    assert closed().ask(headers=headers).status == status


def test_without_configured_keys_every_path_is_open() -> None:
    assert GateBench().ask("/v1/models").status == 200


def test_the_host_header_has_no_influence() -> None:
    """CVE-2026-48746: a Host that made the URL's path look like an open one got past the gate."""
    for host in ("localhost/health", "x/health?", "health", "a\\/health", "127.0.0.1:8000/health#"):
        bench = closed()
        assert bench.ask("/v1/models", {"Host": host}).status == 401
        assert bench.ask("/v1/models", {"Host": host, **BEARER}).status == 200
        assert bench.echo.scopes[0]["path"] == "/v1/models"


def test_the_application_gets_the_path_that_was_checked() -> None:
    bench = closed()
    for path in TRICKS:
        bench.ask(path, BEARER)
    assert [scope["path"] for scope in bench.echo.scopes] == TRICKS


def test_handlers_get_the_name_and_salt_of_the_key() -> None:
    bench = closed(admin_key="root")
    bench.ask(headers={**BEARER, "X-Request-Id": "mine"})
    facts = bench.echo.scopes[0]["headrace"]
    assert (facts["key_name"], facts["is_admin"], facts["request_id"]) == ("command-line", False, "mine")
    assert facts["cache_salt"] == bench.keys.find(b"secret").cache_salt  # type: ignore[union-attr]
    bench.ask(headers={"X-Api-Key": "root"})
    other = bench.echo.scopes[1]["headrace"]
    assert (other["key_name"], other["is_admin"]) == ("admin", True)
    assert other["cache_salt"] not in (None, facts["cache_salt"])


def test_without_a_key_there_is_no_salt() -> None:
    bench = GateBench()
    bench.ask()
    assert bench.echo.scopes[0]["headrace"]["cache_salt"] is None


@pytest.mark.parametrize("path", ["/admin", "/admin/", "/admin/drain"])
def test_admin_routes_need_the_admin_key_and_do_not_exist_without_one(path: str) -> None:
    assert GateBench().ask(path).status == 404
    assert closed().ask(path, BEARER).status == 404
    bench = closed(admin_key="root")
    assert [bench.ask(path, headers).status for headers in ({}, BEARER, {"X-Api-Key": "root"})] == [401, 403, 200]
    open_to_all = GateBench(admin_key="root")
    assert [open_to_all.ask(path).status, open_to_all.ask("/v1/models").status] == [401, 200]


def test_a_path_that_only_starts_like_an_admin_route_is_not_one() -> None:
    assert GateBench().ask("/administration").status == 200


# ---- behind a proxy


@pytest.mark.parametrize(
    ("requested", "checked"),
    [
        ("/llm/health", "/health"),
        ("/health", "/health"),
        ("/llm/v1/models", "/v1/models"),
        ("/llmx/health", "/llmx/health"),
    ],
)
def test_the_root_path_of_a_proxy_is_removed_if_present(requested: str, checked: str) -> None:
    bench = closed(root_path="/llm")
    assert bench.ask(requested, BEARER).status == 200
    assert (bench.echo.scopes[0]["path"], bench.echo.scopes[0]["root_path"]) == (checked, "/llm")
    assert bench.ask(requested).status == (200 if checked == "/health" else 401)


# ---- CORS


def test_a_request_from_an_unlisted_origin_is_refused() -> None:
    bench = GateBench()
    answer = bench.ask(headers={"Origin": "https://evil.example"}, method="POST", body=[b"{}"])
    assert answer.status == 403 and "--allowed-origins" in answer.error["message"]
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert bench.echo.scopes == []


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", 200),
        ("http://localhost:8000", "LOCALHOST:8000", 200),
        ("https://[::1]:8000", "[::1]:8000", 200),
        ("http://10.0.0.7", "10.0.0.7", 200),
        ("http://127.0.0.1:9000", "127.0.0.1:8000", 403),  # another port is another origin
        ("http://evil.example", "127.0.0.1:8000", 403),
        ("http://evil.example:8000", "evil.example:8000", 403),  # it may have been pointed at this server
        ("http://127.0.0.1.evil.example", "127.0.0.1.evil.example", 403),
        ("http://localhost.evil.example", "localhost.evil.example", 403),
        ("http://localhost@evil.example", "localhost@evil.example", 403),
        ("file://127.0.0.1:8000", "127.0.0.1:8000", 403),
        ("null", "null", 403),
        ("http://[::1", "[::1", 403),
    ],
)
def test_the_servers_own_page_may_use_it(origin: str, host: str, status: int) -> None:
    answer = GateBench().ask(headers={"Origin": origin, "Host": host}, method="POST")
    assert answer.status == status


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "llm.example", "health", "127.0.0.1/health"])
def test_no_host_and_no_origin_replace_a_key(host: str) -> None:
    for path in PATHS:
        assert closed().ask(path, {"Host": host}).status == 401
        assert closed().ask(path, {"Host": host, "Origin": f"http://{host}"}).status == 401


def test_two_hosts_are_not_the_servers_own_page() -> None:
    headers = [("Origin", "http://127.0.0.1"), ("Host", "127.0.0.1"), ("Host", "evil.example")]
    assert GateBench().ask(headers=headers).status == 403


def test_with_keys_the_servers_own_page_may_have_a_name() -> None:
    page = {"Origin": "https://llm.example", "Host": "llm.example"}
    assert closed().ask(headers=BEARER | page).status == 200
    assert closed().ask(headers=page).status == 401
    assert closed().ask(headers=BEARER | {"Origin": "https://evil.example", "Host": "llm.example"}).status == 403


def test_a_listed_origin_is_allowed_and_named() -> None:
    bench = GateBench(allowed_origins="https://a.example, https://b.example")
    answer = bench.ask(headers={"Origin": "https://b.example"})
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "https://b.example")
    assert answer.headers["vary"] == "origin"
    assert bench.ask(headers={"Origin": "https://c.example"}).status == 403
    assert bench.ask(headers={"Origin": "https://a.example.evil"}).status == 403


def test_a_preflight_of_a_listed_origin_needs_no_key_and_does_not_reach_the_application() -> None:
    bench = closed(allowed_origins='["https://a.example"]')
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    answer = bench.ask(method="OPTIONS", headers={"Origin": "https://a.example", **asked})
    assert (answer.status, answer.headers["access-control-allow-headers"]) == (204, "authorization")
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert bench.ask(method="OPTIONS", headers={"Origin": "https://b.example", **asked}).status == 403
    assert bench.ask(method="OPTIONS", headers=asked).status == 401
    assert bench.echo.scopes == []


def test_all_origins_can_be_allowed() -> None:
    answer = GateBench(allowed_origins="*").ask(headers={"Origin": "https://any.example"})
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")


# ---- request ids


@pytest.mark.parametrize("given", ["a" * 128, "run-1.2_X"])
def test_a_valid_request_id_is_returned(given: str) -> None:
    assert GateBench().ask(headers={"X-Request-Id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a" * 129, "a b", "a\r\nSet-Cookie: x", "é", "<script>", "a\x00"])
def test_an_invalid_request_id_is_replaced(given: str) -> None:
    made = GateBench().ask(headers={"X-Request-Id": given}).headers["x-request-id"]
    assert made != given and len(made) == 32 and made.isalnum()


def test_refusals_have_request_ids_which_can_be_turned_off() -> None:
    assert "x-request-id" in closed().ask().headers
    assert "x-request-id" not in GateBench(enable_request_id_headers=False).ask().headers


# ---- limits on size and time


def test_a_body_reaches_the_application_in_one_piece() -> None:
    bench = GateBench(max_body_bytes=10)
    assert bench.ask(method="POST", headers={"Content-Length": "10"}, body=[b"01234", b"56789"]).body == b"10"
    assert bench.ask(method="POST", headers={"Transfer-Encoding": "chunked"}, body=[b"abc", b"", b"d"]).body == b"4"
    assert bench.echo.bodies == [b"0123456789", b"abcd"]


@pytest.mark.parametrize("headers", [{"Content-Length": "11"}, {"Transfer-Encoding": "chunked"}])
def test_a_body_over_the_limit_is_refused_however_it_is_sent(headers: dict[str, str]) -> None:
    bench = GateBench(max_body_bytes=10)
    answer = bench.ask(method="POST", headers=headers, body=[b"0" * 6, b"0" * 5])
    assert (answer.status, answer.error["code"]) == (413, "body_too_long")
    assert answer.headers["connection"] == "close"
    assert bench.echo.scopes == [] and bench.refused == ["body_too_long"]


@pytest.mark.parametrize("encoding", ["gzip", "zstd, gzip"])
def test_a_compressed_body_is_refused_by_name(encoding: str) -> None:
    headers = {"Content-Length": "5", "Content-Encoding": encoding}
    answer = GateBench().ask(method="POST", headers=headers, body=[b"01234"])
    assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")
    assert encoding in answer.error["message"]
    plain = {"Content-Length": "5", "Content-Encoding": "identity"}
    assert GateBench().ask(method="POST", headers=plain, body=[b"01234"]).status == 200


def test_a_body_that_does_not_arrive_times_out() -> None:
    bench = GateBench(read_timeout_s=0.01)
    answer = bench.ask(method="POST", headers={"Content-Length": "10"}, body=[b"01234"], ends=False)
    assert (answer.status, answer.error["code"], bench.refused) == (408, "read_timeout", ["timeout"])


def test_a_refused_client_may_finish_sending_for_a_while() -> None:
    sent = [b"0" * 5] * 3
    answer = closed().ask(method="POST", headers={"Content-Length": "15"}, body=sent)
    assert answer.status == 401
    assert closed(read_timeout_s=0.01).ask(method="POST", headers={"Content-Length": "15"}, ends=False).status == 401


def test_all_bodies_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.http.gate.MAX_HELD_BODIES", 1)
    bench = GateBench(max_body_bytes=10)

    async def post(size: int, *, ends: bool = True) -> Answer:
        chunked = {"Transfer-Encoding": "chunked"}
        return await bench.send(method="POST", headers=chunked, body=[b"0" * size], ends=ends)

    async def body() -> None:
        unfinished = asyncio.create_task(post(4, ends=False))
        await asyncio.sleep(0)
        answer = await post(7)
        assert (answer.status, answer.headers["retry-after"], bench.refused) == (503, "1", ["bodies"])
        assert (await post(6)).status == 200
        assert (await post(11)).status == 413
        assert (await post(7)).status == 503
        unfinished.cancel()
        await asyncio.wait([unfinished])
        assert (await post(10)).status == 200

    asyncio.run(body())


# ---- the log


def test_requests_are_logged_only_if_enabled_and_never_their_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.access")
    asked = {"method": "POST", "headers": {"Content-Length": "14", **BEARER}, "body": [b'"a prompt text"']}
    closed().ask(**asked)  # type: ignore[arg-type]
    assert caplog.messages == []
    bench = closed(enable_log_requests=True)
    bench.ask("/v1/completions", **asked)  # type: ignore[arg-type]
    bench.ask("/forged\nline", method="GET")
    assert len(caplog.messages) == 2
    assert caplog.messages[0].startswith("POST /v1/completions 200 key=command-line id=")
    assert caplog.messages[1].startswith("GET /forged\\nline 401 key=None id=")
    assert "prompt" not in caplog.text and "secret" not in caplog.text
