"""What the scripts of clients share: where the server is, and how their checks are run and reported.

This module runs in the environment of each client, so it imports nothing but the standard library.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

URL = os.environ.get("HEADRACE_URL", "http://127.0.0.1:8000/v1")
KEY = os.environ.get("HEADRACE_KEY", "none")
ADMIN_KEY = os.environ.get("HEADRACE_ADMIN_KEY", "none")
MODEL = os.environ.get("HEADRACE_MODEL", "smollm2")
TOKENIZER = os.environ.get("HEADRACE_TOKENIZER", "HuggingFaceTB/SmolLM2-135M-Instruct")  # for clients that need one
REPORT = os.environ.get("HEADRACE_CLIENT_REPORT")  # the file for the runner
TOO_LONG = "word " * 5000  # more tokens than the context of the runner's server
TIMEOUT_S = 600.0

Check = TypeVar("Check", bound=Callable[[], Any])
_CHECKS: list[Callable[[], Any]] = []


def check(function: Check) -> Check:
    """Add a function, also an async one, to the checks. Its name says what is exercised."""
    _CHECKS.append(function)
    return function


@contextmanager
def raises(kind: type[BaseException], *texts: str) -> Iterator[None]:
    """The body must raise this error, with each of the texts in its message."""
    message = None
    try:
        yield
    except kind as error:
        message = str(error)
    assert message is not None, f"no {kind.__name__} was raised"
    assert all(text in message for text in texts), f"{texts} not in {message}"


def shell(command: str, **more: str) -> str:
    """Run a command as a user would type it, with URL, KEY and others as variables; return what it prints."""
    variables = {
        "URL": URL,
        "BASE": URL.removesuffix("/v1"),
        "KEY": KEY,
        "MODEL": MODEL,
        "TOKENIZER": TOKENIZER,
        **more,
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        env={**os.environ, **variables, "PATH": path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"exit code {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def main(distribution: str, *, installed: str | None = None) -> None:
    """Run the checks, report them, and exit with 1 if one has failed. `installed`: the version, if it is no package."""
    results: dict[str, str | None] = {}
    loop = asyncio.new_event_loop()  # one for all: some clients keep their connections between calls
    asyncio.set_event_loop(loop)
    for function in _CHECKS:
        start = time.perf_counter()
        name = function.__name__.replace("_", " ")
        try:
            loop.run_until_complete(function()) if inspect.iscoroutinefunction(function) else function()
        except Exception as error:  # noqa: BLE001 - one failure must not hide the checks after it
            results[name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        else:
            results[name] = None
        print(f"{'ok  ' if results[name] is None else 'FAIL'} {name} ({time.perf_counter() - start:.1f} s)", flush=True)
    if REPORT is not None:
        report = {"version": installed or version(distribution), "checks": results}
        Path(REPORT).write_text(json.dumps(report), encoding="utf-8")
    sys.exit(any(results.values()))
