"""An engine in a process of its own gives the same answers as one on a thread; what happens when it ends."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace import AsyncEngine, SamplingParams
from headrace.errors import ConfigError, EngineDeadError, ModelError, RequestError
from headrace.types import RequestOutput
from tests.engine.process.process_tools import wait_until

pytestmark = pytest.mark.processes

OPTIONS: dict[str, Any] = {"max_num_seqs": 4, "num_gpu_blocks_override": 256, "num_threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=450, ignore_eos=True)
ASKED = {
    "greedy": GREEDY,
    "seeded": SamplingParams(seed=5, max_tokens=12, top_p=0.9, top_k=50),
    "without a seed": SamplingParams(max_tokens=6),
    "logprobs": SamplingParams(temperature=0, max_tokens=4, logprobs=3),
    "prompt_logprobs": SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2),
    "n": SamplingParams(n=3, seed=7, max_tokens=8),
    "best_of": SamplingParams(n=2, best_of=3, seed=7, max_tokens=8),
    "stop token": SamplingParams(temperature=0, max_tokens=12, stop_token_ids=list(range(15))),
    "penalties": SamplingParams(seed=1, max_tokens=8, repetition_penalty=1.3, presence_penalty=0.5, min_p=0.01),
    "bias": SamplingParams(seed=2, max_tokens=8, logit_bias={5: 4.0}, bad_words=["a"], allowed_token_ids=range(1, 200)),
}


FRONT = """
import sys
from headrace import AsyncEngine, EngineConfig
from headrace.engine.opening import open_model
from headrace.engine.start import start_engine_process, tokenizer_of

config = EngineConfig(model=sys.argv[1])
print(tokenizer_of(config, open_model(config)).encode("ab"), "torch" in sys.modules)
"""


async def _start(directory: Path) -> tuple[AsyncEngine, AsyncEngine]:
    beside = await AsyncEngine.start(str(directory), **OPTIONS)
    own = await AsyncEngine.start(str(directory), own_process=True, supervised=True, max_engine_restarts=1, **OPTIONS)
    return beside, own


@pytest.fixture(scope="module")
def engines(tiny_directory: Path) -> Iterator[tuple[AsyncEngine, AsyncEngine]]:
    """They live longer than the event loop and the thread that they were started from."""
    engines = asyncio.run(_start(tiny_directory))
    yield engines
    for engine in engines:
        asyncio.run(engine.close())


async def outputs(engine: AsyncEngine, prompt: str, params: SamplingParams) -> list[RequestOutput]:
    """All of a stream's, without its times."""
    return [dataclasses.replace(output, metrics={}) async for output in engine.generate(prompt, params)]


def of_both(engines: tuple[AsyncEngine, AsyncEngine], ask: Callable[[AsyncEngine], Awaitable[Any]]) -> tuple[Any, Any]:
    async def main(engine: AsyncEngine) -> Any:
        return await asyncio.wait_for(ask(engine), 120)

    beside, own = (asyncio.run(main(engine)) for engine in engines)
    return beside, own


@pytest.mark.parametrize("params", ASKED.values(), ids=ASKED.keys())
def test_outputs_are_the_same(engines: tuple[AsyncEngine, AsyncEngine], params: SamplingParams) -> None:
    async def last(engine: AsyncEngine) -> RequestOutput:
        return (await outputs(engine, "the same prompt for all", params))[-1]

    beside, own = of_both(engines, last)
    assert own == beside
    assert own.finished and own.outputs[0].token_ids


def test_stop_strings_end_answers_at_the_same_place(engines: tuple[AsyncEngine, AsyncEngine]) -> None:
    async def ask(engine: AsyncEngine) -> tuple[str, RequestOutput]:
        text = (await outputs(engine, "abc", GREEDY))[-1].outputs[0].text
        stop = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=[text[3:5]])
        return text, (await outputs(engine, "abc", stop))[-1]

    beside, own = of_both(engines, ask)
    assert own == beside
    assert own[1].outputs[0].text == own[0][: own[0].index(own[0][3:5])]


def test_readouts_are_the_same(engines: tuple[AsyncEngine, AsyncEngine]) -> None:
    async def ask(engine: AsyncEngine) -> list[Any]:
        embeddings = [await engine.embed("some text", pooling=pooling) for pooling in ("last", "mean")]
        score = await engine.score("some text", " and what follows")
        return [*(e.embedding.tolist() for e in embeddings), score.outputs.token_logprobs, score.outputs.token_ids]

    beside, own = of_both(engines, ask)
    assert own == beside


