"""Throughput against latency: C clients in a closed loop stream /v1/completions from a `headrace serve` of their own.

Usage: python benchmarks/serving.py --model llama-3.2-1b [--concurrency 16 64 256 512] [--offline] [--json FILE]

A client sends its next request when the last has ended: prompts of random token ids, answers of a fixed length, end of
sequence ignored, temperature 1. Models named by their shape have random weights and a stand-in tokenizer. `--offline`
gives the same requests to `LLM.generate` too, in a process of its own after the server has gone.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import multiprocessing
import multiprocessing.pool
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from about import commit, cpu_name
from gpu_workloads import SHAPES

WARM_UP = (8, 16)  # clients, requests
FIRST_ID, LAST_ID = 1000, 40_000
END, DONE = b"0\r\n\r\n", b"data: [DONE]"
# vLLM 0.26.0's server with its defaults on one H200: output tokens/s, p95 of the time to the first token, p95 of the
# time a token, milliseconds.
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
class Load:
    """What one level asks for."""

    model: str
    port: int
    num_clients: int
    num_requests: int
    prompt_len: int
    answer_len: int
    seed: int

    def bodies(self) -> Iterator[bytes]:
        rng = random.Random(self.seed)
        for _ in range(self.num_requests):
            prompt = [rng.randrange(FIRST_ID, LAST_ID) for _ in range(self.prompt_len)]
            yield json.dumps(self.request(prompt)).encode()

    def request(self, prompt: list[int]) -> dict[str, Any]:
        limits = {"max_tokens": self.answer_len, "min_tokens": self.answer_len, "ignore_eos": True}
        return {"model": self.model, "prompt": prompt, "temperature": 1.0, "stream": True, **limits}


@dataclass(frozen=True)
class Timing:
    first_s: float  # until the first token
    per_token_s: float  # after it
    total_s: float


class Connection(asyncio.Protocol):
    """One client. Reads no more of an answer than when it begins and when it ends."""

    def __init__(self) -> None:
        self._ended: asyncio.Future[None] | None = None
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    async def ask(self, body: bytes, answer_len: int) -> Timing:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        self._tail, self._first_at, self._text_at = b"", 0.0, 0.0
        self._ended = asyncio.get_running_loop().create_future()
        asked_at = perf_counter()
        self._transport.write(head.encode() + b"\r\n\r\n" + body)
        await self._ended
        per_token_s = (self._text_at - self._first_at) / max(1, answer_len - 1)
        return Timing(self._first_at - asked_at, per_token_s, self._text_at - asked_at)

    def data_received(self, data: bytes) -> None:
        assert self._ended is not None
        seen = self._tail + data
        if not self._tail and not seen.startswith(b"HTTP/1.1 200"):
            self._ended.set_exception(RuntimeError(f"refused: {seen[:600]!r}"))
            return
        if b'"text"' in seen:
            self._text_at = perf_counter()
            self._first_at = self._first_at or self._text_at
        if seen.endswith(END):
            assert DONE in seen[-200:], seen[-300:]
            self._ended.set_result(None)
        self._tail = seen[-160:]

    def connection_lost(self, error: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(RuntimeError(f"the server hung up: {error}"))


async def drive(load: Load) -> tuple[float, list[Timing]]:
    """All requests of a load; seconds, and how each went."""
    loop, timings = asyncio.get_running_loop(), []
    bodies = list(load.bodies())
    connections = [
        (await loop.create_connection(Connection, "127.0.0.1", load.port))[1] for _ in range(load.num_clients)
    ]
    left = iter(bodies)

    async def client(connection: Connection) -> None:
        for body in left:
            timings.append(await connection.ask(body, load.answer_len))

    started = perf_counter()
    await asyncio.gather(*(client(connection) for connection in connections))
    return perf_counter() - started, timings


def drive_in_process(load: Load, barrier: Any, results: Any) -> None:
    import uvloop

    barrier.wait()
    results.put(uvloop.run(drive(load)))


def measure(load: Load, num_processes: int) -> dict[str, Any]:
    """The load, its clients shared out to so many processes."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(num_processes), context.Queue()
    parts = [
        Load(**{**vars(load), "num_clients": load.num_clients // num_processes,
                "num_requests": load.num_requests // num_processes, "seed": load.seed + 1000 * i})
        for i in range(num_processes)
    ]  # fmt: skip
    processes = [context.Process(target=drive_in_process, args=(part, barrier, results)) for part in parts]
    for process in processes:
        process.start()
    found = [results.get(timeout=900) for _ in processes]
    for process in processes:
        process.join()
    seconds = max(seconds for seconds, _ in found)
    timings = [timing for _, part in found for timing in part]
    return {
        "concurrency": load.num_clients,
        "requests": len(timings),
        "seconds": round(seconds, 2),
        "req_s": round(len(timings) / seconds, 2),
        "out_tok_s": round(len(timings) * load.answer_len / seconds),
        **{f"ttft_ms_p{p}": round(1e3 * quantile([t.first_s for t in timings], p), 1) for p in (50, 95)},
        **{f"tpot_ms_p{p}": round(1e3 * quantile([t.per_token_s for t in timings], p), 2) for p in (50, 95)},
        "total_s_p95": round(quantile([t.total_s for t in timings], 95), 2),
    }


def quantile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


@contextmanager
def serving(flags: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """A server of our own: its port, and how long it took to start."""
    command = [sys.executable, "-m", "headrace", "serve", "--port", "0", *flags]
    started = perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if (found := re.search(r"serving .* on http://[^ ]*:(\d+)", line)) is not None:
                break
        else:
            raise RuntimeError("the server did not start:\n" + "".join(lines))
        drain = multiprocessing.pool.ThreadPool(1)  # so that its log never fills the pipe
        drain.apply_async(lambda: [None for _ in process.stderr])
        yield int(found[1]), {"ready_seconds": round(perf_counter() - started, 1)}
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


OFFLINE = """
import json, sys
from time import perf_counter
from headrace import LLM, SamplingParams
given = json.loads(sys.argv[1])
with LLM(given.pop("model"), **given.pop("settings")) as llm:
    params = SamplingParams(max_tokens=given["answer_len"], ignore_eos=True, detokenize=given["detokenize"])
    llm.generate(given["prompts"][:16], params, use_tqdm=False)
    llm.forget_prefixes()
    started = perf_counter()
    outputs = llm.generate(given["prompts"], params, use_tqdm=False)
    print(json.dumps(sum(len(o.outputs[0].token_ids) for o in outputs) / (perf_counter() - started)))
"""


def offline_rate(model: str, settings: dict[str, Any], load: Load) -> float:
    """Output tokens/s of the same requests, all given at once to an `LLM`."""
    prompts = [json.loads(body)["prompt"] for body in load.bodies()]
    given = {
        "model": model,
        "settings": settings,
        "answer_len": load.answer_len,
        "prompts": prompts,
        "detokenize": True,
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(given))
        file.flush()
        code = OFFLINE.replace("sys.argv[1]", f"open({file.name!r}).read()")
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A stand-in: the bytes, then a made-up word for each id that is left."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {f"<w{i}>": i for i in range(len(vocab), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


@contextmanager
def model_of(name: str, dtype: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What to load for a name, and with which settings."""
    if name not in SHAPES:
        yield name, {}
        return
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SHAPES[name]))
        write_tokenizer(Path(directory), SHAPES[name]["vocab_size"])
        settings = {"load_format": "random", "max_model_len": 4096}
        yield directory, settings | ({"quantization": "fp8", "kv_cache_dtype": "fp8"} if dtype == "fp8" else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help=f"{', '.join(SHAPES)}, or any model")
    parser.add_argument("--dtype", default="auto", choices=["auto", "fp8"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16, 64, 256, 512])
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--answer-len", type=int, default=128)
    parser.add_argument("--requests", type=int, help="of each level; default: four for each client, at least 64")
    parser.add_argument("--client-processes", type=int, default=1)
    parser.add_argument("--offline", action="store_true", help="the rate of LLM.generate too")
    parser.add_argument("--commit")
    parser.add_argument("--json", type=Path, help="append the records to this file")
    given = parser.parse_args()
    with model_of(given.model, given.dtype) as (model, settings):
        records = list(levels(given, model, settings))
    if given.json is not None:
        with given.json.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


def levels(given: argparse.Namespace, model: str, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    flags = ["--model", model, "--served-model-name", "model"]
    flags += ["--max-num-queued-reqs", str(2 * max(given.concurrency))]
    flags += [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]

    def load(num_clients: int, num_requests: int) -> Load:
        return Load("model", port, num_clients, num_requests, given.prompt_len, given.answer_len, num_clients)

    found = []
    with serving(flags) as (port, facts):
        measure(load(*WARM_UP), 1)
        for num_clients in given.concurrency:
            num_requests = given.requests or max(64, 4 * num_clients)
            record = measure(load(num_clients, num_requests), min(num_clients, given.client_processes))
            print(json.dumps(record), flush=True)
            found.append(record | facts)
    if given.offline:
        largest = max(given.concurrency)
        rate = offline_rate(model, settings, load(largest, given.requests or max(64, 4 * largest)))
        print(f"offline: {rate:,.0f} output tokens/s", flush=True)
        found[-1]["offline_out_tok_s"] = round(rate)
    for record in found:
        yield about(given, record)


def about(given: argparse.Namespace, record: dict[str, Any]) -> dict[str, Any]:
    vllm = VLLM.get((given.model, record["concurrency"]))
    beside = dict(zip(("vllm_out_tok_s", "vllm_ttft_ms_p95", "vllm_tpot_ms_p95"), vllm, strict=True)) if vllm else {}
    return {
        "model": given.model,
        "dtype": given.dtype,
        "prompt_len": given.prompt_len,
        "answer_len": given.answer_len,
        **record,
        **beside,
        "client_processes": given.client_processes,
        "device": device_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": given.commit or commit(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "uvicorn", "uvloop")},
        "command": "python benchmarks/serving.py " + " ".join(sys.argv[1:]),
    }


def device_name() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    main()
