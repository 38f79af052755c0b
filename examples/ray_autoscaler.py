"""Servers on a Ray cluster whose number follows `headrace:desired_replicas` of the router in front of them.

    headrace route --replicas-file replicas.txt --max-replicas 4 &
    python examples/ray_autoscaler.py replicas.txt --num-gpus 1 -- headrace serve MODEL

Every few seconds it reads the number from the router's /metrics and starts or stops servers, each one an actor that
holds its GPUs and runs the command. The addresses of those that are ready are in the file, which the router reads again
when it changes. A server that has died is replaced. One that is not needed any more leaves the file first, then gets
SIGTERM and finishes its requests. The file is written whole, so a policy that is started again begins with new servers.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import ray

from headrace.scrape.page import samples

SERIES = "headrace:desired_replicas"
READ_S = 5.0  # for an answer of a page
STOP_S = 60.0  # for a server to finish its requests after SIGTERM


class Server:
    """An actor: one server, on the node and the GPUs that Ray chose."""

    def __init__(self, command: Sequence[str]) -> None:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        host = ray.util.get_node_ip_address()
        self._address = f"http://{host}:{port}"
        self._process = subprocess.Popen([*command, "--host", host, "--port", str(port)])

    def address(self) -> str | None:
        """Where it takes requests; None while it does not. Raises once it has ended, which ends the actor's use."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the server has ended with status {self._process.returncode}")
        return self._address if page_of(self._address, "/ready") is not None else None

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


class Policy:
    """Owns the servers and the file. `step` is called again and again, and never waits for a server."""

    def __init__(self, command: Sequence[str], file: Path, *, router: str, num_gpus: float, num_cpus: float) -> None:
        self._command = list(command)
        self._file = file
        self._router = router
        self._actor = ray.remote(num_gpus=num_gpus, num_cpus=num_cpus, max_concurrency=2)(Server)
        self._servers: list[ray.actor.ActorHandle] = []
        self._asked: dict[ray.actor.ActorHandle, ray.ObjectRef] = {}  # calls of `address` without an answer
        self._addresses: dict[ray.actor.ActorHandle, str] = {}
        self._stopping: list[tuple[ray.ObjectRef, ray.actor.ActorHandle]] = []

    def step(self) -> None:
        self._look()
        desired = desired_replicas(self._router)
        if desired is not None:
            for _ in range(desired - len(self._servers)):
                self._servers.append(self._actor.remote(self._command))
            surplus = self._servers[desired:]  # the newest, which have the least in their prefix caches
            self._servers = self._servers[:desired]
            for server in surplus:
                self._addresses.pop(server, None)
                self._asked.pop(server, None)
            self._write()
            self._stopping += [(server.stop.remote(), server) for server in surplus]
        self._end_stopped()

    def close(self) -> None:
        ray.get([server.stop.remote() for server in self._servers] + [reply for reply, _ in self._stopping])

    def _look(self) -> None:
        """Take in which servers are ready, and forget those that have died, with their actor or in it."""
        for server in list(self._servers):
            if server not in self._asked:
                self._asked[server] = server.address.remote()
            reply = self._asked[server]
            if not ray.wait([reply], timeout=0)[0]:
                continue  # it waits for a place on the cluster, or starts
            del self._asked[server]
            try:
                address = ray.get(reply)
            except ray.exceptions.RayError as error:
                print(f"a server is lost: {str(error).strip().splitlines()[-1]}", file=sys.stderr, flush=True)
                self._servers.remove(server)
                self._addresses.pop(server, None)
                ray.kill(server)
            else:
                if address is not None:
                    self._addresses[server] = address

    def _write(self) -> None:
        text = "".join(f"{address}\n" for address in self._addresses.values())
        if not self._file.exists() or self._file.read_text() != text:
            part = self._file.with_name(self._file.name + ".part")
            part.write_text(text)
            os.replace(part, self._file)  # the router never reads half a file

    def _end_stopped(self) -> None:
        """Give back the GPUs of servers that have finished."""
        for reply, server in list(self._stopping):
            if ray.wait([reply], timeout=0)[0]:
                self._stopping.remove((reply, server))
                ray.kill(server)


def desired_replicas(router: str) -> int | None:
    """None: the router does not answer, and nothing should change."""
    found = [sample.value for sample in samples(page_of(router, "/metrics") or "") if sample.name == SERIES]
    return math.ceil(found[0]) if found else None


def page_of(address: str, path: str) -> str | None:
    """None: there is no server, or it refuses."""
    try:
        with urlopen(address + path, timeout=READ_S) as answer:
            return str(answer.read().decode())
    except (URLError, OSError):
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the --replicas-file of the router")
    parser.add_argument("--router", default="http://127.0.0.1:8080")
    parser.add_argument("--ray", default="auto", metavar="ADDRESS")
    parser.add_argument("--num-gpus", type=float, default=0, help="of a server")
    parser.add_argument("--num-cpus", type=float, default=1, help="of a server")
    parser.add_argument("--interval-s", type=float, default=5.0)
    parser.add_argument("command", nargs="+", help="what starts a server; it gets --host and --port")
    given = parser.parse_args()
    ray.init(address=given.ray)
    policy = Policy(given.command, given.file, router=given.router, num_gpus=given.num_gpus, num_cpus=given.num_cpus)
    try:
        while True:
            policy.step()
            time.sleep(given.interval_s)
    except KeyboardInterrupt:
        policy.close()


if __name__ == "__main__":
    main()
