"""The completions endpoint: prompts in all forms, echo, log-probabilities, stops."""

from __future__ import annotations

import math
import re
from typing import Any

import openai
import pytest

from tests.server.serving import MODEL, Server

PATH = "/v1/completions"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


def ids(text: str, server: Server) -> list[int]:
    tokens: list[int] = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    return tokens


def text(server: Server, prompt: Any, **more: Any) -> str:
    answer: str = server.post(PATH, {"prompt": prompt, **GREEDY, **more}).json()["choices"][0]["text"]
    return answer


def test_text_and_its_token_ids_are_the_same_prompt(server: Server) -> None:
    assert text(server, "once") == text(server, ids("once", server)) != ""


def test_lists_of_prompts_are_answered_in_order(server: Server, client: openai.OpenAI) -> None:
    prompts = ["one", "two", "three"]
    made = client.completions.create(
        model=MODEL, prompt=prompts, temperature=0, max_tokens=6, extra_body={"ignore_eos": True}
    )
    assert [choice.text for choice in made.choices] == [text(server, prompt) for prompt in prompts]
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    tokens = server.post(PATH, {"prompt": [ids(prompt, server) for prompt in prompts], **GREEDY}).json()
    assert [choice["text"] for choice in tokens["choices"]] == [choice.text for choice in made.choices]
    assert made.usage is not None and made.usage.prompt_tokens == 11 and made.usage.completion_tokens == 18


def test_each_chunk_of_several_prompts_and_answers_has_its_index(server: Server) -> None:
    body = {"prompt": ["one", "two"], "n": 2, "seed": 3, "max_tokens": 5, "ignore_eos": True}
    whole = server.post(PATH, body).json()["choices"]
    texts = dict.fromkeys(range(4), "")
    for chunk in server.chunks(PATH, body):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {choice["index"]: choice["text"] for choice in whole}


