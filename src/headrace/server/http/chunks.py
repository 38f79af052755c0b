"""Encodes the chunks of a streamed response. The constant parts of a stream are encoded once.

data: {"id":…,"object":…,"created":…,"model":…,"choices":[{"index":0,"delta":{"content": TEXT },…}]}\\n\\n
└────────────────────── head ─────────────────────────────────────────────┘      └──── tail ──────┘
"""

from __future__ import annotations

from typing import Any

import msgspec

encode = msgspec.json.Encoder().encode
_END = b"}\n\n"


class Chunks:
    """The encoder of one stream. `opening` and `closing` enclose a text: `"delta":{"content":` and `}` in a chat."""

    def __init__(
        self,
        facts: dict[str, Any],
        *,
        opening: bytes,
        closing: bytes,
        always: dict[str, Any],
        usage_is_null: bool = False,
    ) -> None:
        """`facts`: id, object, created, model. `always`: the fields that each choice has beside its text by default.
        `usage_is_null`: send `"usage": null`, as OpenAI does when the usage comes in the last chunk."""
        self._head = b"data: " + encode(facts)[:-1] + b',"choices":['
        self._opening = opening
        self._closing = closing
        self._always = always
        self._end = b'],"usage":null}\n\n' if usage_is_null else b"]}\n\n"
        self._tail = closing + b"," + encode(always)[1:] + self._end
        self._heads: dict[int, bytes] = {}

    def text(self, index: int, text: str) -> bytes:
        """The common chunk: new text and nothing else."""
        head = self._heads.get(index) or self._head_of(index)
        return head + encode(text) + self._tail

    def special(self, index: int, text: str, more: dict[str, Any], usage: bytes | None = None) -> bytes:
        """New text with log-probabilities, token ids, the end of the answer, or the usage so far."""
        fields = encode(self._always | more)[1:]
        return b"".join((self._head_of(index), encode(text), self._closing, b",", fields, self._end_with(usage)))

    def choice(self, choice: dict[str, Any], usage: bytes | None = None, more: dict[str, Any] | None = None) -> bytes:
        """A chunk with any other choice object. `more`: further members of the chunk."""
        members = b"," + encode(more)[1:] if more else b"}"
        return self._head + encode(choice) + self._end_with(usage)[: -len(_END)] + members + b"\n\n"

    def usage(self, usage: bytes) -> bytes:
        """The last chunk if usage was requested: no choices."""
        return self._head + b'],"usage":' + usage + b"}\n\n"

    def _head_of(self, index: int) -> bytes:
        self._heads[index] = self._head + b'{"index":%d,' % index + self._opening
        return self._heads[index]

    def _end_with(self, usage: bytes | None) -> bytes:
        return self._end if usage is None else b'],"usage":' + usage + b"}\n\n"
