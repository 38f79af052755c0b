"""Which LoRA adapters are loaded, which of them have a place on the device, and which requests use them. No torch, no
threads.

    loaded     in host memory, by name; any number
    resident   also in the device's tables, at one of `max_loras` indexes: its place
    held       requests of an adapter without a place, which the scheduler does not know yet

The oldest held request's adapter gets the first place that is free or whose adapter no request uses. Until then the
least used place takes no new requests, so that it becomes free.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from headrace.engine.grammars import Grammar
from headrace.errors import AdapterError, RequestError, nearest
from headrace.steps import LoadedAdapter
from headrace.types import Request


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """The adapters of an engine at one moment, by name."""

    max_loras: int
    loaded: tuple[str, ...] = ()
    running: tuple[str, ...] = ()  # that running sequences use
    waiting: tuple[str, ...] = ()  # that waiting sequences will use
    resident: tuple[str, ...] = ()  # the loaded ones on the device


class Arrival(NamedTuple):
    """A request with an adapter, and all that the engine needs to start it."""

    request: Request
    seeds: tuple[int, ...]
    grammar: Grammar | None = None


@dataclass(slots=True, eq=False)
class _Adapter:
    """One that was unloaded keeps its place until its last request has ended."""

    name: str
    number: int  # see `LoadedAdapter`
    weights: Any  # in host memory, as the runner has read them
    index: int | None = None  # of its place; None: it has none
    num_requests: int = 0  # that the scheduler has
    last_use: int = 0  # the larger, the later
    held: deque[Arrival] = field(default_factory=deque)  # the oldest first

    @property
    def is_used(self) -> bool:
        return self.num_requests > 0 or bool(self.held)


class AdapterTable:
    """Owned by the engine's core. `write` puts weights at an index of the device's tables."""

    def __init__(self, max_loras: int, write: Callable[[int, Any], None]) -> None:
        self.max_loras = max_loras
        self._write = write
        self._by_name: dict[str, _Adapter] = {}
        self._by_index: dict[int, _Adapter] = {}
        self._of_request: dict[str, _Adapter] = {}  # of requests that the scheduler has
        self._of_held: dict[str, _Adapter] = {}
        self._with_held: dict[_Adapter, None] = {}  # in the order of their oldest held request
        self.num_held_sequences = 0
        self._numbers, self._uses = count(), count(1)

    @property
    def has_requests(self) -> bool:
        return bool(self._of_request)

    @property
    def has_held(self) -> bool:
        return bool(self._of_held)

    def is_held(self, request_id: str) -> bool:
        return request_id in self._of_held

    # ---- adapters

    def load(self, name: str, weights: Any, *, replaces: bool = False) -> None:
        """Let requests use an adapter. It gets a place now if one is free, else with its first request."""
        if name in self._by_name:
            if not replaces:
                raise AdapterError(f"The lora adapter '{name}' has already been loaded. Unload it first.")
            self.unload(name)
        adapter = self._by_name[name] = _Adapter(name, next(self._numbers), weights)
        if (index := self._free_index()) is not None:
            self._place(adapter, index)

    def unload(self, name: str) -> None:
        """Later requests cannot use it; those that run or wait go on to their end."""
        adapter = self._by_name.pop(name, None)
        if adapter is None:
            raise AdapterError(f"The lora adapter '{name}' cannot be found.")
        self._leave(adapter)

    # ---- requests

    def hold(self, arrival: Arrival) -> None:
        """Take in a request; `start` returns it when its adapter has a place, which may be at once."""
        name = arrival.request.adapter
        adapter = None if name is None else self._by_name.get(name)
        if adapter is None:
            raise RequestError(
                f"the adapter {name!r} is not loaded{nearest(str(name), self._by_name)}",
                param="model",
                code="model_not_found",
            )
        adapter.held.append(arrival)
        self._with_held[adapter] = None
        self._of_held[arrival.request.request_id] = adapter
        self.num_held_sequences += len(arrival.seeds)

    def start(self) -> Iterator[tuple[Arrival, LoadedAdapter]]:
        """The held requests that can start, each with its adapter, whose weights are on the device then."""
        num_left = 0  # adapters with older requests for which there is no place yet
        for adapter in list(self._with_held):
            if adapter.index is None and not self._find_place(adapter):
                num_left += 1
            elif adapter not in self._least_used(num_left):
                yield from self._start(adapter)

    def ended(self, request_id: str) -> None:
        """A request has ended; one without an adapter is ignored."""
        adapter = self._of_request.pop(request_id, None)
        if adapter is not None:
            adapter.num_requests -= 1
            adapter.last_use = next(self._uses)
            self._leave(adapter)

    def drop_held(self, request_id: str) -> Arrival:
        """Forget a request that was not started."""
        adapter = self._of_held.pop(request_id)
        (position,) = (i for i, each in enumerate(adapter.held) if each.request.request_id == request_id)
        arrival = adapter.held[position]
        del adapter.held[position]
        self.num_held_sequences -= len(arrival.seeds)
        if not adapter.held:
            del self._with_held[adapter]
        self._leave(adapter)
        return arrival

    def stats(self, *, running: Iterable[int], waiting: Counter[int]) -> AdapterStats:
        """`running` and `waiting` are indexes of the tables. From any thread."""
        loaded, held = list(self._by_name.values()), {adapter.name for adapter in list(self._with_held)}
        names = {index: adapter.name for index, adapter in list(self._by_index.items())}
        return AdapterStats(
            self.max_loras,
            tuple(adapter.name for adapter in loaded),
            tuple(sorted(names[index] for index in running if index in names)),
            tuple(sorted(held | {names[index] for index, num in waiting.items() if num > 0 and index in names})),
            tuple(adapter.name for adapter in loaded if adapter.index is not None),
        )

    # ---- places

    def _start(self, adapter: _Adapter) -> Iterator[tuple[Arrival, LoadedAdapter]]:
        assert adapter.index is not None
        del self._with_held[adapter]
        while adapter.held:
            arrival = adapter.held.popleft()
            request_id = arrival.request.request_id
            del self._of_held[request_id]
            self._of_request[request_id] = adapter
            adapter.num_requests += 1
            self.num_held_sequences -= len(arrival.seeds)
            yield arrival, LoadedAdapter(adapter.index, adapter.number)

    def _find_place(self, adapter: _Adapter) -> bool:
        """Whether the adapter has a place now: a free one, or that of the idle adapter that was used longest ago."""
        index = self._free_index()
        if index is None:
            idle = [each for each in self._by_index.values() if each.num_requests == 0]
            if not idle:
                return False
            last = min(idle, key=lambda each: each.last_use)
            index, last.index = last.index, None
        assert index is not None
        self._place(adapter, index)
        return True

    def _free_index(self) -> int | None:
        return next((index for index in range(self.max_loras) if index not in self._by_index), None)

    def _place(self, adapter: _Adapter, index: int) -> None:
        self._write(index, adapter.weights)
        adapter.index = index
        self._by_index[index] = adapter

    def _least_used(self, num: int) -> list[_Adapter]:
        """The number of requests of the least used one never grows while it takes none, so it gets to 0."""
        return sorted(self._by_index.values(), key=lambda each: each.num_requests)[:num] if num else []

    def _leave(self, adapter: _Adapter) -> None:
        is_loaded = self._by_name.get(adapter.name) is adapter
        if not is_loaded and not adapter.is_used and adapter.index is not None:
            del self._by_index[adapter.index]
            adapter.index = None
