"""Streams on the wire: chunks, comments, errors, and disconnects."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import openai
import pytest

from headrace.server.http.protocol import GuardedProtocol
from headrace.server.options import ServerOptions
from tests.server.fake_engine import FakeEngine
from tests.server.serving import TEST_TIMEOUT_S, Server, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HEAD_END = b"\r\n\r\n"


class Wire:
    """A connection that the test reads from in steps. All are closed after the test."""

    opened: ClassVar[list[Wire]] = []

    def __init__(self, server: Server, path: str, body: Any) -> None:
        self.opened.append(self)
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=TEST_TIMEOUT_S)
        self.received = b""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        self._socket.sendall(head.encode() + HEAD_END + data)

    def read_until(self, mark: bytes) -> bytes:
        """Read up to the mark. What was read is removed from `received`."""
        while mark not in self.received:
            part = self._socket.recv(65536)
            assert part, f"the connection ended before {mark!r}: {self.received!r}"
            self.received += part
        before, _, self.received = self.received.partition(mark)
        return before + mark

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(autouse=True)
def _closed_wires() -> Iterator[None]:
    yield
    for wire in Wire.opened:
        wire.close()
    Wire.opened.clear()


@pytest.fixture
def fake(tiny_directory: Path) -> FakeEngine:
    return FakeEngine(tiny_directory)


@pytest.fixture
def slow(fake: FakeEngine) -> Iterator[Server]:
    """A server over the fake engine, without keep-alive comments."""
    options = ServerOptions(sse_keep_alive_interval_s=0)
    with serving(start=fake, options=options) as server:
        yield server


def begin(server: Server, fake: FakeEngine, path: str = CHAT, **more: Any) -> Wire:
    """Send a streamed request and wait until the engine has it."""
    body = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    if path == "/v1/responses":
        body = {"input": "hi"}
    num_before = len(fake.client.requests)
    wire = Wire(server, path, body | {"stream": True} | more)
    server.wait_until(lambda: len(fake.client.requests) > num_before)
    return wire


def test_a_chat_stream_on_the_wire(slow: Server, fake: FakeEngine) -> None:
    wire = begin(slow, fake, request_id="mine")
    fake.client.send("Hé")
    head = wire.read_until(HEAD_END).lower()
    assert b"200 ok" in head and b"content-type: text/event-stream" in head and b"cache-control: no-cache" in head
    first = json.loads(wire.read_until(b"\n\n").split(b"data: ")[1])
    assert first["id"] == "chatcmpl-mine" and first["object"] == "chat.completion.chunk"
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    second = json.loads(wire.read_until(b"\n\n").removeprefix(b"data: "))
    assert second["choices"] == [{"index": 0, "delta": {"content": "Hé"}, "logprobs": None, "finish_reason": None}]
    fake.client.send("!", reason="stop")
    last = json.loads(wire.read_until(b"\n\n").split(b"data: ")[1])
    assert last["choices"][0] == {
        "index": 0,
        "delta": {"content": "!"},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert wire.read_until(b"[DONE]\n\n").endswith(b"data: [DONE]\n\n")


def test_a_completion_stream_on_the_wire(slow: Server, fake: FakeEngine) -> None:
    wire = begin(slow, fake, TEXT)
    fake.client.send("ab")
    wire.read_until(HEAD_END)
    chunk = json.loads(wire.read_until(b"\n\n").split(b"data: ")[1])
    assert chunk["id"].startswith("cmpl-") and chunk["object"] == "text_completion"
    assert chunk["choices"] == [
        {"index": 0, "text": "ab", "logprobs": None, "finish_reason": None, "stop_reason": None}
    ]


def test_an_incomplete_character_waits_for_its_other_bytes(slow: Server, fake: FakeEngine) -> None:
    wire = begin(slow, fake, TEXT)
    first, second = fake.client.tokenizer.encode("é", False)
    fake.client.send_tokens([first])
    fake.client.send_tokens([second])
    wire.read_until(HEAD_END)
    chunk = json.loads(wire.read_until(b"\n\n").split(b"data: ")[1])
    assert chunk["choices"][0]["text"] == "é"


def test_tokens_delivered_together_are_sent_in_one_chunk(slow: Server, fake: FakeEngine) -> None:
    wire = begin(slow, fake, TEXT)

    def both() -> None:
        fake.client.send("ab")
        fake.client.send("cd", reason="length")

    slow.on_loop(both)  # before the stream's task runs
    wire.read_until(HEAD_END)
    chunk = json.loads(wire.read_until(b"\n\n").split(b"data: ")[1])
    assert chunk["choices"][0]["text"] == "abcd" and chunk["choices"][0]["finish_reason"] == "length"


def test_keep_alive_comments_are_sent_while_no_token_comes(fake: FakeEngine) -> None:
    with serving(start=fake, options=ServerOptions(sse_keep_alive_interval_s=0.01)) as server:
        wire = begin(server, fake)
        wire.read_until(b": keep-alive\n\n")
        wire.read_until(b": keep-alive\n\n")
        fake.client.send("x", reason="stop")
        events = wire.read_until(b"[DONE]\n\n")
        assert b'"content":"x"' in events
        wire.close()


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses"])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_disconnect_during_a_stream_aborts_the_request(
    slow: Server, fake: FakeEngine, path: str, has_begun: bool
) -> None:
    wire = begin(slow, fake, path)
    if has_begun:
        fake.client.send("x")
        wire.read_until(b"x")
    wire.close()
    slow.wait_until(lambda: fake.client.aborted == [fake.client.requests[0].request_id])
    slow.wait_until(lambda: slow.queue.num_open == 0 and slow.metrics.reasons == ["abort"])
    assert slow.get("/load").json() == {"server_load": 0}


def test_a_disconnect_before_an_unstreamed_answer_aborts_the_request(slow: Server, fake: FakeEngine) -> None:
    wire = begin(slow, fake, stream=False)
    wire.close()
    slow.wait_until(lambda: len(fake.client.aborted) == 1 and slow.queue.num_open == 0)


def test_disconnects_free_the_blocks_of_a_real_engine(server: Server) -> None:
    body = {"prompt": "hi", "max_tokens": 500, "ignore_eos": True, "temperature": 0, "stream": True}
    wires = [Wire(server, TEXT, body) for _ in range(4)]
    for wire in wires:
        wire.read_until(b"data: ")
        wire.close()
    server.wait_until(lambda: server.is_idle and server.queue.num_open == 0)


def test_a_slow_reader_gets_everything_and_does_not_delay_others(slow: Server, fake: FakeEngine) -> None:
    wire = begin(slow, fake, TEXT, max_tokens=400)
    for _ in range(300):
        fake.client.send("0123456789")
    other = begin(slow, fake, TEXT)
    fake.client.send("other", reason="stop")
    other.read_until(b"[DONE]")
    fake.client.send("", reason="length", number=0)
    data = wire.read_until(b"[DONE]")
    texts = [json.loads(part)["choices"][0]["text"] for part in data_of(data)]
    assert "".join(texts) == "0123456789" * 300


def test_a_client_that_pauses_reading_misses_nothing(
    slow: Server, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_pauses: list[int] = []
    pause = GuardedProtocol.pause_writing
    monkeypatch.setattr(GuardedProtocol, "pause_writing", lambda self: num_pauses.append(1) or pause(self))
    wire = begin(slow, fake, TEXT)
    texts = [chr(65 + number % 26) * 20_000 for number in range(500)]
    tokens = {letter: fake.client.tokenizer.encode(letter, False) * 20_000 for letter in set("".join(texts))}
    for text in texts:
        fake.client.send_tokens(tokens[text[0]])
    slow.wait_until(lambda: bool(num_pauses))
    fake.client.send("", reason="length")
    wire.read_until(HEAD_END)
    data = wire.read_until(b"[DONE]")
    assert "".join(json.loads(part)["choices"][0]["text"] for part in data_of(data)) == "".join(texts)


def data_of(received: bytes) -> list[bytes]:
    """Return the JSON of each event in a chunked response."""
    return [line[6:] for line in received.splitlines() if line.startswith(b"data: {")]


def test_an_error_after_the_first_token_is_sent_in_the_stream(slow: Server, fake: FakeEngine) -> None:
    wire = begin(slow, fake)
    fake.client.send("x")
    wire.read_until(b"x")
    fake.client.send("", reason="abort", error="no token could be sampled")
    (error,) = [json.loads(part)["error"] for part in data_of(wire.read_until(b"[DONE]\n\n")) if b'"error"' in part]
    assert error["message"] == "no token could be sampled" and error["code"] == "engine_error"
    assert slow.metrics.reasons == ["error"]


def test_the_openai_client_raises_an_error_sent_in_a_stream(slow: Server, fake: FakeEngine) -> None:
    with openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0) as client:
        stream = iter(_open_with_a_token(client, slow, fake))
        assert next(stream).choices[0].delta.role == "assistant"
        assert next(stream).choices[0].delta.content == "x"
        fake.client.send("", reason="abort", error="gave up")
        with pytest.raises(openai.APIError, match="gave up"):
            next(stream)


def _open_with_a_token(client: openai.OpenAI, slow: Server, fake: FakeEngine) -> Any:
    import threading

    def send_token() -> None:
        slow.wait_until(lambda: bool(fake.client.requests))
        fake.client.send("x")

    thread = threading.Thread(target=send_token)
    thread.start()
    stream = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}], stream=True)
    thread.join()
    return stream


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_error_before_the_first_token_is_a_500(slow: Server, fake: FakeEngine, is_streamed: bool) -> None:
    wire = begin(slow, fake, stream=is_streamed)
    fake.client.send("", reason="abort", error="no token could be sampled")
    assert b"500 Internal Server Error" in wire.read_until(HEAD_END)


def test_an_engine_failure_ends_every_stream_and_refuses_new_requests(slow: Server, fake: FakeEngine) -> None:
    begun, waiting = begin(slow, fake), begin(slow, fake)
    fake.client.send("x", number=0)
    begun.read_until(b"x")
    fake.client.fail()
    ending = begun.read_until(b"[DONE]\n\n")
    assert b'"code":"engine_dead"' in ending and b"secret" not in ending
    assert b"503 Service Unavailable" in waiting.read_until(HEAD_END)
    answer = slow.post(TEXT, {"prompt": "hi"})
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_dead"
    assert slow.queue.num_open == 0


def test_a_deadline_ends_a_request(fake: FakeEngine) -> None:
    with serving(start=fake, options=ServerOptions(request_timeout_s=0.5)) as server:
        error = server.error(TEXT, {"prompt": "hi"}, status=504)
        assert error["code"] == "request_timeout"
        submitted = [request.request_id for request in fake.client.requests]  # none, if that took half a second
        server.wait_until(lambda: fake.client.aborted == submitted)


def test_a_request_id_in_use_is_refused(slow: Server, fake: FakeEngine) -> None:
    begin(slow, fake, request_id="same")
    error = slow.error(CHAT, {"messages": [{"role": "user", "content": "x"}], "request_id": "same"})
    assert error["param"] == "request_id"
    assert slow.queue.num_open == 1


def test_an_internal_error_is_a_500_without_details_and_affects_no_other_request(
    slow: Server, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = begin(slow, fake)
    with monkeypatch.context() as broken:
        broken.setattr("headrace.server.endpoints.completions.as_prompts", lambda given: 1 / 0)
        error = slow.error(TEXT, {"prompt": "hi"}, status=500)
        assert error["code"] == "internal_error" and "division" not in error["message"]
    fake.client.send("fine", reason="stop")
    assert b'"content":"fine"' in wire.read_until(b"[DONE]")


def test_the_log_of_an_internal_error_has_no_text_of_the_request(
    slow: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(given: str) -> None:
        raise ValueError(f"cannot read {given}")

    monkeypatch.setattr("headrace.server.endpoints.completions.as_prompts", fail)
    slow.error(TEXT, {"prompt": "Cinnamon"}, status=500)
    assert "ValueError in /v1/completions" in caplog.text and "in fail" in caplog.text
    assert "Cinnamon" not in caplog.text


def test_an_internal_error_during_a_stream_ends_only_that_stream(
    slow: Server, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = begin(slow, fake, TEXT), begin(slow, fake, TEXT)
    for number, wire in enumerate((first, second)):
        fake.client.send("begun", number=number)
        wire.read_until(b'"begun"')
    with monkeypatch.context() as broken:
        broken.setattr("headrace.server.http.chunks.Chunks.text", lambda self, index, text: 1 / 0)
        fake.client.send("y", number=0)
        assert b'"code":"internal_error"' in first.read_until(b"[DONE]")
    slow.wait_until(lambda: fake.client.aborted == [fake.client.requests[0].request_id])
    fake.client.send("fine", reason="stop", number=1)
    assert b'"text":"fine"' in second.read_until(b"[DONE]")


# ---- answers that are not streamed


def test_only_streams_and_stop_strings_are_watched_token_by_token(slow: Server, fake: FakeEngine) -> None:
    for path in (CHAT, TEXT, "/v1/responses"):
        begin(slow, fake, path)
        assert fake.client.requests[-1].watched
        begin(slow, fake, path, stream=False)
        assert not fake.client.requests[-1].watched and fake.client.requests[-1].announced
    begin(slow, fake, TEXT, stream=False, stop="x")
    assert fake.client.requests[-1].watched


def test_an_unstreamed_request_leaves_the_queue_with_its_first_token(slow: Server, fake: FakeEngine) -> None:
    wire = begin(slow, fake, TEXT, stream=False)
    (reservation,) = slow.queue.reservations
    assert not reservation.is_started
    fake.client.send("a")
    slow.wait_until(lambda: reservation.is_started)
    fake.client.send("bcd", reason="length")
    assert b'"text":"abcd"' in wire.read_until(b'"usage"')
    slow.wait_until(lambda: bool(slow.metrics.times))
    assert slow.metrics.times[0].num_generated == 4


def test_the_salt_of_a_key_is_combined_with_the_clients() -> None:
    from headrace.server.endpoints.generation import cache_salt
    from headrace.server.http.exchange import Exchange

    def salt(of_key: str | None, given: str | None) -> str | None:
        scope = {} if of_key is None else {"headrace": {"cache_salt": of_key}}
        return cache_salt(Exchange(scope, None, None), given)  # type: ignore[arg-type]

    assert salt(None, None) is None and salt(None, "mine") == "mine" and salt("k1", None) == "k1"
    assert salt("k1", "mine") != salt("k2", "mine") != "mine"


def test_a_reservation_is_corrected_after_tokenizing(slow: Server, fake: FakeEngine) -> None:
    wire = begin(slow, fake, TEXT, prompt="12345")
    (reservation,) = slow.queue.reservations
    assert reservation.num_tokens == 5 and not reservation.is_started
    fake.client.send("x")
    wire.read_until(b"x")
    assert reservation.is_started and not reservation.is_released
    fake.client.send("", reason="stop")
    wire.read_until(b"[DONE]")
    slow.wait_until(lambda: reservation.is_released)
    assert slow.metrics.reasons == ["stop"] and slow.metrics.times[0].num_prompt == 5
