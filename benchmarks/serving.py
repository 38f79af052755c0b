"""Throughput against latency: closed-loop clients stream /v1/completions from a `headrace serve` that this starts.

Usage: python benchmarks/serving.py --model llama-3.2-1b [--concurrency 16 64 256 512] [--offline] [--json FILE]

A client sends its next request when the last has ended: prompts of random token ids, answers of a fixed length, end of
sequence ignored, temperature 1. With equal lengths requests start and end together. With `--spread` lengths vary, and
prefills mix with decodes, as in most traffic. Models named by their shape have random weights and a stand-in tokenizer.
`--offline` also gives the same requests to `LLM.generate`, in its own process after the server has stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.metadata
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from time import monotonic, perf_counter, process_time
from typing import Any

import psutil
from about import commit, cpu_name

from headrace.bench.engines.shapes import SHAPES, write_shape

WARM_UP = (8, 16)  # clients, requests
FIRST_ID, VLLM_LAST_ID = 1000, 100_000
LAST_ID = {"smollm2": 40_000}  # last token id of prompts for other models
END, DONE = b"0\r\n\r\n", b"data: [DONE]"
# vLLM 0.26.0's server with its defaults on one H200: output tokens/s, p95 of the time to the first token (ms), p95 of
# the time per output token (ms).
VLLM = {
    ("llama-3.2-1b", 16): (4473, 98, 3.28),
    ("llama-3.2-1b", 64): (11499, 226, 5.05),
    ("llama-3.2-1b", 256): (9631, 824, 23.5),
    ("llama-3.2-1b", 512): (12826, 2799, 38.7),
    ("llama-3.1-8b", 16): (2346, 228, 6.0),
    ("llama-3.1-8b", 64): (5024, 820, 10.7),
    ("llama-3.1-8b", 256): (5716, 3153, 40.0),
    ("llama-3.1-8b", 512): (6215, 5527, 73.5),
}


@dataclass(frozen=True)
class CompletionRequest:
    """A prompt and the length of its answer."""

    prompt: list[int]
    answer_len: int

    def body(self) -> bytes:
        limits = {"max_tokens": self.answer_len, "min_tokens": self.answer_len, "ignore_eos": True}
        asked = {"model": "model", "prompt": self.prompt, "temperature": 1.0, "stream": True, **limits}
        return json.dumps(asked).encode()


@dataclass(frozen=True)
class Load:
    """The requests of one concurrency level."""

    port: int
    num_clients: int
    num_requests: int
    prompt_len: int
    answer_len: int
    spread: float  # lengths vary uniformly by this share in both directions
    last_id: int  # of the tokens in prompts
    seed: int

    def requests(self) -> list[CompletionRequest]:
        rng = random.Random(self.seed)

        def varied(length: int) -> int:
            return rng.randint(max(1, round(length * (1 - self.spread))), round(length * (1 + self.spread)))

        return [
            CompletionRequest(
                [rng.randrange(FIRST_ID, self.last_id) for _ in range(varied(self.prompt_len))], varied(self.answer_len)
            )
            for _ in range(self.num_requests)
        ]

    def clients_of(self, index: int, num_processes: int) -> int:
        return self.num_clients * (index + 1) // num_processes - self.num_clients * index // num_processes


@dataclass(frozen=True)
class Timing:
    """Latencies of one answer, measured as for vLLM's figures above.

    `first_s`: from the request (including a new connection) to the first chunk. `per_token_s`: from the first to the
    last chunk, per token after the first. `total_s`: from the request to the last chunk.
    """

    num_tokens: int
    first_s: float
    per_token_s: float
    total_s: float


@dataclass(frozen=True)
class Part:
    """The results of one client process. Times are of the clock that all processes share."""

    started_at: float
    ended_at: float
    cpu_s: float
    timings: list[Timing]


class Connection(asyncio.Protocol):
    """One client. Only looks for the start and the end of an answer."""

    def __init__(self) -> None:
        self._ended: asyncio.Future[None] | None = None
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    async def ask(self, body: bytes, answer_len: int, asked_at: float) -> Timing:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        self._tail, self._first_at, self._text_at = b"", 0.0, 0.0
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(head.encode() + b"\r\n\r\n" + body)
        await self._ended
        per_token_s = (self._text_at - self._first_at) / max(1, answer_len - 1)
        return Timing(answer_len, self._first_at - asked_at, per_token_s, self._text_at - asked_at)

    def data_received(self, data: bytes) -> None:
        assert self._ended is not None
        if not self._tail and not data.startswith(b"HTTP/1.1 200"):
            self._ended.set_exception(RuntimeError(f"refused: {data[:600]!r}"))
            return
        if b'"text"' in data:
            self._text_at = monotonic()
            self._first_at = self._first_at or self._text_at
        self._tail = (self._tail + data)[-200:]
        if self._tail.endswith(END):
            assert DONE in self._tail, self._tail
            self._ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(RuntimeError(f"the server closed the connection: {error}"))


class Counter:
    """Hands out numbers from 0 on, each to one of several processes."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def take(self) -> int:
        with self._value.get_lock():
            self._value.value += 1
            return int(self._value.value) - 1


