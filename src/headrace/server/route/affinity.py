"""The prefix of a prompt for the router: hashes of its chunks, which `balance/prefix_table.py` looks up.

    body  {"model": "m", "messages": [{"role": "system", "content": "You are ..."}, {"role": "user", ...
                                     └─ 256 bytes ─┘└─ 256 bytes ─┘└─ ...
    hashes                             h0 = H(seed)    h1 = H(h0)     h2 = H(h1)      a chain: same hash, same prefix

There is no tokenizer: the bytes of the JSON stand for the tokens. Two requests with the same prefix have the same bytes
there if the same client wrote them, which is the case that matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from headrace.balance.prefix_table import chunk_hashes

CHUNK_BYTES = 256  # about 64 tokens, so four blocks of a KV cache
MAX_CHUNKS = 512  # of one prompt; two prompts that agree in 128 KiB go to the same replica anyway


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
    seed = hash((owner, bytes(found.model), bytes(found.cache_salt)))
    hashes = chunk_hashes(text, seed, chunk_bytes=CHUNK_BYTES, max_chunks=MAX_CHUNKS)
    return Prompt(hashes, bytes(found.stream) == b"true")
