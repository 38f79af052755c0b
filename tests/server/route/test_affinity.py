"""Hashes of a prompt's chunks."""

from __future__ import annotations

import json
from typing import Any

from headrace.server.route.affinity import CHUNK_BYTES, MAX_CHUNKS, read_prompt


def hashes(*turns: str, owner: bytes = b"", **more: Any) -> list[int]:
    messages = [{"role": "user", "content": turn} for turn in turns]
    return read_prompt(json.dumps({"model": "m", "messages": messages, **more}).encode(), owner=owner).hashes


def common(one: list[int], two: list[int]) -> int:
    return next((place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def test_a_conversation_that_goes_on_has_the_hashes_of_its_start() -> None:
    before, after = hashes("a" * 2_000), hashes("a" * 2_000, "b" * 2_000)
    assert len(before) >= 7 and after[: len(before)] == before
    assert common(after, hashes("a" * 2_000, "c" * 2_000)) in (len(before), len(before) + 1)


def test_fields_that_do_not_change_the_prompt_do_not_change_the_hashes() -> None:
    assert hashes("a" * 2_000) == hashes("a" * 2_000, temperature=0.5, stream=True, max_tokens=7)


def test_model_key_salt_and_tools_change_all_hashes() -> None:
    plain = hashes("a" * 2_000)
    others = [
        hashes("a" * 2_000, model="n"),
        hashes("a" * 2_000, owner=b"key"),
        hashes("a" * 2_000, cache_salt="s"),
        hashes("a" * 2_000, tools=[{"type": "function"}]),
    ]
    assert [common(plain, other) for other in others] == [0] * 4


def test_completions_and_responses_have_prefixes_too() -> None:
    for name in ("prompt", "input"):
        assert len(read_prompt(json.dumps({name: "x" * 1_000}).encode()).hashes) == 1_002 // CHUNK_BYTES
    assert len(read_prompt(json.dumps({"prompt": list(range(1_000))}).encode()).hashes) > 10


def test_what_is_not_a_prompt_has_no_hashes() -> None:
    assert [read_prompt(body).hashes for body in (b"", b"{", b"[]", b"\xff", b"{}", b'{"prompt":"short"}')] == [[]] * 6


def test_a_long_prompt_is_hashed_in_part() -> None:
    assert len(read_prompt(json.dumps({"prompt": "x" * 1_000_000}).encode()).hashes) == MAX_CHUNKS


def test_a_stream_is_recognized() -> None:
    bodies = (b'{"stream":true}', b'{"stream": true , "prompt":"x"}', b'{"stream":false}', b'{"stream":"true"}', b"{}")
    assert [read_prompt(body).is_stream for body in bodies] == [True, True, False, False, False]
