"""Which LoRA adapter is at which index of the device's tables, and which requests use it. No torch, no threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from headrace.errors import AdapterError, RequestError, nearest
from headrace.steps import LoadedAdapter


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """The adapters of an engine at one moment, by name."""

    max_loras: int
    loaded: tuple[str, ...] = ()
    running: tuple[str, ...] = ()  # that running sequences use
    waiting: tuple[str, ...] = ()  # that waiting sequences will use


@dataclass(slots=True)
class _Place:
    """One index of the tables that is taken. An adapter that was unloaded keeps it until its last request has ended."""

    name: str
    adapter: LoadedAdapter
    num_requests: int = 0


@dataclass(slots=True)
class AdapterTable:
    """Owned by the engine's core."""

    max_loras: int
    _by_name: dict[str, _Place] = field(default_factory=dict)
    _by_index: dict[int, _Place] = field(default_factory=dict)
    _of_request: dict[str, _Place] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=count)

    @property
    def has_requests(self) -> bool:
        return bool(self._of_request)

    def free_index(self, name: str, *, replaces: bool) -> int:
        """The index for an adapter that is to be loaded. Changes nothing."""
        old = self._by_name.get(name)
        if old is not None and not replaces:
            raise AdapterError(f"The lora adapter '{name}' has already been loaded. Unload it first.")
        free = [index for index in range(self.max_loras) if index not in self._by_index]
        if not free and old is not None and old.num_requests == 0:
            return old.adapter.index
        if not free:
            leaving = sum(place is not self._by_name.get(place.name) for place in self._by_index.values())
            still = f", {leaving} of them unloaded but still used by running requests" if leaving else ""
            raise AdapterError(
                f"the adapter {name!r} cannot be loaded: max_loras={self.max_loras} adapters are loaded{still}; unload "
                "one, or start with a larger --max-loras"
            )
        return free[0]

    def put(self, name: str, index: int) -> None:
        """The adapter is in the device's tables at this index."""
        if name in self._by_name:
            self.remove(name)
        place = _Place(name, LoadedAdapter(index, next(self._numbers)))
        self._by_name[name] = self._by_index[index] = place

    def remove(self, name: str) -> None:
        """Later requests cannot use it; those that run go on to their end."""
        place = self._by_name.pop(name, None)
        if place is None:
            raise AdapterError(f"The lora adapter '{name}' cannot be found.")
        self._leave(place)

    def find(self, name: str) -> LoadedAdapter:
        place = self._by_name.get(name)
        if place is None:
            raise RequestError(
                f"the adapter {name!r} is not loaded{nearest(name, self._by_name)}",
                param="model",
                code="model_not_found",
            )
        return place.adapter

    def started(self, request_id: str, name: str) -> None:
        place = self._of_request[request_id] = self._by_name[name]
        place.num_requests += 1

    def ended(self, request_id: str) -> None:
        """A request has ended; one without an adapter is ignored."""
        place = self._of_request.pop(request_id, None)
        if place is not None:
            place.num_requests -= 1
            self._leave(place)

    def stats(self, *, running: Iterable[int], waiting: Counter[int]) -> AdapterStats:
        """`running` and `waiting` are indexes of the tables."""
        return AdapterStats(
            self.max_loras,
            tuple(self._by_name),
            tuple(sorted(self._by_index[index].name for index in running if index in self._by_index)),
            tuple(sorted(self._by_index[i].name for i, num in waiting.items() if num > 0 and i in self._by_index)),
        )

    def _leave(self, place: _Place) -> None:
        is_loaded = self._by_name.get(place.name) is place
        if not is_loaded and place.num_requests == 0 and self._by_index.get(place.adapter.index) is place:
            del self._by_index[place.adapter.index]
