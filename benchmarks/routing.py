"""Compares ways to spread requests over replicas: `headrace route` over HTTP in front of SIMULATED replicas.

Usage: python benchmarks/routing.py [--rounds 2] [--seconds 50] [--output results.json] [--markdown]

The router is the real one; clients and replicas speak HTTP with it over loopback. A replica is simulated: it computes
no model. It has a prefix cache (LRU of blocks of 16 tokens), computes one prompt at a time at a fixed rate per uncached
token, and then streams tokens at a fixed pace, any number of answers at once. A token is four bytes of the prompt.

Workloads, all with Poisson arrivals:

    conversations   48 conversations of up to 8 turns; a turn repeats all turns before it
    documents       40 documents of 4,000 tokens, asked about with Zipf's frequencies
    unique          prompts of 1,000 tokens that have nothing in common

Policies:

    prefix          the default: prefix, bounded load, health
    round-robin     --policy round-robin
    least load      as prefix, but no prefix is ever worth it
    unbounded       as prefix, but the load of the prefix's replica does not matter

The hit rate is counted by the replicas: cached tokens of all prompt tokens. The first 40% of each run are left out.

Time is virtual: replicas, router and clients share an event loop whose clock jumps to the next timer once nothing is
left to read or write. So the figures do not depend on the machine, and the CPU time of the router is not in them.
`--cost RECORD` measures the CPU time of a router process in front of two null servers and adds it to a record.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import platform
import random
import selectors
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from headrace.balance import choice
from headrace.bench.load.null_server import Behaviour, null_server
from headrace.server.http.lifecycle import BACKLOG, open_listener
from headrace.server.route.options import RouteOptions
from headrace.server.route.serve import RouteServer
from headrace.server.route.sources import Sources

NUM_REPLICAS = 4
TOKEN_BYTES = 4
BLOCK_TOKENS = 16
CACHE_TOKENS = 48_000
PREFILL_TOKENS_PER_S = 10_000.0
NUM_OUTPUT = 32
TOKEN_S = 0.015
WARM_UP_SHARE = 0.4
POLICIES = ("round-robin", "least load", "unbounded", "prefix")
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"index":0,"text":" word"}]}\n\n'
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)


# ---- replicas


@dataclass
class SimulatedReplica:
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)
    num_tokens: int = 0
    num_hit_tokens: int = 0
    num_requests: int = 0
    num_waiting: int = 0
    num_running: int = 0

    async def start(self) -> str:
        self._prefill = asyncio.Lock()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**22)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if head.startswith(b"get"):
                    writer.write(_page(self._page()))
                    if b"connection: close" in head:
                        return
                    continue
                length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
                await self._answer(json.loads(await reader.readexactly(length)), writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the run is over
        finally:
            writer.close()

    def _page(self) -> bytes:
        lines = f"headrace:num_requests_waiting {self.num_waiting}\nheadrace:num_requests_running {self.num_running}\n"
        return lines.encode()

    async def _answer(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.num_requests += 1
        self.num_waiting += 1
        async with self._prefill:
            self.num_waiting -= 1
            self.num_running += 1
            await asyncio.sleep(self._num_uncached("".join(asked["prompt"])) / PREFILL_TOKENS_PER_S)
        try:
            writer.write(STREAM_HEAD + CHUNK)
            for _ in range(NUM_OUTPUT - 1):
                await asyncio.sleep(TOKEN_S)
                writer.write(CHUNK)
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        finally:
            self.num_running -= 1

    def _num_uncached(self, prompt: str) -> int:
        """Looks the prompt up and puts it into the cache."""
        num_tokens = len(prompt) // TOKEN_BYTES
        size = BLOCK_TOKENS * TOKEN_BYTES
        keys, key = [], 0
        for start in range(0, len(prompt) - size + 1, size):
            key = hash((key, prompt[start : start + size]))
            keys.append(key)
        num_hit = next((place for place, key in enumerate(keys) if key not in self.blocks), len(keys)) * BLOCK_TOKENS
        for key in reversed(keys):
            self.blocks[key] = None
            self.blocks.move_to_end(key)
        while len(self.blocks) > CACHE_TOKENS // BLOCK_TOKENS:
            self.blocks.popitem(last=False)
        self.num_tokens += num_tokens
        self.num_hit_tokens += num_hit
        return num_tokens - num_hit


def _page(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % len(body) + body


# ---- workloads: endless prompts, each a list of texts


def _text(rng: random.Random, num_tokens: int) -> str:
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=num_tokens * TOKEN_BYTES))


def conversations(rng: random.Random) -> Iterator[list[str]]:
    system = _text(rng, 200)
    active: list[list[str]] = [[system] for _ in range(48)]
    while True:
        place = rng.randrange(len(active))
        if len(active[place]) > 8:
            active[place] = [system]
        active[place] = [*active[place], _text(rng, 500)]
        yield active[place]


def documents(rng: random.Random) -> Iterator[list[str]]:
    texts = [_text(rng, 4_000) for _ in range(40)]
    weights = [1 / rank for rank in range(1, len(texts) + 1)]
    while True:
        yield [rng.choices(texts, weights)[0], _text(rng, 50)]


def unique(rng: random.Random) -> Iterator[list[str]]:
    while True:
        yield [_text(rng, 1_000)]


WORKLOADS: dict[str, tuple[Callable[[random.Random], Iterator[list[str]]], float]] = {  # with requests per second
    "conversations": (conversations, 16.0),
    "documents": (documents, 10.0),
    "unique": (unique, 24.0),
}


# ---- one run


class _Selector(selectors.DefaultSelector):
    """Advances a clock instead of waiting. Bytes sent over loopback can be read at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if not events and timeout is None:
            return super().select(0.01)
        if not events and timeout is not None:
            self.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


