"""A misspelt or unknown argument is refused in every call, with a suggestion."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from headrace import LLM, AsyncEngine, EngineConfig, SamplingParams
from headrace.arguments import checks_arguments
from headrace.config import EngineOptions
from headrace.errors import ConfigError, RequestError

CALLS: list[tuple[Callable[[LLM], Any], str]] = [
    (lambda llm: llm.generate("a", sampling_parms=None), r"generate\(\) .*'sampling_parms', .* 'sampling_params'"),
    (lambda llm: llm.generate("a", use_tqmd=False), r"'use_tqmd', did you mean 'use_tqdm'"),
    (lambda llm: llm.generate("a", lora_request=None), r"'lora_request'; it takes prompts, sampling_params, use_tqdm"),
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
    with pytest.raises(ConfigError, match="no argument 'worker_cls'; it takes model, tokenizer, revision"):
        EngineConfig(worker_cls="x")  # type: ignore[call-arg]
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
