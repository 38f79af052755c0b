"""A process that has imported everything and forks a child per order: a new process takes milliseconds.

Run as a module it reads orders from stdin, one JSON object per line. `Forge` is the client.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from tests.jobs.crash.child import Order

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class End:
    """How a child ended."""

    code: int | None
    signal: int | None

    @property
    def was_killed(self) -> bool:
        return self.signal is not None


class Forge:
    def __init__(self) -> None:
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.jobs.crash.forge"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"},
        )

    def run(self, order: Order) -> End:
        return self.wait(self.start(order))

    def start(self, order: Order) -> int:
        order.notes.mkdir(mode=0o777, exist_ok=True)
        return int(self._ask({"start": order})["pid"])

    def wait(self, pid: int) -> End:
        return msgspec.convert(self._ask({"wait": pid}), End)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Forge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(question) + b"\n")
        self._process.stdin.flush()
        reply: dict[str, Any] = msgspec.json.decode(self._process.stdout.readline())
        return reply


def main() -> None:
    from tests.jobs.conftest import byte_tokenizer
    from tests.jobs.crash.child import run_order

    tokenizer = byte_tokenizer()
    for line in sys.stdin.buffer:
        question = msgspec.json.decode(line)
        if "wait" in question:
            _, status = os.waitpid(question["wait"], 0)
            code = os.waitstatus_to_exitcode(status)
            reply = {"code": code if code >= 0 else None, "signal": -code if code < 0 else None}
        else:
            order = msgspec.convert(question["start"], Order)
            pid = os.fork()
            if pid == 0:
                code = 70
                try:
                    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
                    code = run_order(order, tokenizer)
                except BaseException:  # noqa: BLE001 - a child must not continue as a forge
                    import traceback

                    traceback.print_exc()
                finally:
                    os._exit(code)
            reply = {"pid": pid}
        sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