async def drive(load: Load, num_clients: int, bodies: list[tuple[bytes, int]], counter: Counter) -> Part:
    """Run clients of a load. They share its requests with the clients of other processes."""
    loop, timings = asyncio.get_running_loop(), list[Timing]()

    async def client() -> None:
        connection: Connection | None = None
        while (number := counter.take()) < load.num_requests:
            asked_at = monotonic()
            if connection is None:
                _, connection = await loop.create_connection(Connection, "127.0.0.1", load.port)
            timings.append(await connection.ask(*bodies[number], asked_at))

    started_at, cpu_s = monotonic(), process_time()
    await asyncio.gather(*(client() for _ in range(num_clients)))
    return Part(started_at, monotonic(), process_time() - cpu_s, timings)


def drive_in_process(load: Load, num_clients: int, value: Any, barrier: Any, results: Any) -> None:
    import uvloop

    bodies = [(asked.body(), asked.answer_len) for asked in load.requests()]
    gc.freeze()
    barrier.wait()
    try:
        results.put(uvloop.run(drive(load, num_clients, bodies, Counter(value))))
    except Exception as error:  # noqa: BLE001  reported by the parent process
        results.put(error)


def measure(load: Load, num_processes: int) -> dict[str, Any]:
    """Run the load with its clients spread over processes, and summarize."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(num_processes), context.Queue()
    value = context.Value("q", 0)
    processes = [
        context.Process(
            target=drive_in_process,
            args=(load, load.clients_of(index, num_processes), value, barrier, results),
            daemon=True,
        )
        for index in range(num_processes)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=300) for _ in processes]
    for part in found:
        if isinstance(part, Exception):
            raise part
    seconds = max(part.ended_at for part in found) - min(part.started_at for part in found)
    timings = [timing for part in found for timing in part.timings]
    assert len(timings) == load.num_requests
    return {
        "concurrency": load.num_clients,
        "requests": len(timings),
        "seconds": round(seconds, 2),
        "req_s": round(len(timings) / seconds, 2),
        "out_tok_s": round(sum(timing.num_tokens for timing in timings) / seconds),
        **{f"ttft_ms_p{p}": round(1e3 * quantile([t.first_s for t in timings], p), 1) for p in (50, 95)},
        **{f"tpot_ms_p{p}": round(1e3 * quantile([t.per_token_s for t in timings], p), 2) for p in (50, 95)},
        "total_s_p95": round(quantile([t.total_s for t in timings], 95), 2),
        "client_busy": round(max(part.cpu_s for part in found) / seconds, 2),
    }


def quantile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


class Server:
    """A `headrace serve` process."""

    def __init__(self, flags: list[str]) -> None:
        command = [sys.executable, "-m", "headrace", "serve", "--port", "0", *flags]
        started = perf_counter()
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        self.log: deque[str] = deque(maxlen=200)
        for line in self._process.stderr:
            self.log.append(line)
            if (found := re.search(r"serving .* on http://[^ ]*:(\d+)", line)) is not None:
                break
        else:
            raise RuntimeError("the server did not start:\n" + "".join(self.log))
        self.port, self.ready_s = int(found[1]), perf_counter() - started
        # Drains the log, which would otherwise fill the pipe.
        threading.Thread(target=lambda: self.log.extend(self._process.stderr or ()), daemon=True).start()

    def cpu_seconds(self) -> list[float]:
        """CPU seconds of the front and of its engine's process."""
        front = psutil.Process(self._process.pid)
        return [sum(process.cpu_times()[:2]) for process in (front, *front.children())]

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)


@contextmanager
def serving(flags: list[str]) -> Iterator[Server]:
    server = Server(flags)
    try:
        yield server
    except BaseException:
        print("".join(server.log), file=sys.stderr)
        raise
    finally:
        server.stop()


OFFLINE = """
import json, sys
from time import perf_counter
from headrace import LLM, SamplingParams
given = json.loads(sys.argv[1])
with LLM(given.pop("model"), **given.pop("settings")) as llm:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in given["answer_lens"]]
    llm.generate(given["prompts"][:16], params[:16], use_tqdm=False)
    llm.forget_prefixes()
    started = perf_counter()
    outputs = llm.generate(given["prompts"], params, use_tqdm=False)
    print(json.dumps(sum(len(o.outputs[0].token_ids) for o in outputs) / (perf_counter() - started)))
"""


