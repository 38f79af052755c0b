"""An engine in process, but not in this one: a worker that takes commands on stdin and replies on a pipe of its own.

Memory that runs out, or a crash, then ends one start and not the benchmark, and all memory is returned at its end. The
worker's stdout and stderr are its log. Commands and replies are lines of JSON; workloads go through a file.

    ▶ {"do": "start", "model": ..., "settings": {...}}      ◀ {"ok": {...}} or {"error": {"type", "message"}}
    ▶ {"do": "run", "path": workload}                       ◀ {"ok": {"seconds", "output_lens", ...}}
    ▶ {"do": "counters"}, {"do": "reset_prefix_cache"}, {"do": "reconfigure", "model": ..., "settings": {...}}
"""

from __future__ import annotations

import json
import os
import select
import tempfile
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

from headrace.bench.engines.base import EngineFailure, OfflineRun
from headrace.bench.engines.processes import POLL_S, Child, classify
from headrace.bench.workloads import Workload

READ_BYTES = 1 << 16
STOP_S = 20.0
END_S = 5.0


class Worker:
    """Owns a worker process. `command` gets the number of the reply pipe as its last argument."""

    def __init__(self, command: Sequence[str], *, name: str, env: Mapping[str, str | None] | None = None) -> None:
        self.name = name
        self._rest = b""
        self._replies, replies = os.pipe()
        try:
            self.child = Child(
                [*command, str(replies)],
                name=name,
                env=env,
                takes_commands=True,
                pass_fds=[replies],
            )
        except BaseException:
            os.close(self._replies)
            raise
        finally:
            os.close(replies)  # so that the pipe ends with the worker

    def call(self, do: str, *, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its reply. Raises EngineFailure, also when the worker dies."""
        self.child.send(json.dumps({"do": do, **arguments}).encode() + b"\n")
        reply = json.loads(self._read_line(do, timeout_s))
        if "error" in reply:
            raise self._refused(do, **reply["error"])
        found: dict[str, Any] = reply["ok"]
        return found

    def _read_line(self, do: str, timeout_s: float | None) -> bytes:
        deadline = None if timeout_s is None else monotonic() + timeout_s
        while b"\n" not in self._rest:
            is_readable, _, _ = select.select([self._replies], [], [], POLL_S)
            if is_readable:
                data = os.read(self._replies, READ_BYTES)
                if not data:
                    raise self.child.failure(f"during {do!r}")
                self._rest += data
            elif not self.child.is_alive:
                raise self.child.failure(f"during {do!r}")
            elif deadline is not None and monotonic() > deadline:
                raise EngineFailure(
                    "timeout", f"{self.name} did not finish {do!r} in {timeout_s:g} s", self.child.log_tail()
                )
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _refused(self, do: str, type: str, message: str) -> EngineFailure:
        kind, why = classify(None, [f"{type}: {' '.join(message.split())}"])
        if kind == "crash":  # the cause may be in another process, which has logged it
            self.child.settle_log()
            kind, logged = classify(None, self.child.log_lines())
            why = why if kind == "crash" else logged
        return EngineFailure(kind, f"{self.name}: {why.removeprefix('ConfigError: ')}", self.child.log_tail())

    def run_offline(self, workload: Workload, *, timeout_s: float | None = None) -> OfflineRun:
        with tempfile.NamedTemporaryFile("w", suffix=".json", prefix="headrace-workload-") as file:
            json.dump(offline_requests(workload), file)
            file.flush()
            return OfflineRun(**self.call("run", path=file.name, timeout_s=timeout_s))

    def stop(self) -> None:
        self.child.stop(STOP_S, ends_itself_s=END_S)
        if self._replies >= 0:
            os.close(self._replies)
            self._replies = -1


def offline_requests(workload: Workload) -> list[dict[str, Any]]:
    """The requests for a worker: a prompt or messages, and sampling parameters under the names that vLLM shares."""
    found = []
    for request in workload.requests:
        params = workload.sampling(request)
        if params.get("ignore_eos") and request.stop_token_ids is None:
            del params["min_tokens"]  # nothing could end the answer earlier; engines would mask tokens for it
        if isinstance(request.prompt, list):
            params["detokenize"] = False
        found.append({"prompt": request.prompt, "messages": request.messages, "params": params})
    return found
