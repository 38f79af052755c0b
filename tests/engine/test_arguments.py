"""A misspelt or unknown argument is refused in every call, with a suggestion."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from headrace import LLM, AsyncEngine, EngineConfig, SamplingParams
from headrace.arguments import checks_arguments
from headrace.config import EngineOptions
from headrace.engine.beam_search import BeamSearchParams
from headrace.errors import ConfigError, RequestError

CALLS: list[tuple[Callable[[LLM], Any], str]] = [
    (lambda llm: llm.generate("a", sampling_parms=None), r"generate\(\) .*'sampling_parms', .* 'sampling_params'"),
    (lambda llm: llm.generate("a", use_tqmd=False), r"'use_tqmd', did you mean 'use_tqdm'"),
    (
        lambda llm: llm.generate("a", data_parallel=None),
        r"'data_parallel'; it takes prompts, sampling_params, use_tqdm",
    ),
    (lambda llm: llm.chat([], add_generation_promt=True), r"chat\(\) .* did you mean 'add_generation_prompt'"),
    (lambda llm: llm.embed("a", poolin="last"), r"embed\(\) .* did you mean 'pooling'"),
    (lambda llm: llm.score("a", continuation="b"), r"score\(\) .* did you mean 'continuations'"),
    (lambda llm: llm.beam_search("a", parms=None), r"beam_search\(\) .* did you mean 'params'"),
    (lambda llm: llm.chat([], chat_template_kwargs={"tools": []}), r"'tools' is an argument of its own"),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_llm_suggests_the_right_argument(llm: LLM, call: Callable[[LLM], Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        call(llm)


PROMPTS = "prompts must be text, token ids, a prompt dictionary or a list of these, got "
MISUSE: list[tuple[Callable[[Any], Any], str]] = [
    (lambda llm: llm.generate(None), PROMPTS + "None"),
    (lambda llm: llm.generate(5), PROMPTS + "5"),
    (lambda llm: llm.generate(b"abc"), PROMPTS + "b'abc'"),
    (lambda llm: llm.generate({"a"}), PROMPTS + "{'a'}"),
    (lambda llm: llm.embed(None), PROMPTS + "None"),
    (lambda llm: llm.score("a", None), PROMPTS + "None"),
    (lambda llm: llm.generate([b"abc"]), "a prompt must be text or a list of token ids"),
    (lambda llm: llm.generate(["a", None]), "a prompt must be text or a list of token ids"),
    (lambda llm: llm.generate([True, False]), "a prompt must be text or a list of token ids"),
    (lambda llm: llm.chat(None), "messages must be a list of messages, or a list of such lists, got None"),
    (lambda llm: llm.chat("hello"), "messages must be a list of messages, or a list of such lists, got 'hello'"),
    (lambda llm: llm.generate("a", priority=["x"]), "priority must be an integer, got 'x'"),
    (lambda llm: llm.embed("a", priority=[1.5]), "priority must be an integer, got 1.5"),
    (lambda llm: llm.generate("a", {"top_k": 1}), "sampling_params must be SamplingParams, got {'top_k': 1}"),
    (lambda llm: llm.generate(["a", "b"], "xy"), "sampling_params must be SamplingParams, got 'x'"),
    (lambda llm: llm.beam_search("a", None), "params must be BeamSearchParams, got None"),
]


@pytest.mark.parametrize(("call", "message"), MISUSE)
def test_misuse_of_llm_is_refused_with_one_message(llm: LLM, call: Callable[[LLM], Any], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        call(llm)
    assert len(llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 5_000_000}, "n must be between 1 and 16384, got 5000000"),
        ({"best_of": 5_000_000}, "best_of must be between 1 and 16384, got 5000000"),
        ({"ignore_eos": "yes"}, "ignore_eos must be True or False, got 'yes'"),
        ({"detokenize": 0}, "detokenize must be True or False, got 0"),
        ({"skip_special_tokens": None}, "skip_special_tokens must be True or False, got None"),
        ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output must be True or False, got 'no'"),
        ({"stop": 5}, "stop must be non-empty text or a list of it, got 5"),
        ({"stop": [""]}, "stop must be non-empty text or a list of it, got ['']"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids, got 5"),
        ({"stop_token_ids": "ab"}, "stop_token_ids must be a list of token ids, got 'ab'"),
    ],
)
def test_misuse_of_sampling_params_is_refused_with_one_message(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": 5}, "model must be text or a path, got 5"),
        ({"tokenizer": 5}, "tokenizer must be text or a path, got 5"),
        ({"revision": 5}, "revision must be text, got 5"),
        ({"seed": -1}, "seed must be an integer between 0 and 18446744073709551615, got -1"),
        ({"seed": "x"}, "seed must be an integer"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be True or False, got 'no'"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization must be above 0 and at most 1, got '0.9'"),
        ({"dtype": ["float32"]}, "dtype must be one of"),
    ],
)
def test_misuse_of_settings_is_refused_with_one_message(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        EngineConfig(**options)


def test_a_beam_search_with_a_flag_that_is_none_is_refused() -> None:
    with pytest.raises(RequestError, match="ignore_eos must be True or False, got 'yes'"):
        BeamSearchParams(beam_width=2, max_tokens=2, ignore_eos="yes")  # type: ignore[arg-type]


def test_misuse_of_the_async_engine_is_refused_with_one_message(tiny_directory: Path) -> None:
    async def main() -> None:
        engine = await AsyncEngine.start(str(tiny_directory), max_num_seqs=2)
        calls: list[tuple[Callable[[Any], Any], str]] = [
            (lambda engine: engine.generate(b"abc"), "a prompt must be text or a list of token ids"),
            (lambda engine: engine.generate(None), "a prompt must be text or a list of token ids"),
            (lambda engine: engine.generate("a", {"n": 2}), "sampling_params must be SamplingParams"),
            (lambda engine: engine.generate("a", priority="x"), "priority must be an integer, got 'x'"),
            (lambda engine: engine.generate("a", cache_salt=5), "cache_salt must be text, got 5"),
            (lambda engine: engine.chat("hello"), "messages must be a list of messages, got 'hello'"),
        ]
        try:
            for call, message in calls:
                with pytest.raises(RequestError, match=message):
                    await anext(call(engine))
        finally:
            await engine.close()

    asyncio.run(main())


def test_the_async_engine_suggests_the_right_argument(tiny_directory: Path) -> None:
    async def main() -> None:
        engine = await AsyncEngine.start(str(tiny_directory), max_num_seqs=2)
        try:
            with pytest.raises(RequestError, match="did you mean 'sampling_params'"):
                engine.generate("a", sampling_param=None)  # type: ignore[call-arg]
            with pytest.raises(RequestError, match="did you mean 'chat_template'"):
                engine.chat([], chat_templates="")  # type: ignore[call-arg]
            with pytest.raises(RequestError, match="did you mean 'normalize'"):
                await engine.embed("a", normalise=True)  # type: ignore[call-arg]
            with pytest.raises(RequestError, match="did you mean 'continuation'"):
                await engine.score("a", continuations="b")  # type: ignore[call-arg]
        finally:
            await engine.close()
        with pytest.raises(ConfigError, match="'block_sise', did you mean 'block_size'"):
            await AsyncEngine.start(str(tiny_directory), block_sise=16)  # type: ignore[call-arg]

    asyncio.run(main())


def test_an_argument_unlike_all_others_is_refused_with_the_list_of_arguments() -> None:
    with pytest.raises(ConfigError, match="no argument 'zebra'; it takes model, tokenizer, chat_template"):
        EngineConfig(zebra="x")  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="no argument 'guided_json'; it takes n, "):
        SamplingParams(guided_json="{}")  # type: ignore[call-arg]


def test_a_checked_function_keeps_its_name_docstring_and_signature() -> None:
    @checks_arguments(ConfigError)
    def add(first: int, *, second: int = 2) -> int:
        """Adds."""
        return first + second

    assert add(1) == 3 and add(first=1, second=1) == 2
    assert (add.__name__, add.__doc__) == ("add", "Adds.")
    assert list(inspect.signature(add).parameters) == ["first", "second"]


def test_type_checkers_know_every_setting_with_its_type() -> None:
    settings = get_type_hints(EngineConfig)
    assert settings.pop("model") is str
    assert get_type_hints(EngineOptions) == settings
