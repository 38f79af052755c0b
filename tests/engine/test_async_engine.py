from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from headrace import AsyncEngine, SamplingParams
from headrace.errors import RequestError

Body = Callable[[AsyncEngine], Awaitable[None]]
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def with_engine(directory: Path, body: Body) -> None:
    async def main() -> None:
        engine = await AsyncEngine.start(str(directory), max_num_seqs=4, num_gpu_blocks_override=256)
        try:
            await asyncio.wait_for(body(engine), timeout=60)
        finally:
            await engine.close()

    asyncio.run(main())


async def until_idle(engine: AsyncEngine) -> None:
    while engine.stats.scheduler.num_running or engine.stats.scheduler.num_waiting:
        await asyncio.sleep(0.001)


async def full_text(engine: AsyncEngine, prompt: str, params: SamplingParams) -> str:
    text = ""
    async for output in engine.generate(prompt, params):
        text = output.outputs[0].text
    return text


def test_a_stream_grows_token_by_token_to_the_whole_answer(tiny_directory: Path) -> None:
    async def body(engine: AsyncEngine) -> None:
        outputs = [output async for output in engine.generate("abc", SHORT)]
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths == sorted(lengths) and lengths[-1] == 6
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        for earlier, later in itertools.pairwise(outputs):
            assert later.outputs[0].text.startswith(earlier.outputs[0].text)

    with_engine(tiny_directory, body)


def test_many_streams_run_together_and_each_gets_its_own_answer(tiny_directory: Path) -> None:
    async def body(engine: AsyncEngine) -> None:
        prompts = [f"prompt {i}" for i in range(9)]
        together = await asyncio.gather(*(full_text(engine, prompt, SHORT) for prompt in prompts))
        alone = [await full_text(engine, prompt, SHORT) for prompt in prompts]
        assert together == alone

    with_engine(tiny_directory, body)


def test_abort_ends_a_stream_and_frees_its_blocks(tiny_directory: Path) -> None:
    async def body(engine: AsyncEngine) -> None:
        reasons = []
        async for output in engine.generate("abc", LONG, request_id="mine"):
            if not reasons:  # at the first output, whatever its number of tokens
                await engine.abort("mine")
            reasons.append(output.outputs[0].finish_reason)
        assert reasons[-1] == "abort"
        await until_idle(engine)
        assert engine.stats.scheduler.num_blocks_held == 0

    with_engine(tiny_directory, body)


def test_leaving_the_loop_aborts_the_request(tiny_directory: Path) -> None:
    async def body(engine: AsyncEngine) -> None:
        stream = engine.generate("abc", LONG)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        await until_idle(engine)
        assert engine.stats.scheduler.num_blocks_held == 0
        assert engine.stats.scheduler.num_aborted == 1

    with_engine(tiny_directory, body)


def test_cancelling_the_task_aborts_the_request(tiny_directory: Path) -> None:
    async def body(engine: AsyncEngine) -> None:
        task = asyncio.create_task(full_text(engine, "abc", LONG))
        while not engine.stats.scheduler.num_running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(engine)
        assert engine.stats.scheduler.num_blocks_held == 0

    with_engine(tiny_directory, body)


def test_an_engine_serves_one_event_loop_after_the_other(tiny_directory: Path) -> None:
    engine = AsyncEngine(str(tiny_directory), max_num_seqs=2, num_gpu_blocks_override=64)

    async def ask() -> str:
        async for output in engine.generate("hi", SamplingParams(max_tokens=4, temperature=0)):
            last = output.outputs[0].text
        return last

    async def stop_early() -> None:
        async for _ in engine.generate("hi", SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)):
            return

    first = asyncio.run(ask())
    asyncio.run(stop_early())  # events that still arrive have no reader
    assert asyncio.run(ask()) == first
    asyncio.run(engine.close())


def test_a_request_id_in_use_is_refused(tiny_directory: Path) -> None:
    async def body(engine: AsyncEngine) -> None:
        async for _ in engine.generate("abc", SHORT, request_id="same"):
            with pytest.raises(RequestError, match="'same' is already running"):
                await anext(aiter(engine.generate("abc", SHORT, request_id="same")))

    with_engine(tiny_directory, body)


def test_chat_streams_through_the_template(tiny_directory: Path) -> None:
    async def body(engine: AsyncEngine) -> None:
        outputs = [o async for o in engine.chat([{"role": "user", "content": "hi"}], SHORT)]
        assert outputs[-1].prompt == "<user>hi\n<assistant>"
        assert len(outputs[-1].outputs[0].token_ids) == 6

    with_engine(tiny_directory, body)


def test_with_best_of_a_stream_yields_only_the_final_output(tiny_directory: Path) -> None:
    async def body(engine: AsyncEngine) -> None:
        params = SamplingParams(best_of=3, max_tokens=6, ignore_eos=True, seed=1)
        outputs = [output async for output in engine.generate("abc", params)]
        assert [(output.finished, len(output.outputs)) for output in outputs] == [(True, 1)]

    with_engine(tiny_directory, body)
