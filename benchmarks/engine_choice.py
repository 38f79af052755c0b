"""The cost of choosing an engine for a request, in a server with several (`--data-parallel-size`).

Usage: python benchmarks/engine_choice.py [--engines 2 8] [--prompt-lens 128 1024 8192] [--output results.json]

Engines are fakes that do nothing. A request is submitted, gets its first token and is released; the time is per
request, without tokenizing and without the engine's own `submit`. Half of the prompts begin with one of 64 shared
prefixes of half their length. The smallest of several rounds counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
from about import commit, cpu_name

from headrace.config import EngineConfig
from headrace.engine.fake_settings import fake_settings
from headrace.engine.group import EngineGroup
from headrace.engine.shares import shares_of
from headrace.types import Request, SamplingParams

NUM_REQUESTS = 2_000
NUM_ROUNDS = 5
NUM_PREFIXES = 64


class IdleClient:
    failure = None

    def start(self, config: EngineConfig) -> None:
        pass

    def wait_until_ready(self) -> Any:
        return SimpleNamespace(settings=fake_settings(block_size=16, num_blocks=100_000, max_model_len=16_384))

    def submit(self, request: Request) -> None:
        pass


def group_of(num_engines: int) -> EngineGroup:
    shares = shares_of(EngineConfig(), num_engines, num_cores=num_engines, gpus=(), noun="engine")
    group = EngineGroup(shares, lambda *_: IdleClient(), lambda events: None, lambda *_: None)  # type: ignore[arg-type]
    group.wait_until_ready()
    return group


def requests_of(prompt_len: int) -> list[Request]:
    random = np.random.default_rng(0)
    prefixes = random.integers(0, 30_000, (NUM_PREFIXES, prompt_len // 2), np.int32)
    found = []
    for number in range(NUM_REQUESTS):
        prompt = random.integers(0, 30_000, prompt_len, np.int32)
        if number % 2:
            prompt[: prompt_len // 2] = prefixes[number % NUM_PREFIXES]
        found.append(Request(f"r{number}", prompt, SamplingParams()))
    return found


def microseconds(num_engines: int, prompt_len: int) -> float:
    """Per request, with 64 requests in flight."""
    requests, best = requests_of(prompt_len), float("inf")
    for _ in range(NUM_ROUNDS):
        group = group_of(num_engines)
        started = perf_counter()
        for number, request in enumerate(requests):
            group.submit(request)
            if number >= 64:
                group.release(requests[number - 64].request_id)
        best = min(best, perf_counter() - started)
    return 1e6 * best / len(requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--prompt-lens", type=int, nargs="+", default=[128, 1024, 8192])
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    results = [
        {"engines": engines, "prompt_len": length, "us_per_request": round(microseconds(engines, length), 1)}
        for engines in given.engines
        for length in given.prompt_lens
    ]
    for result in results:
        print(result)
    if given.output is not None:
        facts = {
            "benchmark": "engine_choice",
            "commit": commit(),
            "cpu": cpu_name(),
            "python": platform.python_version(),
            "load_average": os.getloadavg(),
        }
        given.output.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
