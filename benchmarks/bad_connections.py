"""A server before and after many connections that send garbage, half a request or a valid one, and disconnect.

Memory, open files, threads, requests in flight and held cache blocks must return to their values before.

    python benchmarks/bad_connections.py --json benchmarks/results/bad-connections.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
from bad_clients import misbehave

from headrace.version import __version__

SETTLE_S = 60.0


@dataclass(frozen=True)
class State:
    """Resources of the server's processes together, and the state of its engine."""

    num_files: int
    num_threads: int
    memory_mib: float
    front_memory_mib: float  # without the engine's process
    num_running: float
    num_waiting: float
    kv_use: float


class Server:
    def __init__(self, model: str, *flags: str) -> None:
        command = [sys.executable, "-m", "headrace", "serve", model, "--port", "0", *flags]
        environ = {**os.environ, "HEADRACE_API_KEY": "secret"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if " on http://" in line:
                self.url = line.rsplit(" on ", 1)[1].strip()
                return
        raise SystemExit("the server did not start")

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def state(self) -> State:
        parent = psutil.Process(self.process.pid)
        processes = [parent, *parent.children(recursive=True)]
        metrics = self._metrics()
        return State(
            num_files=sum(process.num_fds() for process in processes),
            num_threads=sum(process.num_threads() for process in processes),
            memory_mib=sum(process.memory_info().rss for process in processes) / 2**20,
            front_memory_mib=parent.memory_info().rss / 2**20,
            num_running=metrics["vllm:num_requests_running"],
            num_waiting=metrics["vllm:num_requests_waiting"],
            kv_use=metrics["vllm:kv_cache_usage_perc"],
        )

    def _metrics(self) -> dict[str, float]:
        request = urllib.request.Request(f"{self.url}/metrics", headers={"X-Api-Key": "secret"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return {line.partition("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


def settled(server: Server, before: State) -> State:
    """Return the state once nothing runs and files are closed, or after a minute."""
    end = time.monotonic() + SETTLE_S
    while True:
        state = server.state()
        is_quiet = state.num_running == state.num_waiting == state.kv_use == 0
        if (is_quiet and state.num_files <= before.num_files) or time.monotonic() > end:
            return state
        time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=100)
    parser.add_argument("--json", type=Path, help="write a record of the numbers to this file")
    args = parser.parse_args()
    server = Server(args.model)
    asyncio.run(misbehave(server.port, random.Random(1), 500, at_once=args.at_once))  # warms up what is created once
    before = settled(server, server.state())
    started = time.perf_counter()
    done = asyncio.run(misbehave(server.port, random.Random(2), args.connections, at_once=args.at_once))
    seconds = time.perf_counter() - started
    after = settled(server, before)
    exit_code = server.stop()
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "versions": {"headrace": __version__, "python": platform.python_version()},
        "model": args.model,
        "seconds": round(seconds, 1),
        "connections": dict(done),
        "before": asdict(before),
        "after": asdict(after),
        "exit_code": exit_code,
    }
    print(json.dumps(record, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    is_same = after.num_files <= before.num_files and after.num_threads <= before.num_threads
    return 0 if is_same and after.num_running == after.num_waiting == after.kv_use == 0 and exit_code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
