"""Every call that waits for an engine ends when the engine is closed, and so does every later one."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, AsyncEngine, SamplingParams
from headrace.engine.client import EngineClient
from headrace.engine.process import engine_process
from headrace.engine.start import Engine
from headrace.errors import EngineDeadError
from tests.engine.process.process_tools import MAX_WAIT_S

OPTIONS: dict[str, Any] = {"max_num_seqs": 4, "num_gpu_blocks_override": 64, "num_threads": 1}
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
CLOSED = "the engine has stopped: it was closed"


@pytest.fixture
def own_llm(tiny_directory: Path) -> Iterator[LLM]:
    with LLM(str(tiny_directory), **OPTIONS) as llm:
        yield llm


def hold_first_step(engine: Engine) -> threading.Event:
    """Hold the engine in its first step until it is told to stop. Returns an event: the step has begun."""
    client = engine.client
    assert isinstance(client, EngineClient)
    has_begun, is_stopping = threading.Event(), threading.Event()
    step, stop = client._core.step, client.stop

    def held_step() -> Any:
        has_begun.set()
        assert is_stopping.wait(MAX_WAIT_S)
        return step()

    def told_to_stop() -> None:
        stop()
        is_stopping.set()

    client._core.step = held_step  # type: ignore[method-assign]
    client.stop = told_to_stop  # type: ignore[method-assign]
    return has_begun


def error_of(call: Callable[[], object]) -> BaseException | None:
    """What `call` raises, on a thread of its own; a call that never returns fails the test."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
            raised.append(None)
        except BaseException as error:  # noqa: BLE001  the test compares it
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(MAX_WAIT_S)
    assert raised, "the call still waits"
    return raised[0]


CALLS: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate("a", SHORT, use_tqdm=False),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "a"}], SHORT, use_tqdm=False),
    "embed": lambda llm: llm.embed("a", use_tqdm=False),
    "score": lambda llm: llm.score("a", "b", use_tqdm=False),
}


def test_a_call_after_closing_is_refused(own_llm: LLM) -> None:
    own_llm.close()
    for call in CALLS.values():
        error = error_of(lambda call=call: call(own_llm))  # type: ignore[misc]
        assert isinstance(error, EngineDeadError) and str(error) == CLOSED


def test_closing_on_another_thread_ends_a_call_that_waits(own_llm: LLM) -> None:
    has_begun = hold_first_step(own_llm._engine)
    closing = threading.Thread(target=lambda: (has_begun.wait(MAX_WAIT_S), own_llm.close()))
    closing.start()
    error = error_of(lambda: own_llm.generate(["a", "b"], LONG, use_tqdm=False))
    closing.join()
    assert isinstance(error, EngineDeadError) and str(error) == CLOSED


async def last_text(engine: AsyncEngine, params: SamplingParams) -> str:
    text = ""
    async for output in engine.generate("abc", params):
        text = output.outputs[0].text
    return text


async def check_refuses(engine: AsyncEngine) -> None:
    with pytest.raises(EngineDeadError, match="it was closed") as caught:
        await asyncio.wait_for(last_text(engine, SHORT), MAX_WAIT_S)
    assert caught.value.code == "engine_dead"
    assert engine.phase == "dead"


def test_closing_ends_streams_in_flight_and_refuses_later_ones(tiny_directory: Path) -> None:
    async def main() -> None:
        engine = await AsyncEngine.start(str(tiny_directory), **OPTIONS)
        has_begun = hold_first_step(engine._engine)
        waiting = [asyncio.create_task(last_text(engine, LONG)), asyncio.create_task(engine.embed("abc"))]  # type: ignore[list-item]
        assert await asyncio.to_thread(has_begun.wait, MAX_WAIT_S)
        await engine.close()
        for task in waiting:
            with pytest.raises(EngineDeadError, match=CLOSED):
                await asyncio.wait_for(task, MAX_WAIT_S)
        await check_refuses(engine)

    asyncio.run(main())


@pytest.mark.processes
@pytest.mark.parametrize("supervised", [False, True])
def test_closing_an_engine_in_its_own_process_ends_streams_in_flight(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch, supervised: bool
) -> None:
    monkeypatch.setattr(engine_process, "CLOSE_S", 0.01)  # it is suspended and would not end by itself

    async def main() -> None:
        engine = await AsyncEngine.start(str(tiny_directory), own_process=True, supervised=supervised, **OPTIONS)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(last_text(engine, LONG))
        while not engine._events.readers:
            await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineDeadError, match=CLOSED):
            await asyncio.wait_for(waiting, MAX_WAIT_S)
        await check_refuses(engine)

    asyncio.run(main())


def in_fork(call: Callable[[], object]) -> str:
    """What `call` raises in a forked child, which is killed if it never returns."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            call()
            os.write(writing, b"it returned")
        except BaseException as error:  # noqa: BLE001  the parent compares it
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    is_done, _, _ = select.select([reading], [], [], MAX_WAIT_S)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with os.fdopen(reading, "rb") as pipe:
        return pipe.read().decode() if is_done else "it still waited"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_in_a_forked_process_calls_are_refused_and_the_parent_goes_on(own_llm: LLM) -> None:
    expected = own_llm.generate("a", SHORT, use_tqdm=False)[0].outputs
    with own_llm._is_busy:  # as if another thread of the parent generated
        for call in CALLS.values():
            answer = in_fork(lambda call=call: call(own_llm))  # type: ignore[misc]
            assert answer.startswith("EngineDeadError: the engine has stopped: this process was forked from")
        assert in_fork(own_llm.close) == "it returned"
    assert own_llm.generate("a", SHORT, use_tqdm=False)[0].outputs == expected


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("supervised", [False, True])
def test_a_forked_process_does_not_reach_the_engines_process(tiny_directory: Path, supervised: bool) -> None:
    engine = AsyncEngine(str(tiny_directory), own_process=True, supervised=supervised, **OPTIONS)
    answer = in_fork(lambda: asyncio.run(last_text(engine, SHORT)))
    assert answer.startswith("EngineDeadError: ") and "this process was forked from" in answer
    assert in_fork(lambda: asyncio.run(engine.close())) == "it returned"
    assert asyncio.run(last_text(engine, SHORT))
    asyncio.run(engine.close())
