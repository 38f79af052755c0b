"""Several engines behind one front, with clients that record what they get."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.engine.client import Deliver
from headrace.engine.fake_settings import fake_settings
from headrace.engine.group import EngineGroup, check_data_parallel_size
from headrace.engine.shares import EngineShare, shares_of
from headrace.errors import ConfigError, EngineDeadError, RequestError
from headrace.types import Request, SamplingParams, SequenceEvent, SequenceTiming

BLOCK = 16


class RecordingClient:
    def __init__(self, number: int, deliver: Deliver) -> None:
        self.number = number
        self.deliver = deliver
        self.failure: BaseException | None = None
        self.is_broken = False  # it dies when it is asked next
        self.submitted: list[str] = []
        self.aborted: list[tuple[str, int | None]] = []
        self.config: EngineConfig | None = None
        self.limit: int | None = None
        self.is_closed = False

    def start(self, config: EngineConfig) -> None:
        self.config = config

    def wait_until_ready(self) -> Any:
        return SimpleNamespace(settings=fake_settings(block_size=BLOCK, max_model_len=1024 - self.number))

    def submit(self, request: Request) -> None:
        if self.failure is not None or self.is_broken:
            raise EngineDeadError("gone")
        if len(request.prompt_token_ids) == 1:
            raise RequestError("too short")
        self.submitted.append(request.request_id)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.aborted.append((request_id, index))

    def limit_running(self, num_seqs: int | None) -> None:
        self.limit = num_seqs

    def close(self) -> None:
        self.is_closed = True

    def die(self) -> None:
        self.failure = RuntimeError("killed")
        self.deliver([])

    def first_token(self, request_id: str) -> None:
        token = np.array([1], np.int32)
        self.deliver([SequenceEvent(request_id, 0, token, timing=SequenceTiming(0.0, 0.0))])


class Scene:
    """A group of recording clients."""

    def __init__(self, size: int = 2) -> None:
        self.clients: list[RecordingClient] = []
        self.delivered: list[SequenceEvent] = []
        self.lost: list[tuple[int, str]] = []
        shares = shares_of(EngineConfig(), size, num_cores=size, gpus=(), noun="engine")
        self.group = EngineGroup(shares, self._start, self.delivered.extend, self._on_lost)
        self.group.start()
        self.settings = self.group.wait_until_ready()

    def _start(self, number: int, share: EngineShare, deliver: Deliver) -> Any:
        self.clients.append(RecordingClient(number, deliver))
        return self.clients[-1]

    def _on_lost(self, number: int, failure: BaseException) -> None:
        self.lost.append((number, str(failure)))

    def submit(self, name: str, prefix: int = 0, *, num_blocks: int = 4, n: int = 1, salt: str | None = None) -> int:
        """Submit a prompt of `num_blocks` blocks that start with this token. Returns the number of its engine."""
        prompt = np.full(num_blocks * BLOCK, prefix, np.int32)
        self.group.submit(Request(name, prompt, SamplingParams(n=n), cache_salt=salt))
        number = self.group.place_of(name)
        assert number is not None
        return number

    def start(self, name: str, prefix: int, *, n: int = 1) -> int:
        """The same, to the first token: a prompt that waits counts for more than a sequence that runs."""
        number = self.submit(name, prefix, n=n)
        self.clients[number].first_token(name)
        return number

    def run(self, name: str, prefix: int = 0, *, salt: str | None = None) -> int:
        """The same, to the end of the request."""
        number = self.submit(name, prefix, salt=salt)
        self.group.release(name)
        return number


def test_a_prompt_goes_where_its_prefix_was_computed() -> None:
    scene = Scene(3)
    first = {prefix: scene.run(f"first-{prefix}", prefix) for prefix in range(10, 16)}
    assert set(first.values()) == {0, 1, 2}
    again = {prefix: scene.run(f"again-{prefix}", prefix) for prefix in reversed(first)}
    assert again == first


def test_prompts_with_different_salts_share_no_prefix() -> None:
    scene = Scene(2)
    places = {salt: scene.run(f"first-{salt}", 7, salt=salt) for salt in ("a", "b")}
    assert set(places.values()) == {0, 1}
    assert {salt: scene.run(f"again-{salt}", 7, salt=salt) for salt in ("b", "a")} == {
        "b": places["b"],
        "a": places["a"],
    }


def test_requests_without_a_prefix_are_spread_by_the_sequences_that_run() -> None:
    scene = Scene(2)
    busy = scene.start("three", 1, n=3)
    assert [scene.start(f"one-{number}", 2 + number) for number in range(2)] == [1 - busy] * 2


def test_a_prefix_is_left_when_its_engine_has_too_much_to_do() -> None:
    scene = Scene(2)
    places = [scene.submit(f"r{number}", 5) for number in range(12)]
    assert len(set(places)) == 2, "not all of them wait for the same engine"


def test_an_engine_that_dies_loses_its_own_requests_and_gets_no_more() -> None:
    scene = Scene(2)
    place = scene.submit("lost", 3)
    other = scene.submit("kept", 4)
    assert place != other
    scene.clients[place].die()
    assert scene.lost == [(place, "killed")]
    assert (scene.group.requests_at(place), scene.group.requests_at(other)) == (["lost"], ["kept"])
    assert scene.run("again", 3) == other
    assert scene.group.failure is None and scene.group.phase == "ready"
    scene.clients[other].die()
    assert scene.group.failure is not None and scene.group.phase == "dead"
    with pytest.raises(EngineDeadError):
        scene.submit("refused")


def test_an_engine_that_came_back_has_forgotten_its_prefixes() -> None:
    scene = Scene(2)
    place = scene.run("first", 3)
    scene.clients[place].die()
    scene.clients[place].failure = None
    busy = scene.start("busy", 9, n=2)
    assert scene.run("again", 3) == 1 - busy, "by load alone"


def test_a_request_passes_over_an_engine_that_dies_at_this_moment() -> None:
    scene = Scene(2)
    place = scene.run("first", 3)
    scene.clients[place].is_broken = True
    assert scene.run("again", 3) == 1 - place


def test_a_request_that_no_engine_can_run_is_refused_and_leaves_nothing() -> None:
    scene = Scene(2)
    with pytest.raises(RequestError, match="too short"):
        scene.group.submit(Request("short", np.array([1], np.int32), SamplingParams()))
    assert all(not member.load and not member.pending for member in scene.group.members)


def test_a_released_request_leaves_no_load_and_an_abort_goes_to_its_engine() -> None:
    scene = Scene(2)
    place = scene.submit("one", n=2)
    scene.group.abort("one", 1)
    scene.group.abort("unknown")
    assert scene.clients[place].aborted == [("one", 1)] and not scene.clients[1 - place].aborted
    scene.group.release("one")
    scene.group.release("one")
    assert all(not member.load and not member.pending for member in scene.group.members)


def test_each_engine_gets_its_share_and_the_front_the_shortest_context() -> None:
    scene = Scene(2)
    assert [client.config.num_threads for client in scene.clients if client.config] == [1, 1]
    assert scene.settings.max_model_len == 1023
    assert scene.settings.choices[0].name == "data_parallel_size"
    scene.group.limit_running(5)
    assert [client.limit for client in scene.clients] == [3, 3]
    scene.group.close()
    assert all(client.is_closed for client in scene.clients)


@pytest.mark.parametrize("size", [0, 257, True, 1.5])
def test_a_number_of_engines_that_makes_no_sense_is_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match="data_parallel_size must be an integer from 1 to 256"):
        check_data_parallel_size(size, own_process=True)


def test_several_engines_need_processes() -> None:
    with pytest.raises(ConfigError, match="add own_process=True"):
        check_data_parallel_size(2, own_process=False)
