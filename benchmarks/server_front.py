"""The cost of the HTTP front: streamed tokens per second on one core, and the latency that it adds.

Usage: python benchmarks/server_front.py [--streams 64 512] [--rates 20000] [--seconds 5] [--output results.json]

The whole server (protocol, gate, request queue, application, metrics) runs in its own process, pinned to one core, over
a fake engine: its thread delivers one token per stream in every step, all at once, at a given rate. A client in another
process reads all streams. The latency of a token is the time from its delivery to its arrival in the client. First
tokens, which all come in one step here, are reported separately; the first tenth of the steps, which they delay, is
left out. Other processes on the machine disturb wall-clock times, so the CPU time per token of the server's process,
fake engine included, is recorded too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

TEXT = " tok"  # of every token, so that a client can count tokens
TOKEN = 1
MAX_TOKENS = 1 << 13


@dataclass(frozen=True)
class Result:
    endpoint: str
    streams: int
    offered_tokens_per_s: float
    tokens_per_s: float
    latency_p50_ms: float
    latency_p99_ms: float
    latency_max_ms: float
    first_token_p99_ms: float
    cpu_us_per_token: float
    core_busy: float


# ---- the server's process


class FakeClient:
    """A fake engine client that delivers tokens at a fixed rate, one per stream in every step."""

    failure = None
    stats = None

    def __init__(self, deliver: Callable[[list[Any]], None], times: np.ndarray) -> None:
        self._deliver = deliver
        self._times = times  # [tokens, streams]: time of each delivery
        self._lock = threading.Lock()
        self._streams: dict[str, int] = {}
        self._unwatched: set[str] = set()  # get events with their first token and at their end only
        self._go = threading.Event()
        self.rate = 0.0
        self.num_steps = 0
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, request: Any) -> None:
        with self._lock:
            self._streams[request.request_id] = int(request.request_id.split("-")[1])
            if not request.watched:
                self._unwatched.add(request.request_id)

    @property
    def num_submitted(self) -> int:
        with self._lock:
            return len(self._streams)

    def abort(self, request_id: str, index: int | None = None) -> None:
        with self._lock:
            self._streams.pop(request_id, None)

    def start(self, rate: float, num_steps: int) -> None:
        self.rate, self.num_steps = rate, num_steps
        self._go.set()

    def close(self) -> None:
        pass

    def _run(self) -> None:
        from headrace.types import SequenceEvent, SequenceTiming

        one = np.array([TOKEN], np.int32)
        while True:
            self._go.wait()
            self._go.clear()
            with self._lock:
                streams, unwatched = dict(self._streams), set(self._unwatched)
            rest = np.full(self.num_steps - 1, TOKEN, np.int32)
            numbers = np.array(list(streams.values()))
            interval = len(streams) / self.rate
            began = time.monotonic()
            for step in range(self.num_steps):
                if (left := began + step * interval - time.monotonic()) > 0:
                    time.sleep(left)
                is_last = step == self.num_steps - 1
                reason = "length" if is_last else None
                timing = SequenceTiming(began, began, began) if is_last or step == 0 else None
                notified = streams if timing is not None else streams.keys() - unwatched if unwatched else streams
                events = [
                    SequenceEvent(name, 0, rest if is_last and name in unwatched else one, reason, timing=timing)
                    for name in notified
                ]
                self._times[step, numbers] = time.monotonic()
                self._deliver(events)
            with self._lock:
                self._streams.clear()
                self._unwatched.clear()


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    from headrace.text import ChatTemplate, Tokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": 0, "Ġtok": TOKEN} | {letter: 2 + i for i, letter in enumerate(letters)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    return Tokenizer(backend, chat_template=template)


def take_core(core: int, is_realtime: bool) -> None:
    os.sched_setaffinity(0, {core})
    if is_realtime:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))


def serve(core: int, is_realtime: bool, times_path: str, num_streams: int, pipe: Any) -> None:
    take_core(core, is_realtime)
    from headrace.engine.async_engine import AsyncEngine
    from headrace.server.http.keys import Keys
    from headrace.server.http.lifecycle import run_on_uvloop
    from headrace.server.options import ServerOptions
    from headrace.server.serve import Server

    times = np.memmap(times_path, np.float64, "r+", shape=(MAX_TOKENS, num_streams))
    times[:] = 0.0  # touches its pages before they are needed
    clients: list[FakeClient] = []

    def start(deliver: Callable[[list[Any]], None]) -> Any:
        clients.append(FakeClient(deliver, times))
        return fake_engine(clients[0], num_streams)

    engine = AsyncEngine.over(start)
    options = ServerOptions(max_connections=4 * num_streams)
    keys = Keys(options, environ={}, print_line=print)
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    pipe.send(listener.getsockname()[1])

    def run_commands() -> None:
        while True:
            match pipe.recv():
                case ("start", rate, num_steps):
                    clients[0].start(rate, num_steps)
                case "submitted":
                    pipe.send(clients[0].num_submitted)
                case "cpu":
                    pipe.send(time.process_time())

    async def run() -> int:
        return await Server(engine, options, keys, model_name="fake", print_line=print).lifecycle.run(listener)

    threading.Thread(target=run_commands, daemon=True).start()
    run_on_uvloop(run())


def fake_engine(client: FakeClient, num_streams: int) -> Any:
    from headrace.engine.fake_settings import fake_settings

    tokenizer = make_tokenizer()
    settings = fake_settings(
        load_format="auto",
        max_model_len=1 << 20,
        max_num_seqs=num_streams,
        max_num_batched_tokens=8192,
        num_blocks=1 << 20,
    )
    return SimpleNamespace(
        client=client,
        settings=settings,
        spec=fake_spec(tokenizer.vocab_size),
        tokenizer=tokenizer,
        eos_token_ids=(0,),
        grammars=None,
    )


def fake_spec(vocab_size: int) -> Any:
    """What the server tells of its model."""
    return SimpleNamespace(
        family="llama",
        num_params=1_000_000,
        num_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        vocab_size=vocab_size,
        mixture=None,
        max_model_len=1 << 20,
    )


# ---- the client's process


class Reader(asyncio.Protocol):
    """Counts the tokens of one stream as they arrive."""

    def __init__(self, number: int, shared: Shared) -> None:
        self._number = number
        self._shared = shared
        self._end = b""
        self._num_seen = 0
        self._has_ended = False

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        data = self._end + data
        num_new = data.count(TEXT.encode())
        if num_new:
            self._end = data[data.rfind(TEXT.encode()) + len(TEXT) :]
            self._shared.arrivals.append((self._number, self._num_seen, num_new, now))
            self._num_seen += num_new
        else:
            self._end = data
        if not self._has_ended and (b"[DONE]" in self._end or b'"usage"' in self._end):
            self._has_ended = True
            self._shared.ended()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._has_ended:
            self._shared.fail(f"a stream broke: {error}, {self._end!r}")


class Shared:
    def __init__(self, num_streams: int) -> None:
        self.arrivals: list[tuple[int, int, int, float]] = []
        self._num_left = num_streams
        self.done = asyncio.get_running_loop().create_future()

    def ended(self) -> None:
        self._num_left -= 1
        if self._num_left == 0 and not self.done.done():
            self.done.set_result(None)

    def fail(self, message: str) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(message))


def request_bytes(endpoint: str, number: int, *, is_streamed: bool = True) -> bytes:
    body: dict[str, Any] = {"stream": is_streamed, "request_id": f"{number}", "max_tokens": MAX_TOKENS}
    body |= {"messages": [{"role": "user", "content": "hi"}]} if "chat" in endpoint else {"prompt": "hi"}
    encoded = json.dumps(body).encode()
    head = f"POST {endpoint} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(encoded)}"
    return head.encode() + b"\r\n\r\n" + encoded


async def measure(
    endpoint: str,
    port: int,
    pipe: Any,
    times: np.ndarray,
    *,
    streams: int,
    rate: float,
    seconds: float,
    is_streamed: bool = True,
) -> Result:
    loop = asyncio.get_running_loop()
    shared = Shared(streams)
    transports = []
    for number in range(streams):
        transport, _ = await loop.create_connection(lambda n=number: Reader(n, shared), "127.0.0.1", port)
        transport.write(request_bytes(endpoint, number, is_streamed=is_streamed))
        transports.append(transport)
    while ask(pipe, "submitted") < streams:  # none has got anything yet
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.2)
    num_steps = min(MAX_TOKENS, max(16, int(seconds * rate / streams)))
    cpu = ask(pipe, "cpu")
    began = time.monotonic()
    pipe.send(("start", rate, num_steps))
    await shared.done
    took = time.monotonic() - began
    cpu = ask(pipe, "cpu") - cpu
    for transport in transports:
        transport.close()
    return summary(endpoint, streams, rate, num_steps, shared.arrivals, times, took, cpu)


def ask(pipe: Any, question: str) -> float:
    pipe.send(question)
    return float(pipe.recv())


def summary(
    endpoint: str,
    streams: int,
    rate: float,
    num_steps: int,
    arrivals: list[tuple[int, int, int, float]],
    times: np.ndarray,
    took: float,
    cpu: float,
) -> Result:
    seen = [
        (now - times[first : first + count, number], np.arange(first, first + count))
        for number, first, count, now in arrivals
    ]
    latencies, steps = (np.concatenate(parts) for parts in zip(*seen, strict=True))
    num_tokens = streams * num_steps
    assert len(latencies) == num_tokens, f"{len(latencies):,} tokens of {num_tokens:,} arrived"
    steady = latencies[steps >= num_steps // 10]
    p50, p99 = np.percentile(steady, [50, 99])
    return Result(
        endpoint=endpoint,
        streams=streams,
        offered_tokens_per_s=rate,
        tokens_per_s=round(num_tokens / took, 1),
        latency_p50_ms=round(1e3 * float(p50), 3),
        latency_p99_ms=round(1e3 * float(p99), 3),
        latency_max_ms=round(1e3 * float(steady.max()), 3),
        first_token_p99_ms=round(1e3 * float(np.percentile(latencies[steps == 0], 99)), 3),
        cpu_us_per_token=round(1e6 * cpu / num_tokens, 2),
        core_busy=round(cpu / took, 3),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--rates", type=float, nargs="+", default=[20_000.0, 30_000.0])
    parser.add_argument("--endpoints", nargs="+", default=["/v1/chat/completions", "/v1/completions"])
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds per measurement")
    parser.add_argument("--server-core", type=int, default=0)
    parser.add_argument("--client-core", type=int, default=1)
    parser.add_argument("--whole", action="store_true", help="unstreamed answers; only the CPU time is meaningful")
    parser.add_argument("--realtime", action="store_true", help="schedule both processes with real-time priority")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(max(args.streams) * MAX_TOKENS * 8)
        results = run(args, file.name)
    if args.output is not None:
        args.output.write_text(json.dumps(record(results, args), indent=2) + "\n")


def run(args: argparse.Namespace, times_path: str) -> list[Result]:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(
        target=serve, args=(args.server_core, args.realtime, times_path, max(args.streams), theirs), daemon=True
    )
    process.start()
    take_core(args.client_core, args.realtime)
    port = ours.recv()
    times = np.memmap(times_path, np.float64, "r", shape=(MAX_TOKENS, max(args.streams)))
    results = []
    for endpoint in args.endpoints:
        for streams in args.streams:
            for rate in args.rates:
                one = measure(
                    endpoint,
                    port,
                    ours,
                    times,
                    streams=streams,
                    rate=rate,
                    seconds=args.seconds,
                    is_streamed=not args.whole,
                )
                results.append(asyncio.run(one))
                print(json.dumps(asdict(results[-1])))
    process.terminate()
    process.join()
    return results


def record(results: list[Result], args: argparse.Namespace) -> dict[str, Any]:
    import uvicorn
    import uvloop

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "benchmark": "server_front",
        "commit": commit,
        "realtime": args.realtime,
        "whole": args.whole,
        "load_average": os.getloadavg(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "uvicorn": uvicorn.__version__,
        "uvloop": uvloop.__version__,
        "machine": platform.machine(),
        "results": [asdict(result) for result in results],
    }


if __name__ == "__main__":
    main()
