"""Starts `headrace serve` for tests that were written for another server: the command line and the model are changed,
and nothing else.

Runs in the interpreter of the tests, which has no Headrace: what it needs comes in variables of the environment.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SETTINGS = "HEADRACE_COMPAT_SETTINGS"  # a JSON object: see `settings`
RULES = Path(__file__).with_name("command_lines.toml")
START_TIMEOUT_S = 300.0


def settings() -> dict[str, Any]:
    """What the runner passes on: `command` of the server, `model`, `tokenizer`, `adapter` and `log` as paths."""
    found: dict[str, Any] = json.loads(os.environ[SETTINGS])
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def translated(flags: Sequence[str], project: str, *, has_lora: bool = False) -> list[str]:
    """The flags as command_lines.toml says: some have another name here, and some are left out."""
    rules: dict[str, Any] = tomllib.loads(RULES.read_text(encoding="utf-8"))[project]
    dropped, renamed = dict(rules["dropped"]), rules.get("renamed", {})
    if not has_lora:
        dropped |= rules.get("lora", {})
    found: list[str] = []
    todo = list(flags)
    while todo:
        flag = todo.pop(0)
        name, has_value, value = flag.removeprefix("--").partition("=")
        name = name.replace("_", "-")
        if not flag.startswith("--"):
            found.append(flag)
        elif name not in dropped:
            found.append(f"--{renamed.get(name, name)}{has_value}{value}")
        elif not has_value:
            del todo[: dropped[name]]
    return found


def shortened(flags: list[str], *, longest: int) -> list[str]:
    """The flags with a shorter context: a small model that repeats itself would fill it, on a CPU, and the stand-in for
    a large one may have less. Files of tests that need what they ask for are listed in command_lines.toml."""
    rules: dict[str, Any] = tomllib.loads(RULES.read_text(encoding="utf-8"))
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if any(name in test for name in rules["long_contexts"]):
        return flags
    if "--max-model-len" not in flags:
        return [*flags, "--max-model-len", str(longest)]
    place = flags.index("--max-model-len") + 1
    return [*flags[:place], str(min(int(flags[place]), longest)), *flags[place + 1 :]]


class Server:
    """One server process. It answers under the names of the test's model, of which a folder is served itself."""

    def __init__(self, names: Sequence[str], flags: Sequence[str], *, environment: Mapping[str, str] | None = None):
        found = settings()
        self._log = Path(found["log"])
        flags = shortened(list(flags), longest=found["max_model_len"])
        model = names[0] if Path(names[0]).is_dir() else found["model"]
        command = [*found["command"], "serve", model, *flags]
        if "--served-model-name" not in flags:
            command += ["--served-model-name", *names]
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"\n$ {' '.join(command)}\n")
            log.flush()
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **found["environment"], **(environment or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self, url: str, timeout_s: float = START_TIMEOUT_S, *, uds: str | None = None) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server did not start: {self._last_line()}")
            try:
                if uds is not None:
                    with socket.socket(socket.AF_UNIX) as probe:
                        probe.connect(uds)
                        return
                with urllib.request.urlopen(url, timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        self.stop()
        raise TimeoutError(f"the server was not ready after {timeout_s:g} s")

    def _last_line(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
