"""A server under load before and after many streams, most of whose clients disconnect in the middle.

Memory, open files, threads and held cache blocks must return to their values before. A cache takes memory when its
blocks are first used, so it is small here, and all of it is used before the first measurement.

    python benchmarks/leaving_clients.py --json benchmarks/results/leaving-clients.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import socket
import struct
import sys
import time
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from bad_connections import Server, State, settled

from headrace.version import __version__

ANSWER_LEN = 48
MEMORY_SLACK = 0.01  # allowance for allocators
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Api-Key: secret\r\nContent-Type: application/json\r\n"


def request(dice: random.Random) -> bytes:
    body = {
        "prompt": " ".join(str(dice.randrange(1000)) for _ in range(dice.randint(1, 120))),
        "max_tokens": ANSWER_LEN,
        "n": dice.choice([1, 1, 1, 3]),
        "stream": True,
        "ignore_eos": True,
        **dice.choice([{}, {"top_p": 0.9}, {"logprobs": 2}, {"stop": ["zzz"]}, {"frequency_penalty": 0.5}]),
    }
    encoded = json.dumps(body).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(encoded) + encoded


async def one(port: int, dice: random.Random) -> str:
    """Read a stream to its end, or disconnect after some bytes. Returns what happened."""
    num_wanted = dice.choice([0, 1, 2000, 5000, 10_000, 10**9, 10**9])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(dice))
    num_read, last = 0, b""
    while num_read < num_wanted and not last.endswith(b"0\r\n\r\n"):
        last = last[-8:] + (got := await reader.read(4096))
        num_read += len(got)
        if not got:
            return "cut off"
    if num_wanted < 10**9 and dice.random() < 0.5:  # disconnect with a reset
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
    return "read" if num_wanted == 10**9 else "left"


async def drive(port: int, number: int, at_once: int, seed: int) -> Counter[str]:
    dice, left, done = random.Random(seed), iter(range(number)), Counter[str]()

    async def client() -> None:
        for _ in left:
            done[await one(port, dice)] += 1

    await asyncio.gather(*(client() for _ in range(at_once)))
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--streams", type=int, default=150, help="streams per round")
    parser.add_argument("--at-once", type=int, default=48)
    parser.add_argument("--blocks", type=int, default=512, help="of the KV cache; few, so that all are used")
    parser.add_argument("--json", type=Path, help="write a record of the numbers to this file")
    given = parser.parse_args()
    server = Server(given.model, "--num-gpu-blocks-override", str(given.blocks))
    asyncio.run(drive(server.port, given.streams, given.at_once, seed=0))  # warms up what is created once
    states = [settled(server, server.state())]
    started, done = time.perf_counter(), Counter[str]()
    for number in range(1, given.rounds + 1):
        done += asyncio.run(drive(server.port, given.streams, given.at_once, seed=number))
        states.append(settled(server, states[0]))
        print(json.dumps(asdict(states[-1])), flush=True)
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "versions": {"headrace": __version__, "python": platform.python_version()},
        "model": given.model,
        "seconds": round(time.perf_counter() - started, 1),
        "at_once": given.at_once,
        "streams": dict(done),
        "before": asdict(states[0]),
        "after_each_round": [asdict(state) for state in states[1:]],
        "exit_code": server.stop(),
    }
    print(json.dumps(record, indent=2))
    if given.json is not None:
        given.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if all(is_back(state, states[0]) for state in states[1:]) else 1


def is_back(state: State, before: State) -> bool:
    is_released = state.num_files <= before.num_files and state.num_threads <= before.num_threads
    is_released = is_released and state.memory_mib <= (1 + MEMORY_SLACK) * before.memory_mib
    return is_released and state.num_running == state.num_waiting == state.kv_use == 0


if __name__ == "__main__":
    sys.exit(main())
