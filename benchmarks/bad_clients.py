"""Clients that open a connection, send invalid, incomplete or no data, and disconnect."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Api-Key: secret\r\nContent-Type: application/json\r\n"
ASKED = b'{"prompt": "Once upon a time", "max_tokens": 64, "stream": true, "ignore_eos": true}'

KINDS: dict[str, Callable[[random.Random], bytes]] = {
    "nothing": lambda dice: b"",
    "garbage": lambda dice: dice.randbytes(dice.randint(1, 4000)),
    "half a request line": lambda dice: b"POST /v1/comp",
    "half a head": lambda dice: POST + b"X-Half: a",
    "half a body": lambda dice: POST + b"Content-Length: 5000\r\n\r\n" + b"{" * dice.randint(0, 4000),
    "half a chunk": lambda dice: POST + b"Transfer-Encoding: chunked\r\n\r\nfff\r\nabc",
    "a bad chunk": lambda dice: POST + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "a huge header": lambda dice: POST + b"X-Bomb: " + b"x" * 100_000,
    "many headers": lambda dice: POST + b"X: y\r\n" * 1000,
    "no key": lambda dice: b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    "a body too long": lambda dice: POST + b"Content-Length: 99999999\r\n\r\nabc",
    "a request and away": lambda dice: POST + b"Content-Length: %d\r\n\r\n%s" % (len(ASKED), ASKED),
}


async def misbehave(port: int, dice: random.Random, number: int, *, at_once: int = 50) -> Counter[str]:
    """Open connections of all kinds. Returns the count of each kind."""
    done: Counter[str] = Counter()
    kinds = [list(KINDS)[index % len(KINDS)] for index in range(number)]

    async def client() -> None:
        while kinds:
            kind = kinds.pop()
            await _one(port, KINDS[kind](dice), dice)
            done[kind] += 1

    await asyncio.gather(*(client() for _ in range(at_once)))
    return done


async def _one(port: int, data: bytes, dice: random.Random) -> None:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return
    try:
        writer.write(data)
        await writer.drain()
        if dice.random() < 0.5:
            await asyncio.wait_for(reader.read(100), dice.choice([0.001, 0.02]))
    except (ConnectionError, TimeoutError):
        pass
    if dice.random() < 0.3:  # disconnect with a reset
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
    try:
        await writer.wait_closed()
    except ConnectionError:
        pass
