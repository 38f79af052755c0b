"""Responses that are stored between requests: for `previous_response_id`, and to be read again.

Each belongs to the key that asked for it; for any other key it does not exist. When a limit is reached, the key that
stores the most bytes loses those that it has not used for the longest time. All are in memory; with an archive they
are on the disk too, from where the next server has them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

Item = dict[str, Any]
UNFINISHED = ("queued", "in_progress")


class Run(Protocol):
    """A response that is generated in the background."""

    async def cancel(self) -> None: ...


@dataclass(slots=True, eq=False)
class StoredResponse:
    """One response. Owned by the store; the run of a response in the background replaces `response`."""

    owner: str
    response: dict[str, Any]  # as it is returned
    items: list[Item]  # of the whole conversation before its output
    num_bytes: int  # of the conversation and the response, about: as JSON
    run: Run | None = None  # of a response in the background

    @property
    def id(self) -> str:
        return str(self.response["id"])

    @property
    def status(self) -> str:
        return str(self.response["status"])

    @property
    def output(self) -> list[Item]:
        output: list[Item] = self.response["output"]
        return output

    @property
    def conversation(self) -> list[Item]:
        """What a response that continues this one starts with."""
        return [*self.items, *self.output]


class Archive(Protocol):
    """Where responses survive the server. Calls return at once; what was written last is there at last."""

    def read(self) -> Iterable[StoredResponse]: ...
    def write(self, stored: StoredResponse) -> None: ...
    def remove(self, owner: str, id: str) -> None: ...


class ResponseStore:
    """Used on the event loop only."""

    def __init__(self, *, max_responses: int, max_bytes: int, archive: Archive | None = None) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._owners: dict[str, OrderedDict[str, StoredResponse]] = {}  # each in the order of their last use
        self._bytes: dict[str, int] = {}  # of each owner
        self._items: dict[tuple[str, str], Item] = {}  # of outputs, by owner and id
        self.num_responses = 0
        self._archive: Archive | None = None
        if archive is not None:
            self._restore(archive)

    @property
    def is_on(self) -> bool:
        return self._max_responses > 0

    @property
    def num_bytes(self) -> int:
        return sum(self._bytes.values())

    def add(self, stored: StoredResponse) -> None:
        """A response of the same id and owner is replaced."""
        self._remove(stored.owner, stored.id)
        self._owners.setdefault(stored.owner, OrderedDict())[stored.id] = stored
        self._bytes[stored.owner] = self._bytes.get(stored.owner, 0) + stored.num_bytes
        self.num_responses += 1
        self._index(stored)
        self._write(stored)
        self._drop_oldest()

    def change(self, stored: StoredResponse, response: dict[str, Any], *, num_bytes: int = 0) -> None:
        """Replace the response by a later state, which takes that many bytes more."""
        stored.response = response
        of_owner = self._owners.get(stored.owner)
        if of_owner is not None and of_owner.get(stored.id) is stored:
            stored.num_bytes += num_bytes
            self._bytes[stored.owner] += num_bytes
            self._index(stored)
            self._write(stored)
            self._drop_oldest()

    def find(self, owner: str, id: str) -> StoredResponse | None:
        of_owner = self._owners.get(owner, OrderedDict())
        stored = of_owner.get(id)
        if stored is not None:
            of_owner.move_to_end(id)
        return stored

    def find_item(self, owner: str, id: str) -> Item | None:
        """An item of a stored response's output."""
        return self._items.get((owner, id))

    def delete(self, owner: str, id: str) -> bool:
        return self._remove(owner, id)

    def _restore(self, archive: Archive) -> None:
        """Take in what the archive has, within the limits of now."""
        found = list(archive.read())
        for stored in found:
            self.add(stored)
        self._archive = archive
        for stored in found:
            if self.find(stored.owner, stored.id) is None:
                archive.remove(stored.owner, stored.id)

    def _write(self, stored: StoredResponse) -> None:
        """One that is still generated ends with its server, so it is not written."""
        if self._archive is not None and stored.status not in UNFINISHED:
            self._archive.write(stored)

    def _index(self, stored: StoredResponse) -> None:
        for item in stored.output:
            self._items[stored.owner, item["id"]] = item

    def _remove(self, owner: str, id: str) -> bool:
        of_owner = self._owners.get(owner)
        stored = None if of_owner is None else of_owner.pop(id, None)
        if of_owner is None or stored is None:
            return False
        self._bytes[owner] -= stored.num_bytes
        self.num_responses -= 1
        for item in stored.output:
            self._items.pop((owner, item["id"]), None)
        if not of_owner:
            del self._owners[owner], self._bytes[owner]
        if self._archive is not None:
            self._archive.remove(owner, id)
        return True

    def _drop_oldest(self) -> None:
        """Responses that are still generated stay: somebody waits for them."""
        while self.num_responses > self._max_responses or self.num_bytes > self._max_bytes:
            for owner in sorted(self._bytes, key=lambda owner: self._bytes[owner], reverse=True):
                found = next((one.id for one in self._owners[owner].values() if one.status not in UNFINISHED), None)
                if found is not None:
                    self._remove(owner, found)
                    break
            else:
                return