def test_many_streams_and_chat_are_the_same(engines: tuple[AsyncEngine, AsyncEngine]) -> None:
    async def ask(engine: AsyncEngine) -> list[str]:
        streams = [outputs(engine, f"prompt {i}", GREEDY) for i in range(9)]
        answers = [stream[-1] for stream in await asyncio.gather(*streams)]
        answers += [answer async for answer in engine.chat([{"role": "user", "content": "hi"}], GREEDY)][-1:]
        return [answer.outputs[0].text for answer in answers]

    beside, own = of_both(engines, ask)
    assert own == beside


def test_a_front_reads_models_without_torch(tiny_directory: Path) -> None:
    command = [sys.executable, "-c", FRONT, str(tiny_directory)]
    path = os.pathsep.join(filter(None, [str(Path(headrace.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": path})
    assert done.stdout.endswith("] False\n")


def test_settings_are_the_same(engines: tuple[AsyncEngine, AsyncEngine]) -> None:
    beside, own = (engine.settings for engine in engines)
    assert [choice.name for choice in own.choices] == [choice.name for choice in beside.choices]
    assert dataclasses.replace(own, choices=()) == dataclasses.replace(beside, choices=())
    assert [engine.phase for engine in engines] == ["ready", "ready"]


def test_abort_and_leaving_free_the_blocks(engines: tuple[AsyncEngine, AsyncEngine]) -> None:
    own = engines[1]

    async def ask() -> list[str | None]:
        reasons = []
        async for output in own.generate("abc", LONG, request_id="mine"):
            if not reasons:  # at the first output, of any number of tokens
                await own.abort("mine")
            reasons.append(output.outputs[0].finish_reason)
        async for _ in (stream := own.generate("abc", LONG)):
            break
        await stream.aclose()  # type: ignore[attr-defined]
        return reasons

    before = own.stats.scheduler.num_aborted
    assert asyncio.run(ask())[-1] == "abort"
    wait_until(lambda: own.stats.scheduler.num_aborted == before + 2)
    wait_until(lambda: own.stats.scheduler.num_blocks_held == 0)


def test_refusals_are_the_same(engines: tuple[AsyncEngine, AsyncEngine]) -> None:
    async def ask(engine: AsyncEngine) -> list[str]:
        refusals = []
        stops = SamplingParams(stop_token_ids=list(range(1, 17)), min_tokens=1)
        for prompt, params in (("a" * 600, GREEDY), ("abc", stops)):
            with pytest.raises(RequestError) as caught:
                await outputs(engine, prompt, params)
            refusals.append((str(caught.value), caught.value.param, caught.value.code))
        return refusals

    beside, own = of_both(engines, ask)
    assert own == beside


@pytest.mark.parametrize(
    "changed, error",
    [
        ({"model": "no-such-model"}, ModelError),
        pytest.param({"quantization": "fp8"}, ConfigError, marks=pytest.mark.slow),
    ],
)
def test_a_bad_config_raises_the_same_error(
    tiny_directory: Path, changed: dict[str, Any], error: type[Exception]
) -> None:
    options = OPTIONS | {"model": str(tiny_directory), "device": "cpu"} | changed
    messages = []
    for own_process in (False, True):
        with pytest.raises(error) as caught:
            AsyncEngine(**options, own_process=own_process)
        messages.append((type(caught.value), str(caught.value)))
    assert messages[0] == messages[1]


def test_only_an_engine_in_its_own_process_can_be_supervised(tiny_directory: Path) -> None:
    with pytest.raises(ConfigError, match="add own_process=True"):
        AsyncEngine(str(tiny_directory), supervised=True)


def test_a_killed_engine_fails_what_is_in_flight_and_answers_again(engines: tuple[AsyncEngine, AsyncEngine]) -> None:
    beside, own = engines
    pid = own.pid
    assert pid is not None

    async def be_killed() -> None:
        async for _ in own.generate("abc", LONG):
            os.kill(pid, signal.SIGKILL)

    async def main() -> None:
        killed = await asyncio.gather(be_killed(), be_killed(), return_exceptions=True)
        for error in killed:
            assert isinstance(error, EngineDeadError), error
            assert "the engine has stopped: its process was killed (SIGKILL)" in str(error)
        assert (own.phase, own.num_restarts) == ("restarting", 0)
        assert "SIGKILL" in str(own.failure)
        with pytest.raises(EngineDeadError, match="restarting") as caught:
            await outputs(own, "abc", GREEDY)
        assert caught.value.code == "engine_restarting"

    asyncio.run(main())
    wait_until(lambda: own.phase == "ready")
    assert (own.num_restarts, own.failure) == (1, None)
    again = [asyncio.run(outputs(engine, "abc", GREEDY))[-1].outputs for engine in (own, beside)]
    assert again[0] == again[1]
