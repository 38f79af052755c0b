"""Compiling grammars: what is refused, what hostile ones cost, what is cached."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from headrace.engine.grammars import Grammar, Grammars
from headrace.errors import RequestError
from headrace.text import Tokenizer
from headrace.types import StructuredOutputs
from tests.text.builders import byte_tokenizer, gemma_decoder, sentencepiece_tokenizer

WORDS = ["hello", "he", '{"', '":', "123", "true", "}]", " the", "日本"]


def make_grammars(tokenizer: Tokenizer | None = None, **options: Any) -> Grammars:
    tokenizer = tokenizer or byte_tokenizer(WORDS)
    return Grammars(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=(256,), **options)


def allowed(grammars: Grammars, grammar: Grammar, text: str = "") -> set[int]:
    """The tokens that may follow a text, read byte by byte; the end is one past the vocabulary."""
    matcher = grammar.matcher()
    assert matcher.consume_tokens(list(text.encode()))
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_a_mask_has_every_token_that_can_follow_and_no_other() -> None:
    grammars = make_grammars()
    grammar = grammars.compile(StructuredOutputs(regex="(hello|help)!"))
    h, e, he, hello = ord("h"), ord("e"), 258 + WORDS.index("he"), 258 + WORDS.index("hello")
    assert allowed(grammars, grammar) == {h, he, hello}
    assert allowed(grammars, grammar, "h") == {e}
    assert allowed(grammars, grammar, "hel") == {ord("l"), ord("p")}
    assert allowed(grammars, grammar, "help!") == {grammars.end_id}


def test_part_of_a_character_may_come_first() -> None:
    grammars = make_grammars()
    grammar = grammars.compile(StructuredOutputs(choice=["日本", "x"]))
    assert allowed(grammars, grammar) == {"日".encode()[0], 258 + WORDS.index("日本"), ord("x")}


def test_where_there_is_no_choice_the_text_is_split_as_the_tokenizer_does() -> None:
    grammars = make_grammars()
    assert allowed(grammars, grammars.compile(StructuredOutputs(choice=["hello"]))) == {ord("h")}


def test_a_tokenizer_that_changes_a_text_is_not_followed() -> None:
    tokenizer = sentencepiece_tokenizer(gemma_decoder())  # without its normalizer: spaces are unknown to it
    grammars = Grammars(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=(2,))
    grammar = grammars.compile(StructuredOutputs(choice=["  the"]))
    matcher, text = grammar.matcher(), b""
    while not matcher.is_stopped():
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        token_id = int(np.flatnonzero(bits)[0])
        text += tokenizer.token_bytes(token_id)
        assert matcher.consume_token(token_id)
    assert text == b"  the"


def test_special_tokens_are_no_text() -> None:
    grammars = make_grammars()
    open_ended = grammars.compile(StructuredOutputs(regex="(?s:.*)"))
    found = allowed(grammars, open_ended)
    assert not found & {256, 257}
    assert found >= {ord("<"), grammars.end_id}
    spelled = grammars.compile(StructuredOutputs(choice=["<s<</s><s>"]))
    for i in range(len("<s<</s><s>")):
        assert allowed(grammars, spelled, "<s<</s><s>"[:i]) == {ord("<s<</s><s>"[i])}


def test_ids_that_the_tokenizer_does_not_know_are_never_allowed() -> None:
    tokenizer = byte_tokenizer()
    grammars = Grammars(tokenizer, vocab_size=tokenizer.vocab_size + 40)
    found = allowed(grammars, grammars.compile(StructuredOutputs(regex="(?s:.*)")))
    assert max(found - {grammars.end_id}) < tokenizer.vocab_size


def test_pieces_of_sentencepiece_are_matched_as_the_text_that_they_make() -> None:
    tokenizer = sentencepiece_tokenizer(gemma_decoder())
    grammars = Grammars(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=(2,))
    grammar = grammars.compile(StructuredOutputs(choice=[" the", "é"]))
    bits = np.unpackbits(np.frombuffer(grammar.matcher().compute_bitmask(), np.uint8), bitorder="little")
    tokens = {tokenizer.token(token_id) for token_id in np.flatnonzero(bits).tolist()}
    assert tokens == {"▁", "▁the", "<0x20>", "é", "<0xC3>"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"json": {"type": "strin"}}, "strin"),
        ({"json": {"type": "object", "properties": {"a": {"not": {}}}}}, "not"),
        ({"json": {"$ref": "#/$defs/missing"}}, "missing"),
        ({"json": {"$ref": "https://example.com/schema.json"}}, "example.com"),
        ({"json": {"type": "string", "pattern": "a(b"}}, "regex"),
        ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "."),
        ({"json": {"enum": []}}, "."),
        ({"json": {"$ref": "#"}}, "nothing matches"),
        ({"json": {"oneOf": [{"type": "string"}, {"type": "string"}]}}, "more than one.* use anyOf"),
        ({"regex": "a(b"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreference"),
        ({"grammar": "start: foo"}, "foo"),
        ({"grammar": "start: start"}, "nothing matches"),
        ({"grammar": "no grammar"}, "."),
        ({"grammar": "root ::= (("}, "."),
        ({"grammar": "root ::= " + "(" * 5_000}, "."),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(given: dict[str, Any], message: str) -> None:
    grammars = make_grammars()
    for _ in range(2):  # the second time from the cache
        with pytest.raises(RequestError, match=message) as refused:
            grammars.compile(StructuredOutputs(**given, asked_as="response_format"))
        assert refused.value.param == "response_format"
        assert len(str(refused.value)) < 600


def test_an_object_has_no_keys_that_its_schema_does_not_list() -> None:
    grammars = make_grammars()
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    closed = grammars.compile(StructuredOutputs(json=schema))
    assert ord(",") not in allowed(grammars, closed, '{"a":null')
    opened = grammars.compile(StructuredOutputs(json={**schema, "additionalProperties": True}))
    assert ord(",") in allowed(grammars, opened, '{"a":null')


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema, "minItems": 1}
    return schema


HOSTILE: dict[str, dict[str, Any]] = {
    "repetitions of repetitions": {"regex": r"((a{1,1000}){1,1000}){1,500}"},
    "many ways": {"regex": r"(.*)(.*)(.*)(.*)(.*)[^a]{500}x"},
    "what lies far ahead": {"regex": r"(?s:.*)a(?s:.{20})"},
    "optional before required": {"regex": r"(?:a?){200}a{200}"},
    "brackets": {"regex": "(" * 5_000 + "a" + ")" * 5_000},
    "thousands of words": {"regex": "|".join(f"word{i}" for i in range(10_000))},
    "a grammar of everything": {"grammar": 'start: s\ns: s s s | s s | "a" | ""'},
    "repetitions of rules": {"grammar": 'start: x{1,100000}\nx: y{1,100000}\ny: "a"'},
    "what both and neither match": {"grammar": "start: T\nT: /(.*[ab]){12}/ & ~/(.*[bc].{13})/ & ~/(.*c){15}d/"},
    "brackets of rules": {"grammar": "start: " + "(" * 5_000 + '"a"' + ")" * 5_000},
    "depth": {"json": nested(100)},
    "length": {"json": {"type": "string", "minLength": 10**7, "maxLength": 10**9}},
    "items": {"json": {"type": "array", "items": {}, "minItems": 10**6}},
    "alternatives": {
        "json": {"anyOf": [{"type": "object", "properties": {f"{i}.{j}": {} for j in range(20)}} for i in range(100)]}
    },
    "products of alternatives": {
        "json": {"allOf": [{"anyOf": [{"pattern": f"a{i}"}, {"pattern": f".*b{i}.*"}]} for i in range(16)]}
    },
    "required names": {"json": {"type": "object", "required": [f"name {i}" for i in range(2_000)]}},
    "itself": {"json": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_or_fails_or_runs_within_its_limits(name: str) -> None:
    """Limits are counted in work, not in time: without them some of these take minutes, or all of the memory."""
    grammars = make_grammars()
    try:
        grammar = grammars.compile(StructuredOutputs(**HOSTILE[name]))
    except RequestError:
        return
    matcher, rng = grammar.matcher(), np.random.default_rng(1)
    for _ in range(40):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        tokens = np.flatnonzero(bits[: grammars.vocab_size])
        if matcher.is_error() or not len(tokens):
            break
        matcher.consume_token(int(rng.choice(tokens)))
    assert matcher.is_error() or matcher.is_stopped() or matcher.stop_reason() == "NotStopped"


def test_only_the_last_used_are_kept() -> None:
    grammars = make_grammars(max_kept=3)
    kept = [grammars.compile(StructuredOutputs(regex=f"a{i}")) for i in range(3)]
    assert grammars.compile(StructuredOutputs(regex="a0")) is kept[0]
    for i in range(100, 102):
        grammars.compile(StructuredOutputs(regex=f"a{i}"))
    assert grammars.num_kept == 3
    assert grammars.compile(StructuredOutputs(regex="a0")) is kept[0]
    assert grammars.compile(StructuredOutputs(regex="a1")) is not kept[1]


def test_long_sources_push_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.grammars.MAX_KEPT_LEN", 1_000)
    grammars = make_grammars()
    for i in range(10):
        grammars.compile(StructuredOutputs(regex="b" * 400 + str(i)))
    assert grammars.num_kept == 2
    assert grammars.kept_len == 2 * 401


def test_a_schema_and_a_choice_of_the_same_text_are_two_grammars() -> None:
    grammars = make_grammars()
    text = '{"type":"null"}'
    schema, regex = grammars.compile(StructuredOutputs(json=text)), StructuredOutputs(regex=r'\{"type":"null"\}')
    assert allowed(grammars, schema) != allowed(grammars, grammars.compile(regex))
    assert StructuredOutputs(json=text).source == StructuredOutputs(regex=text).source
    with pytest.raises(RequestError):
        grammars.compile(StructuredOutputs(regex=text))  # not taken for the schema


def test_many_threads_compile_at_once() -> None:
    grammars, found, failures = make_grammars(), [], []

    def compile_some(first: int) -> None:
        try:
            found.extend(grammars.compile(StructuredOutputs(regex=f"x{{{1 + (first + i) % 7}}}")) for i in range(20))
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=compile_some, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(set(map(id, found))) <= 14  # two threads may compile the same one at the same time; the last is kept


def test_without_a_tokenizer_it_is_refused() -> None:
    with pytest.raises(RequestError, match="tokenizer"):
        Grammars(None, vocab_size=100).compile(StructuredOutputs(regex="a"))


@pytest.mark.processes
def test_engines_that_need_no_grammar_do_not_load_llguidance() -> None:
    code = "import sys, headrace.engine.core, headrace.engine.llm; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