@contextmanager
def constants(policy: str) -> Iterator[None]:
    """The constants of the choice, as a policy needs them."""
    kept = choice.LOAD_FACTOR, choice.LOAD_SLACK, choice.MIN_MATCH_SHARE
    if policy == "unbounded":
        choice.LOAD_SLACK = 1e9
    elif policy == "least load":
        choice.MIN_MATCH_SHARE = 2.0
    try:
        yield
    finally:
        choice.LOAD_FACTOR, choice.LOAD_SLACK, choice.MIN_MATCH_SHARE = kept


async def run(workload: str, policy: str, *, seconds: float, seed: int) -> dict[str, float]:
    replicas = [SimulatedReplica() for _ in range(NUM_REPLICAS)]
    addresses = [await replica.start() for replica in replicas]
    options = RouteOptions(port=0, policy="round-robin" if policy == "round-robin" else "prefix")
    clock = asyncio.get_running_loop().time
    server = RouteServer(options, Sources(addresses), print_line=lambda line: None, clock=clock)
    await server.fleet.refresh()
    listener = open_listener(options.server_options())
    listener.listen(BACKLOG)
    serving = asyncio.create_task(server.run(listener))
    await asyncio.sleep(0.5)
    with constants(policy):
        found = await _drive(workload, listener.getsockname()[1], replicas, seconds=seconds, seed=seed)
    server.lifecycle.stop()
    await serving
    for replica in replicas:
        replica.stop()
    return found


def run_one(policy: str, workload: str, number: int, seconds: float) -> dict[str, Any]:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        found = runner.run(run(workload, policy, seconds=seconds, seed=number))
    print(workload, policy, json.dumps(found), file=sys.stderr, flush=True)
    return {"round": number, "workload": workload, "policy": policy, **found}


async def _drive(
    workload: str, port: int, replicas: list[SimulatedReplica], *, seconds: float, seed: int
) -> dict[str, float]:
    rng = random.Random(seed)
    make, rate = WORKLOADS[workload]
    prompts = make(rng)
    loop = asyncio.get_running_loop()
    started, due = loop.time(), 0.0
    tasks: list[tuple[bool, asyncio.Task[float]]] = []
    counted = [(0, 0, 0)] * len(replicas)
    is_warm = False
    while due < seconds:
        await asyncio.sleep(max(0.0, started + due - loop.time()))
        if not is_warm and due >= WARM_UP_SHARE * seconds:
            is_warm, counted = True, [_counts(replica) for replica in replicas]
        body = json.dumps({"model": "simulated", "stream": True, "prompt": next(prompts)}).encode()
        tasks.append((is_warm, asyncio.create_task(_first_byte_s(port, body))))
        due += rng.expovariate(rate)
    await asyncio.gather(*(task for _, task in tasks))
    times = sorted(task.result() for is_counted, task in tasks if is_counted)
    added = [
        tuple(now - before for now, before in zip(_counts(replica), old, strict=True))
        for replica, old in zip(replicas, counted, strict=True)
    ]
    requests = [each[0] for each in added]
    return {
        "num_requests": len(times),
        "hit_rate": sum(each[2] for each in added) / sum(each[1] for each in added),
        "ttft_p50_s": _quantile(times, 0.5),
        "ttft_p95_s": _quantile(times, 0.95),
        "busiest_share": max(requests) / sum(requests) * NUM_REPLICAS,
    }


def _counts(replica: SimulatedReplica) -> tuple[int, int, int]:
    return replica.num_requests, replica.num_tokens, replica.num_hit_tokens


async def _first_byte_s(port: int, body: bytes) -> float:
    loop = asyncio.get_running_loop()
    started = loop.time()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    answer = await reader.readuntil(b"\n\n")
    assert answer.startswith(b"HTTP/1.1 200") and EVENT in answer, answer[:200]
    seconds = loop.time() - started
    rest = await reader.read()
    assert rest.endswith(b"0\r\n\r\n") and b"error" not in rest, rest[-200:]
    writer.close()
    return seconds