def test_the_default_length_is_sixteen_tokens(server: Server) -> None:
    answer = server.post(PATH, {"prompt": "once", "temperature": 0, "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_the_default_length_is_shortened_to_the_context(server: Server) -> None:
    answer = server.post(PATH, {"prompt": [5] * 508, "temperature": 0, "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 4


def test_echo_puts_the_prompt_before_the_answer(server: Server) -> None:
    assert text(server, "once", echo=True) == "once" + text(server, "once")
    assert text(server, ids("once", server), echo=True) == "once" + text(server, "once")
    chunks = server.chunks(PATH, {"prompt": "once", "echo": True, **GREEDY})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "once" + text(server, "once")


def test_lm_eval_finds_the_logprobs_of_a_continuation(server: Server) -> None:
    """It sends token ids with echo, and reads the log-probabilities between the context and the sampled token."""
    context, continuation = ids("the cat", server), ids(" sat", server)
    body = {"prompt": [context + continuation], "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}
    (choice,) = server.post(PATH, {"model": MODEL, "temperature": 0, **body}).json()["choices"]
    logprobs = choice["logprobs"]
    scored = logprobs["token_logprobs"][len(context) : -1]
    likely = logprobs["top_logprobs"][len(context) : -1]
    assert len(scored) == len(continuation) and all(value < 0 for value in scored)
    assert all(max(top.values()) >= value for top, value in zip(likely, scored, strict=True))
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["tokens"][: len(context) + len(continuation)] == list("the cat sat")
    assert logprobs["text_offset"][:3] == [0, 1, 2]


@pytest.mark.parametrize("prompt", ["né日<eos>x", "plain"])
@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_are_places_in_the_text(server: Server, prompt: str, as_ids: bool) -> None:
    """A character of several tokens has one place; a special token is spelled in the echoed prompt."""
    given = ids(prompt, server) if as_ids else prompt
    asked = {"prompt": given, "logprobs": 0, "echo": True, "temperature": 0, "max_tokens": 1}
    asked |= {"allowed_token_ids": ids("a", server)}
    (choice,) = server.post(PATH, asked).json()["choices"]
    assert choice["text"] == prompt + "a"
    expected, place = [], 0
    for part in re.findall("<eos>|.", prompt + "a"):
        expected += [place] * (1 if part == "<eos>" else len(part.encode()))
        place += len(part)
    assert choice["logprobs"]["text_offset"] == expected
    chunks = server.chunks(PATH, asked)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    lists = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [place for each in lists for place in each["text_offset"]] == expected


def test_a_prompt_that_ends_within_a_character_is_echoed_up_to_it(server: Server) -> None:
    tokens = ids("né", server)
    asked = {"prompt": tokens[:-1], "echo": True, "allowed_token_ids": tokens[-1:], "max_tokens": 1}
    assert server.post(PATH, asked).json()["choices"][0]["text"] == "né"


def test_scoring_without_sampling_agrees_with_echo(server: Server) -> None:
    asked = {"prompt": "the cat sat", "logprobs": 2, "echo": True, "temperature": 0}
    scored = server.post(PATH, {**asked, "max_tokens": 0}).json()
    (choice,) = scored["choices"]
    assert choice["text"] == "the cat sat" and choice["finish_reason"] == "length"
    assert scored["usage"]["completion_tokens"] == 0
    (beside,) = server.post(PATH, {**asked, "max_tokens": 1}).json()["choices"]
    alone = choice["logprobs"]["token_logprobs"][1:]
    assert len(alone) == 10
    for one, other in zip(alone, beside["logprobs"]["token_logprobs"][1:-1], strict=True):
        assert math.isclose(one, other, rel_tol=1e-4)
    (chunk,) = server.chunks(PATH, {**asked, "max_tokens": 0})
    assert chunk["choices"][0]["text"] == "the cat sat"
    assert chunk["choices"][0]["logprobs"]["tokens"] == choice["logprobs"]["tokens"]


def test_a_greedy_token_is_the_most_likely_of_its_list(server: Server) -> None:
    (choice,) = server.post(PATH, {"prompt": "once", "logprobs": 3, **GREEDY}).json()["choices"]
    logprobs = choice["logprobs"]
    for value, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert value == max(top.values()) and 1 <= len(top) <= 3
    assert len(logprobs["tokens"]) == 6


def test_streamed_logprobs_are_those_of_the_whole_answer(server: Server) -> None:
    body = {"prompt": "once", "logprobs": 2, "echo": True, **GREEDY}
    (choice,) = server.post(PATH, body).json()["choices"]
    joined: dict[str, list[Any]] = {name: [] for name in choice["logprobs"]}
    for chunk in server.chunks(PATH, body):
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            joined[name] += values
    assert joined == choice["logprobs"]


def test_prompt_logprobs_are_by_token_id_with_rank_and_text(server: Server) -> None:
    tokens = ids("cat", server)
    (choice,) = server.post(PATH, {"prompt": tokens, "prompt_logprobs": 1, **GREEDY}).json()["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None and len(others) == 2
    for token, entry in zip(tokens[1:], others, strict=True):
        assert entry[str(token)]["decoded_token"] == chr(entry[str(token)]["decoded_token"].encode()[0])
        assert min(one["rank"] for one in entry.values()) == 1


def test_a_stop_string_ends_the_answer_and_is_the_stop_reason(server: Server) -> None:
    whole = text(server, "once", max_tokens=40)
    stop = whole[5:7]
    body = {"prompt": "once", **GREEDY, "max_tokens": 40, "stop": [stop]}
    (choice,) = server.post(PATH, body).json()["choices"]
    assert choice["text"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    (kept,) = server.post(PATH, body | {"include_stop_str_in_output": True}).json()["choices"]
    assert kept["text"] == choice["text"] + stop
    chunks = server.chunks(PATH, body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    assert chunks[-1]["choices"][0]["stop_reason"] == stop


def test_a_stop_token_ends_the_answer_and_is_the_stop_reason(server: Server) -> None:
    made = server.post(PATH, {"prompt": "once", "return_token_ids": True, **GREEDY}).json()["choices"][0]
    token = made["token_ids"][3]
    body = {"prompt": "once", "stop_token_ids": [token], "return_token_ids": True, **GREEDY}
    choice = server.post(PATH, body).json()["choices"][0]
    end = made["token_ids"].index(token)
    assert choice["token_ids"] == made["token_ids"][: end + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)


def test_best_of_gives_the_best_and_is_never_streamed(server: Server) -> None:
    body = {"prompt": "once", "n": 1, "best_of": 4, "seed": 1, "max_tokens": 4, "ignore_eos": True, "logprobs": 0}
    best = server.post(PATH, body).json()["choices"]
    every = server.post(PATH, body | {"n": 4, "best_of": None}).json()["choices"]
    means = [sum(choice["logprobs"]["token_logprobs"]) / 4 for choice in every]
    assert len(best) == 1 and best[0]["text"] == every[means.index(max(means))]["text"]
    assert server.error(PATH, body | {"stream": True})["param"] == "best_of"


@pytest.mark.parametrize(("asked", "count"), [(3, 3), (100, 9), (-1, 9)])
def test_prompts_can_be_truncated_to_their_last_tokens(server: Server, asked: int, count: int) -> None:
    body = {"prompt": "123456789", "truncate_prompt_tokens": asked, "echo": True, **GREEDY}
    answer = server.post(PATH, body).json()
    assert answer["usage"]["prompt_tokens"] == count
    assert answer["choices"][0]["text"].startswith("123456789"[-count:])


def test_allowed_tokens_bad_words_and_biases_reach_the_sampler(server: Server) -> None:
    (a,), (b,) = ids("a", server), ids("b", server)
    assert set(text(server, "once", allowed_token_ids=[a, b])) <= {"a", "b"}
    assert text(server, "once", logit_bias={str(a): 100}) == "aaaaaa"
    assert "a" not in text(server, "once", allowed_token_ids=[a, b], bad_words=["a"])


def test_beams_are_the_best_continuations(server: Server) -> None:
    body = {"prompt": "once", "use_beam_search": True, "n": 3, "max_tokens": 4, "logprobs": 1, "ignore_eos": True}
    choices = server.post(PATH, body).json()["choices"]
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in choices]
    greedy = server.post(PATH, {"prompt": "once", **GREEDY, "max_tokens": 4, "logprobs": 0}).json()["choices"][0]
    assert len(choices) == 3 and sums == sorted(sums, reverse=True)
    assert sums[0] >= sum(greedy["logprobs"]["token_logprobs"]) - 1e-4


def test_cached_prefix_tokens_are_counted_in_the_usage(server: Server) -> None:
    body = {"prompt": [7] * 64, "cache_salt": "mine", **GREEDY}
    counts = [server.post(PATH, body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert counts[0] == 0 and counts[1] >= 48
    other = server.post(PATH, body | {"cache_salt": "another"}).json()
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
