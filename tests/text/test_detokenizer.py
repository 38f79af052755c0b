"""Incremental text against decoding everything at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text import Detokenizer, Tokenizer, whole_text

FIRST_BYTE = {"bytes": 0, "nested bytes": 0, "llama": 3, "gemma": 3, "three spaces": 3}


def stream(tokenizer: Tokenizer, pushes: list[list[int]], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, (), skip_special_tokens)
    return [*(detokenizer.push(ids) for ids in pushes), detokenizer.flush()]


def some_ids(tokenizer: Tokenizer, first_byte: int) -> st.SearchStrategy[list[int]]:
    """Any tokens, a few unknown ones, and runs of the bytes of real text, split anywhere."""
    real = st.text(min_size=1, max_size=3).map(lambda text: [first_byte + byte for byte in text.encode()])
    single = st.integers(0, tokenizer.vocab_size + 3).map(lambda token_id: [token_id])
    return st.lists(real | single, max_size=12).map(lambda runs: [token_id for run in runs for token_id in run])


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("kind", ["bytes", "llama", "gemma", "three spaces"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pushes_and_flush_together_are_what_decode_gives(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, skip_special_tokens: bool, data: st.DataObject
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = data.draw(some_ids(tokenizer, FIRST_BYTE[kind]))
    splits = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    pushes = [ids[start:end] for start, end in zip([0, *splits], [*splits, len(ids)], strict=True)]
    pieces = stream(tokenizer, pushes, skip_special_tokens=skip_special_tokens)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("kind", ["bytes", "llama", "gemma", "three spaces"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_an_answer_read_at_once_is_what_its_pushes_give(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, skip_special_tokens: bool, data: st.DataObject
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    prompt, ids = (data.draw(some_ids(tokenizer, FIRST_BYTE[kind])) for _ in range(2))
    detokenizer = Detokenizer(tokenizer, prompt[-8:], skip_special_tokens)
    pushed = "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.flush()
    assert whole_text(tokenizer, np.array(prompt, np.int32), ids, skip_special_tokens) == pushed


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(259, 268), max_size=30))
def test_a_decoder_of_another_kind_streams_the_same_text_too(
    tokenizers_by_kind: dict[str, Tokenizer], ids: list[int]
) -> None:
    tokenizer = tokenizers_by_kind["window"]
    assert tokenizer.pieces(True) is None
    assert "".join(stream(tokenizer, [[token_id] for token_id in ids])) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["bytes", "llama", "gemma", "nested bytes"])
@settings(max_examples=80, deadline=None)
@given(text=st.text(max_size=20))
def test_no_piece_holds_half_a_character(tokenizers_by_kind: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers_by_kind[kind]
    pieces = stream(tokenizer, [[FIRST_BYTE[kind] + byte] for byte in text.encode()])
    assert "".join(pieces).lstrip(" ") == text.lstrip(" ")
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces if "\N{REPLACEMENT CHARACTER}" not in text)


def test_a_byte_level_character_appears_with_its_last_byte(byte_tokenizer: Tokenizer) -> None:
    assert stream(byte_tokenizer, [[byte] for byte in "é🙂".encode()]) == ["", "é", "", "", "", "🙂", ""]


def test_a_character_that_never_ends_is_replaced_at_the_flush(byte_tokenizer: Tokenizer) -> None:
    assert stream(byte_tokenizer, [[0x61, 0xF0, 0x9F]]) == ["a", "\N{REPLACEMENT CHARACTER}"]


def test_byte_tokens_wait_for_the_token_after_them(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    llama = tokenizers_by_kind["llama"]
    letter = llama.encode("a", False)
    euro = [3 + byte for byte in "€".encode()]
    assert stream(llama, [euro[:2], euro[2:], letter]) == ["", "", "€a", ""]


def test_special_tokens_are_skipped_or_shown_as_asked(byte_tokenizer: Tokenizer) -> None:
    ids = [[0x61], [256], [0x62]]
    assert stream(byte_tokenizer, ids) == ["a", "", "b", ""]
    assert stream(byte_tokenizer, ids, skip_special_tokens=False) == ["a", "</s>", "b", ""]


def test_a_skipped_token_does_not_separate_the_bytes_of_a_character(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    for kind, first_byte, special in (("bytes", 0, 256), ("llama", 3, 2)):
        high, low = (first_byte + byte for byte in "é".encode())
        assert "".join(stream(tokenizers_by_kind[kind], [[high], [special], [low]])) == "é"


def test_the_first_space_goes_without_a_prompt_and_stays_after_one(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    llama = tokenizers_by_kind["llama"]
    the, letter = 261, 262
    assert (llama.token(the), llama.token(letter)) == ("▁the", "a")
    assert Detokenizer(llama).push([the]) == "the"
    assert Detokenizer(llama, [letter]).push([the]) == " the"
    assert Detokenizer(llama, [1]).push([the]) == "the"  # a skipped <s> is not text
    assert Detokenizer(llama, [1], skip_special_tokens=False).push([the]) == " the"


def test_leading_spaces_are_counted_over_pushes(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer, space, two_spaces = tokenizers_by_kind["three spaces"], 259, 260
    assert tokenizer.decode([space, two_spaces, space]) == "▁"
    assert stream(tokenizer, [[space], [two_spaces], [space]]) == ["", "", "▁", ""]


def test_the_answer_completes_a_character_that_the_prompt_started(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    for kind, first_byte in FIRST_BYTE.items():
        *tail, last = (first_byte + byte for byte in "aé€".encode())
        detokenizer = Detokenizer(tokenizers_by_kind[kind], tail)
        assert detokenizer.push([last]) + detokenizer.flush() == "€", kind


def test_characters_that_the_prompt_completed_are_not_repeated(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    llama = tokenizers_by_kind["llama"]
    detokenizer = Detokenizer(llama, [3 + byte for byte in "€".encode()])
    assert detokenizer.push([262]) + detokenizer.flush() == "a"


def test_an_array_of_ids_works_like_a_list(byte_tokenizer: Tokenizer) -> None:
    ids = np.frombuffer(b"abc", dtype=np.uint8).astype(np.int32)
    assert Detokenizer(byte_tokenizer).push(ids) == "abc"
    assert byte_tokenizer.decode(ids) == "abc"