def _quantile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


# ---- the router's own cost


def measure_cost(num_requests: int = 400, concurrency: int = 8) -> dict[str, float]:
    """CPU time of a router process, per request and per chunk, from streams of 16 and of 256 chunks."""
    with (
        null_server(Behaviour(ttft_s=0.001, itl_s=0.001)) as one,
        null_server(Behaviour(ttft_s=0.001, itl_s=0.001)) as two,
    ):
        command = [sys.executable, "-m", "headrace", "route", one.address, two.address, "--port", "0"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            port = int(next(line for line in process.stderr if "routing to" in line).rpartition(":")[2])
            try:
                router = psutil.Process(process.pid)
                asyncio.run(_ask_many(port, num_requests, concurrency, 16))  # warm-up
                short = _cpu_s(router, lambda: asyncio.run(_ask_many(port, num_requests, concurrency, 16)))
                long = _cpu_s(router, lambda: asyncio.run(_ask_many(port, num_requests, concurrency, 256)))
            finally:
                process.terminate()
    per_chunk = (long - short) / num_requests / (256 - 16)
    return {"cpu_us_per_chunk": per_chunk * 1e6, "cpu_us_per_request": (short / num_requests - 16 * per_chunk) * 1e6}


def _cpu_s(process: psutil.Process, act: Callable[[], None]) -> float:
    before = process.cpu_times()
    act()
    after = process.cpu_times()
    return float(after.user + after.system - before.user - before.system)


async def _ask_many(port: int, num_requests: int, concurrency: int, num_tokens: int) -> None:
    rng = random.Random(0)
    bodies = [
        json.dumps({"model": "null", "stream": True, "max_tokens": num_tokens, "prompt": _text(rng, 500)}).encode()
        for _ in range(num_requests)
    ]

    async def work() -> None:
        while bodies:
            body = bodies.pop()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert (await reader.read()).count(b"data:") >= num_tokens
            writer.close()

    await asyncio.gather(*(work() for _ in range(concurrency)))


# ---- the record


def table(record: dict[str, Any]) -> str:
    lines = [
        "| workload | policy | hit rate | TTFT p50 | TTFT p95 | requests at the busiest replica, of the mean |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for workload in WORKLOADS:
        for policy in POLICIES:
            runs = [run for run in record["runs"] if (run["workload"], run["policy"]) == (workload, policy)]
            hit, half, most, busiest = (
                median(run[name] for run in runs) for name in ("hit_rate", "ttft_p50_s", "ttft_p95_s", "busiest_share")
            )
            lines.append(
                f"| {workload} | {policy} | {hit:.0%} | {half * 1e3:,.0f} ms | {most * 1e3:,.0f} ms | {busiest:.2f}x |"
            )
    return "".join(f"{line}\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=50.0)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--markdown", type=Path, help="print the table of a record, and run nothing")
    parser.add_argument("--cost", type=Path, help="measure the router's CPU time, and add it to this record")
    given = parser.parse_args()
    if given.cost is not None:
        record = json.loads(given.cost.read_text(encoding="utf-8"))
        record["cost"] = measure_cost()
        given.cost.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(record["cost"])
        return
    if given.markdown is not None:
        print(table(json.loads(given.markdown.read_text(encoding="utf-8"))), end="")
        return
    from about import commit, cpu_name  # beside this file; the test of the docs imports only `table`

    record = {
        "what": "headrace route in front of simulated replicas; no model was computed",
        "command": f"python benchmarks/routing.py --rounds {given.rounds} --seconds {given.seconds:g}",
        "commit": commit(),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "num_cores": os.cpu_count(),
        "simulated": {
            "num_replicas": NUM_REPLICAS,
            "cache_tokens": CACHE_TOKENS,
            "prefill_tokens_per_s": PREFILL_TOKENS_PER_S,
            "num_output_tokens": NUM_OUTPUT,
            "seconds_per_token": TOKEN_S,
            "requests_per_s": {name: rate for name, (_, rate) in WORKLOADS.items()},
        },
        "choice": {
            "load_factor": choice.LOAD_FACTOR,
            "load_slack": choice.LOAD_SLACK,
            "min_match_share": choice.MIN_MATCH_SHARE,
            "pending_weight": choice.PENDING_WEIGHT,
        },
        "runs": [],
    }
    jobs = [
        (policy, workload, number) for number in range(given.rounds) for workload in WORKLOADS for policy in POLICIES
    ]
    with ProcessPoolExecutor(given.processes, mp_context=multiprocessing.get_context("spawn")) as processes:
        record["runs"] = list(processes.map(run_one, *zip(*jobs, strict=True), repeat(given.seconds)))
    print(table(record), end="")
    if given.output is not None:
        given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
