"""Stages for `doctor_situations.py`: a server under load, benchmarks, and batch jobs of the real engine on a CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from headrace.bench.engines import RunningEngine
from headrace.bench.engines.headrace_engine import HeadraceEngine, as_flags, environment
from headrace.bench.engines.shapes import write_shape
from headrace.bench.load import ClosedLoop, Load, run_load
from headrace.bench.offline import measure_offline
from headrace.bench.online import measure_online
from headrace.bench.record import rounded
from headrace.bench.workloads import Workload, WorkloadSpec, build
from headrace.config import EMBEDDED_MODEL
from headrace.doctor.evidence import Evidence
from headrace.doctor.readers.live import read_live
from headrace.doctor.readers.records import evidence_of_record

FAULTS = Path(__file__).resolve().parent / "faults"
VOCABULARY = 49_152  # of the embedded model
INTERVAL_S = 3.0  # between the two scrapes, at least
MIN_STEPS = 25  # between the two scrapes, unless a situation has fewer and longer ones
MAX_WAIT_S = 60.0  # for them; what was computed until then is judged
START_S = 2.0  # of `headrace bench --url`, until it sends
# A model whose steps cost the device next to nothing: what is left is the host.
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "torch_dtype": "float32",
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": True,
}


def workload(
    input_len: int,
    output_len: int,
    num_requests: int = 1024,
    *,
    ends: Literal["exact", "random"] = "exact",
    spread: float = 0.0,
    vocabulary: int = VOCABULARY,
    seed: int = 0,
) -> Workload:
    """Random tokens, so that no prompts share a prefix. With ends="random", lengths are not known in advance."""
    spec = WorkloadSpec(
        name="random",
        input_len=input_len,
        output_len=output_len,
        num_requests=num_requests,
        ends=ends,
        spread=spread,
        seed=seed,
    )
    return build(spec.for_vocabulary(vocabulary))


def mixed(first: Workload, second: Workload, share: int) -> Workload:
    """Every `share`-th request is of the second workload."""
    pairs = zip(first.requests, second.requests, strict=True)
    return replace(first, requests=[b if i % share == 0 else a for i, (a, b) in enumerate(pairs, 1)])


def live(
    settings: Mapping[str, Any],
    work: Workload,
    concurrency: int,
    *,
    model: str = EMBEDDED_MODEL,
    env: Mapping[str, str] | None = None,
    pauses_front: bool = False,
    min_steps: int = MIN_STEPS,
) -> Evidence:
    """A server under a closed loop, scraped twice. With `pauses_front`, its HTTP process is stopped in bursts."""
    with faults(env), HeadraceEngine(model).start(settings, serves=True) as server, ExitStack() as stack:
        assert server.address is not None
        stack.enter_context(loaded(server, work, concurrency))
        _wait_for(lambda: server.counters().get("num_generated_tokens", 0.0) >= concurrency / 2)
        if pauses_front:
            stack.enter_context(paused(server.pids()[0]))
        num_before = server.counters()["num_steps"]

        def wait(seconds: float) -> None:
            """A busy machine computes slowly: the interval lasts until there is something to judge."""
            time.sleep(seconds)
            _wait_for(lambda: server.counters()["num_steps"] - num_before >= min_steps)

        return read_live(server.address, interval_s=INTERVAL_S, wait=wait)


@contextmanager
def loaded(server: RunningEngine, work: Workload, concurrency: int) -> Iterator[None]:
    """A closed loop in a process of its own, killed at the end: its last requests are not waited for."""
    load = ClosedLoop(concurrency=concurrency, seconds=2 * MAX_WAIT_S)
    options = {"model_name": server.model_name, "num_processes": 1, "timeout_s": 2 * MAX_WAIT_S}
    client = get_context("fork").Process(target=run_load, args=(server.address, work, load), kwargs=options)
    client.start()
    try:
        yield
    finally:
        client.kill()
        client.join()


def _wait_for(is_there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + MAX_WAIT_S
    while not is_there() and time.monotonic() < deadline:
        time.sleep(0.25)


@contextmanager
def faults(env: Mapping[str, str] | None) -> Iterator[None]:
    """Processes that are started meanwhile have the faults of `faults/sitecustomize.py` that these variables name."""
    path = os.pathsep.join(filter(None, (str(FAULTS), os.environ.get("PYTHONPATH"))))
    own = {"PYTHONPATH": path, **env} if env else {}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def offline(settings: Mapping[str, Any], work: Workload, *, model: str = EMBEDDED_MODEL) -> Evidence:
    with HeadraceEngine(model).start(settings, serves=False) as engine:
        record = measure_offline(engine, work, num_rounds=1)
    return evidence_of_record(written(record), origin="record.json")


def online(settings: Mapping[str, Any], work: Workload, load: Load) -> Evidence:
    with HeadraceEngine().start(settings, serves=True) as server:
        record = measure_online(server, work, [load]).record
    return evidence_of_record(written(record), origin="record.json")


def online_of_paused_client(settings: Mapping[str, Any], *arguments: str) -> Evidence:
    """`headrace bench --url` in a process of its own, which is stopped in bursts once it sends."""
    with HeadraceEngine().start(settings, serves=True) as server, tempfile.TemporaryDirectory() as directory:
        record = Path(directory) / "record.json"
        flags = ["--url", str(server.address), "--client-processes", "1", "--quiet", "-o", str(record)]
        flags += ["--workload", "random", "--input-len", "8", "--output-len", "16"]
        client = subprocess.Popen(
            [*_headrace("bench"), *flags, *arguments],
            env={**os.environ, **environment()},
            stdout=subprocess.DEVNULL,
        )
        try:
            time.sleep(START_S)
            with paused(client.pid):
                client.wait(timeout=300)
        finally:
            client.kill()
        return evidence_of_record(json.loads(record.read_text()), origin="record.json")


ENGINE_START_S = 10.0  # of a batch job, generously


def job(
    lines: Sequence[Mapping[str, Any]],
    *arguments: str,
    lines_per_s: float | None = None,
    env: Mapping[str, str] | None = None,
    **settings: Any,
) -> Evidence:
    """`headrace run` with its --json-summary. With `lines_per_s`, its input is a pipe that is as slow as that."""
    with tempfile.TemporaryDirectory() as directory:
        source, summary = Path(directory) / "input.jsonl", Path(directory) / "summary.json"
        texts = [json.dumps(line) + "\n" for line in lines]
        source.write_text("".join(texts))
        flags = ["-o", str(Path(directory) / "output.jsonl"), "--quiet", "--json-summary", str(summary)]
        command = [*_headrace("run"), "-" if lines_per_s else str(source), *flags, *arguments, *as_flags(settings)]
        with faults(env):
            process = subprocess.Popen(
                command,
                env={**os.environ, **environment()},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
            )
        assert process.stdin is not None
        try:
            if lines_per_s:
                for place, text in enumerate(texts):
                    process.stdin.write(text)
                    process.stdin.flush()
                    time.sleep(1 / lines_per_s if place else ENGINE_START_S)  # no lines may pile up before it runs
            process.stdin.close()
            process.wait(timeout=300)
        finally:
            process.kill()
        return evidence_of_record(json.loads(summary.read_text()), origin="summary.json")


def plain_lines(num_lines: int, max_tokens: int, num_words: int = 12) -> list[dict[str, Any]]:
    """Completions of different prompts, each of exactly so many tokens."""
    return [
        {
            "custom_id": f"line-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "prompt": " ".join(f"{(i * 7919 + j * 104_729) % 9973}" for j in range(num_words)),
                "max_tokens": max_tokens,
                "min_tokens": max_tokens,
                "ignore_eos": True,
            },
        }
        for i in range(num_lines)
    ]


@contextmanager
def tiny_model() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="headrace-tiny-") as directory:
        write_shape(Path(directory), TINY)
        yield directory


@contextmanager
def paused(pid: int | None, *, stopped_s: float = 0.4, running_s: float = 0.15) -> Iterator[None]:
    """Stop a process again and again, as a machine does that has no core for it."""
    ended = threading.Event()

    def pause() -> None:
        assert pid is not None
        while not ended.is_set():
            try:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(stopped_s)
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                return
            ended.wait(running_s)

    thread = threading.Thread(target=pause)
    if pid is not None:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if pid is not None:
            thread.join()


def written(record: Mapping[str, Any]) -> Any:
    """A record as a reader of its file gets it."""
    return json.loads(json.dumps(rounded(dict(record)), default=str))


def _headrace(command: str) -> list[str]:
    return [sys.executable, "-m", "headrace", command]
