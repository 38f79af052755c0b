"""Answers are read the same however their bytes are split, and whatever their text contains."""

from __future__ import annotations

import json

import pytest

from headrace.bench.load.answer import MAX_ERROR_LEN, Answer
from tests.bench.load.streams import COMPLETION, DONE, END, STREAMS, USAGE, delta, event, text


def read(*pieces: bytes, status: int = 200, content_type: bytes = b"text/event-stream") -> Answer:
    """Feed pieces at the times 1, 2, ..."""
    answer = Answer()
    answer.start(status, content_type)
    for number, piece in enumerate(pieces, 1):
        answer.feed(piece, float(number))
    answer.end(len(pieces) + 1.0)
    return answer


@pytest.mark.parametrize("name", STREAMS)
def test_every_split_of_a_stream_reads_the_same(name: str) -> None:
    stream, num_chunks = STREAMS[name]
    for place in range(len(stream) + 1):
        answer = read(stream[:place], stream[place:])
        assert answer.error is None, (place, answer.error)
        assert len(answer.chunk_at) == num_chunks, place
        assert answer.is_done
        assert (answer.num_prompt_tokens, answer.num_output_tokens, answer.num_cached_tokens) == (7, 5, 3)


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_of_single_bytes_reads_the_same(name: str) -> None:
    stream, num_chunks = STREAMS[name]
    answer = read(*(stream[place : place + 1] for place in range(len(stream))))
    assert answer.error is None
    assert len(answer.chunk_at) == num_chunks
    assert answer.num_output_tokens == 5


def test_a_chunk_has_the_time_at_which_its_line_was_complete() -> None:
    one, two = event(**text(" a")), event(**text(" b"))
    answer = read(one[:9], one[9:], two + event(**END), event(choices=[], usage=USAGE) + DONE)
    assert answer.chunk_at == [2.0, 3.0]
    assert answer.end_at == 3.0


def test_the_answer_ends_with_its_finish_reason_not_with_usage() -> None:
    answer = read(event(**text(" a")), event(**END), event(choices=[], usage=USAGE), DONE)
    assert answer.end_at == 2.0


def test_a_chunk_with_the_role_only_is_not_the_first_token() -> None:
    answer = read(
        event(**delta(role="assistant", content="")), event(**delta(content="Hi")), event(**delta("stop")), DONE
    )
    assert answer.chunk_at == [2.0]


def test_text_after_reasoning_is_seen() -> None:
    answer = read(
        event(**delta(reasoning="a")),
        event(**delta(reasoning="b")),
        event(**delta(content="c")),
        event(**delta("stop")),
    )
    assert answer.chunk_at == [1.0, 2.0, 3.0]


def test_usage_beside_text_is_read() -> None:
    answer = read(*(event(**text(" a", usage={**USAGE, "completion_tokens": n})) for n in (1, 2, 3)), DONE)
    assert len(answer.chunk_at) == 3
    assert answer.num_output_tokens == 3


def test_token_counts_of_llama_cpp_are_read() -> None:
    answer = read(event(**text(" a")), event(**END, timings={"predicted_n": 12, "prompt_n": 4}), DONE)
    assert answer.num_output_tokens == 12


def test_an_error_in_the_stream_is_an_error() -> None:
    answer = read(event(**text(" a")), event(error={"message": "out of\nmemory", "code": 500}), DONE)
    assert answer.error == "error in the stream: out of memory"


def test_an_error_object_of_older_servers_is_an_error() -> None:
    answer = read(event(object="error", message="too long", code=400))
    assert answer.error == "error in the stream: too long"


def test_a_text_about_errors_is_no_error() -> None:
    answer = read(event(**text('{"error":{"message":"x"}}')), event(**text('{"error": "y"}')), event(**END), DONE)
    assert answer.error is None
    assert len(answer.chunk_at) == 2


def test_a_stream_without_done_needs_a_finish_reason() -> None:
    last = {"choices": [{"index": 0, "text": " b", "finish_reason": "length"}]}
    assert read(event(**text(" a")), event(**last)).error is None
    assert read(event(**text(" a")), event(**END)).error is None
    assert read(event(**text(" a"))).error == "the stream ended without [DONE] or a finish reason"


def test_an_answer_that_the_server_gave_up_is_an_error() -> None:
    last = {"choices": [{"index": 0, "text": " b", "finish_reason": "abort"}]}
    for stream in (event(**text(" a")) + event(**last) + DONE, event(**last) + DONE):
        assert read(stream).error == "the server gave the answer up (finish reason abort)"


def test_the_last_line_needs_no_line_end() -> None:
    answer = read(event(**text(" a")), b"data: [DONE]")
    assert answer.is_done
    assert answer.error is None


def test_a_line_that_is_not_json_is_an_error() -> None:
    answer = read(b"data: <html>\n\n")
    assert answer.error is not None and "<html>" in answer.error


def test_an_answer_that_is_not_streamed_is_one_chunk() -> None:
    body = {"choices": [{"message": {"content": "Hi there"}, "finish_reason": "stop"}], "usage": USAGE}
    answer = read(json.dumps(body).encode(), content_type=b"application/json; charset=utf-8")
    assert answer.error is None
    assert answer.chunk_at == [2.0]
    assert answer.num_output_tokens == 5


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"no such\\nmodel","type":"x"}}', "HTTP 404: no such model"),
        (b'{"error":"plain"}', "HTTP 404: plain"),
        (b'{"object":"error","message":"old"}', "HTTP 404: old"),
        (b'{"detail":"Not Found"}', "HTTP 404: Not Found"),
        (b"<html>\n nginx </html>", "HTTP 404: <html> nginx </html>"),
        (b"", "HTTP 404: no message"),
        (b"\xff\xfe", "HTTP 404: \ufffd\ufffd"),
    ],
)
def test_an_error_body_becomes_one_line(body: bytes, message: str) -> None:
    assert read(body, status=404, content_type=b"application/json").error == message


def test_a_long_error_is_shortened() -> None:
    error = read(b"x" * 100_000, b"y" * 100_000, status=500).error
    assert error is not None
    assert len(error) <= MAX_ERROR_LEN + len("HTTP 500: ")


def test_chunks_in_one_piece_share_its_time() -> None:
    assert read(COMPLETION).chunk_at == [1.0] * 5
