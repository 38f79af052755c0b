"""Which replica has computed the prefix of a prompt: hashes of the prompt's chunks, and who got them.

    body  {"model": "m", "messages": [{"role": "system", "content": "You are ..."}, {"role": "user", ...
                                     └─ 256 bytes ─┘└─ 256 bytes ─┘└─ ...
    hashes                             h0 = H(seed)    h1 = H(h0)     h2 = H(h1)      a chain: same hash, same prefix
    table     h0: replicas A, B    h1: A, B    h2: A                                  matched: A 3 chunks, B 2

There is no tokenizer: the bytes of the JSON stand for the tokens. Two requests with the same prefix have the same bytes
there if the same client wrote them, which is the case that matters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

CHUNK_BYTES = 256  # about 64 tokens, so four blocks of a KV cache
MAX_CHUNKS = 512  # of one prompt; two prompts that agree in 128 KiB go to the same replica anyway
MAX_ENTRIES = 1 << 17  # 32 MiB of different text; the table then takes about 20 MB


class _Prompt(msgspec.Struct):
    """The fields of a request on which its KV cache depends, unparsed, and whether it asks for a stream."""

    model: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    stream: msgspec.Raw = msgspec.Raw()


_DECODER = msgspec.json.Decoder(_Prompt)


@dataclass(frozen=True, slots=True)
class Prompt:
    hashes: list[int]  # for each full chunk of the prompt, of all text up to its end
    is_stream: bool  # its answer begins with the first token


def read_prompt(body: bytes, *, owner: bytes = b"") -> Prompt:
    """A body that is not a request in JSON has no chunks.

    `owner` is the client's key: servers of Headrace do not share a prefix between keys.
    """
    try:
        found = _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Prompt([], False)
    # In the order of a chat template.
    text = b"".join(
        map(bytes, (found.tools, found.system, found.instructions, found.messages, found.prompt, found.input))
    )
    # Python's own hash of bytes has 64 bits and a key of this process: nobody outside can find two equal ones.
    state = hash((owner, bytes(found.model), bytes(found.cache_salt)))
    hashes = []
    for start in range(0, min(len(text) // CHUNK_BYTES, MAX_CHUNKS) * CHUNK_BYTES, CHUNK_BYTES):
        state = hash((state, text[start : start + CHUNK_BYTES]))
        hashes.append(state)
    return Prompt(hashes, bytes(found.stream) == b"true")


class PrefixTable:
    """The replicas that were sent each chunk, as a bit mask of their numbers; the least recently used are dropped."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._holders: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def matched(self, hashes: Sequence[int], numbers: Sequence[int]) -> list[int]:
        """For each replica, by its number, how many chunks from the start it was sent."""
        found = dict.fromkeys(numbers, 0)
        holders = sum(1 << number for number in found)
        for depth, each in enumerate(hashes):
            still = holders & self._holders.get(each, 0)
            for number in found:
                if (holders & ~still) >> number & 1:
                    found[number] = depth
            holders = still
            if not holders:
                break
        for number in found:
            if holders >> number & 1:
                found[number] = len(hashes)
        return [found[number] for number in numbers]

    def record(self, hashes: Sequence[int], number: int, *, live: int = -1) -> None:
        """Note that a replica computes this prefix. `live`: a mask of the numbers that are still in use."""
        for each in reversed(hashes):  # the start of a prompt last: it must not be dropped before what follows it
            self._holders[each] = self._holders.get(each, 0) & live | 1 << number
            self._holders.move_to_end(each)
        while len(self._holders) > self._max_entries:
            self._holders.popitem(last=False)