def offline_rate(model: str, settings: dict[str, Any], load: Load) -> float:
    """Output tokens/s of an `LLM` that gets the same requests at once."""
    asked = load.requests()
    given = {
        "model": model,
        "settings": settings,
        "answer_lens": [each.answer_len for each in asked],
        "prompts": [each.prompt for each in asked],
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(given))
        file.flush()
        code = OFFLINE.replace("sys.argv[1]", f"open({file.name!r}).read()")
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


@contextmanager
def model_of(name: str, dtype: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the model to load for a name, and its settings."""
    if name not in SHAPES:
        yield name, {}
        return
    with tempfile.TemporaryDirectory() as directory:
        write_shape(Path(directory), SHAPES[name])
        settings = {"load_format": "random", "max_model_len": 4096}
        yield directory, settings | ({"quantization": "fp8", "kv_cache_dtype": "fp8"} if dtype == "fp8" else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help=f"{', '.join(SHAPES)}, or any model")
    parser.add_argument("--dtype", default="auto", choices=["auto", "fp8"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16, 64, 256, 512])
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--answer-len", type=int, default=128)
    parser.add_argument("--spread", type=float, default=0.0, help="share by which lengths vary around those given")
    parser.add_argument("--requests", type=int, help="per concurrency level; default: four per client, at least 64")
    parser.add_argument("--client-processes", type=int, default=max(1, min(6, ((os.cpu_count() or 1) - 4) // 2)))
    parser.add_argument("--offline", action="store_true", help="also measure LLM.generate")
    parser.add_argument("--commit")
    parser.add_argument("--json", type=Path, help="append each record to this file")
    given = parser.parse_args()
    if not 0 <= given.spread < 1:
        parser.error(f"--spread must be at least 0 and less than 1, got {given.spread:g}")
    with model_of(given.model, given.dtype) as (model, settings):
        for record in levels(given, model, settings):
            print(json.dumps(record), flush=True)
            if given.json is not None:
                with given.json.open("a") as file:
                    file.write(json.dumps(about(given, record)) + "\n")


def levels(given: argparse.Namespace, model: str, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a record per concurrency level, and one of the offline rate compared with the largest level."""
    flags = ["--model", model, "--served-model-name", "model"]
    flags += ["--max-num-queued-reqs", str(2 * max(WARM_UP[0], *given.concurrency))]
    flags += [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    last_id = LAST_ID.get(given.model, VLLM_LAST_ID)

    def load(port: int, num_clients: int, num_requests: int) -> Load:
        lens = (given.prompt_len, given.answer_len, given.spread)
        return Load(port, num_clients, num_requests, *lens, last_id, num_clients)

    rates = {}
    with serving(flags) as server:
        measure(load(server.port, *WARM_UP), 1)
        for num_clients in given.concurrency:
            asked = load(server.port, num_clients, num_requests_of(given, num_clients))
            before = server.cpu_seconds()
            record = measure(asked, min(num_clients, given.client_processes))
            used = [after - start for after, start in zip(server.cpu_seconds(), before, strict=True)]
            rates[num_clients] = record["out_tok_s"]
            for name, seconds in zip(("front_cpu_s", "engine_cpu_s"), used, strict=False):
                record[name] = round(seconds, 2)
            yield record | {"ready_seconds": round(server.ready_s, 1)}
    if given.offline:
        largest = max(given.concurrency)
        rate = offline_rate(model, settings, load(0, largest, num_requests_of(given, largest)))
        yield {"offline_out_tok_s": round(rate), "concurrency": largest, "share": round(rates[largest] / rate, 3)}


def num_requests_of(given: argparse.Namespace, num_clients: int) -> int:
    return given.requests or max(64, 4 * num_clients)


def about(given: argparse.Namespace, record: dict[str, Any]) -> dict[str, Any]:
    is_comparable = "out_tok_s" in record and not given.spread
    vllm = VLLM.get((given.model, record["concurrency"])) if is_comparable else None
    reference = dict(zip(("vllm_out_tok_s", "vllm_ttft_ms_p95", "vllm_tpot_ms_p95"), vllm, strict=True)) if vllm else {}
    return {
        "model": given.model,
        "dtype": given.dtype,
        "prompt_len": given.prompt_len,
        "answer_len": given.answer_len,
        **({"spread": given.spread} if given.spread else {}),
        **record,
        **reference,
        "client_processes": given.client_processes,
        "device": device_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": given.commit or commit(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "uvicorn", "uvloop")},
        "command": "python benchmarks/serving.py " + " ".join(sys.argv[1:]),
    }


@cache
def device_name() -> str:
    """Ask the driver: torch would take GPU memory."""
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return f"{cpu_name()}, {os.cpu_count()} threads"
    return found[0]


if __name__ == "__main__":
    main()
