"""Runs real clients against a server with the embedded model: `make clients ARGS="[NAME ...]"`.

Each client is installed into an environment of its own under build/clients, once, and its script runs there. The first
use needs a package index.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from headrace.models.sources import locate
from headrace.version import __version__
from tests.clients.catalogue import CLIENTS, TORCH, Client
from tests.clients.tools_model import write_tools_model

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "build/clients"
TOKENIZER = ENVIRONMENTS / "tokenizer"
TOOLS_MODEL = ENVIRONMENTS / "tools-model.gguf"
MODEL, KEY, ADMIN_KEY = "smollm2", "a-key-for-tests", "an-admin-key-for-tests"
SETTINGS = ("--max-num-seqs", "8")
START_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Result:
    """What one client did. Without checks it was skipped, or ended before it could report."""

    client: str
    version: str | None
    checks: dict[str, str | None]  # the error of each, None if it passed
    seconds: float
    skipped: str | None = None
    failure: str | None = None  # of the script as a whole

    @property
    def num_passed(self) -> int:
        return sum(error is None for error in self.checks.values())

    @property
    def is_good(self) -> bool:
        return self.failure is None and self.num_passed == len(self.checks)


@contextmanager
def server(log: Path, *, max_model_len: int, shows_tools: bool = False) -> Iterator[str]:
    """A server on a free port; its output goes to the log. Yields the URL that clients are given."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    model = str(TOOLS_MODEL) if shows_tools else MODEL
    command = [sys.executable, "-m", "headrace", "serve", model, "--served-model-name", MODEL, "--port", str(port)]
    command += [*SETTINGS, "--max-model-len", str(max_model_len)]
    keys = {"HEADRACE_API_KEY": KEY, "HEADRACE_ADMIN_KEY": ADMIN_KEY}
    environment = {**os.environ, **keys, "PYTHONPATH": str(ROOT / "src")}
    with log.open("w", encoding="utf-8") as output, tempfile.TemporaryDirectory() as batches:
        command += ["--batch-dir", batches]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait_until_ready(f"http://127.0.0.1:{port}/ready", process, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait()


def write_tokenizer(directory: Path) -> None:
    """The model's tokenizer as Hugging Face's files, for clients that make prompts of a given number of tokens."""
    from headrace.models import open_checkpoint
    from headrace.text import load_tokenizer

    tokenizer = load_tokenizer(open_checkpoint(MODEL).text)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer.serialized(), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None:
                break
            time.sleep(0.2)
    sys.exit(f"the server did not start; {log} ends with:\n{log.read_text()[-2000:]}")


def prepare(client: Client, *, latest: bool) -> Path | None:
    """Install the client unless that was done before. Returns its interpreter, None if pip failed."""
    home = ENVIRONMENTS / client.name
    wanted = [_unpinned(package) if latest else package for package in client.packages]
    stamp, python = home / "installed.json", home / "bin/python"
    if not latest and stamp.exists() and json.loads(stamp.read_text()) == wanted:
        return python
    print(f"installing {' '.join(wanted)} ...", flush=True)
    venv.create(home, with_pip=True)
    done = subprocess.run([python, "-m", "pip", "install", "--quiet", "--upgrade", *wanted], check=False)
    if done.returncode:
        return None
    stamp.write_text(json.dumps(wanted), encoding="utf-8")
    return python


def _unpinned(package: str) -> str:
    return package if package == TORCH else package.partition("==")[0]


def run(client: Client, url: str, *, latest: bool = False) -> Result:
    if (skipped := client.missing()) is not None:
        return Result(client.name, None, {}, 0.0, skipped=skipped)
    given = client.python()
    python = Path(given or sys.executable) if not client.packages else prepare(client, latest=latest)
    if python is None:
        return Result(client.name, None, {}, 0.0, failure="pip could not install it")
    print(f"---- {client.name}", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        failure = _run_script(client, python, url, report)
        seconds = time.monotonic() - start
        found: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {"version": None, "checks": {}}
    return Result(client.name, found["version"], found["checks"], seconds, failure=failure)


def _run_script(client: Client, python: Path, url: str, report: Path) -> str | None:
    """Run it, and say what went wrong unless it reported."""
    variables = {"HEADRACE_URL": url, "HEADRACE_KEY": KEY, "HEADRACE_MODEL": MODEL, "HEADRACE_ADMIN_KEY": ADMIN_KEY}
    variables["HEADRACE_TOKENIZER"] = str(TOKENIZER)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            [python, "-m", f"tests.clients.{client.module}"],
            cwd=ROOT,
            env={**environment, **variables, "HEADRACE_CLIENT_REPORT": str(report)},
            timeout=client.timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {client.timeout_s:g} s"
    return None if report.exists() else f"ended with exit code {done.returncode}, without a report"


def table(results: Sequence[Result]) -> str:
    rows = [("client", "version", "checks", "seconds", "")]
    for result in results:
        passed = f"{result.num_passed}/{len(result.checks)}" if result.checks else "-"
        failed = ", ".join(name for name, error in result.checks.items() if error is not None)
        note = result.failure or (
            f"failed: {failed}" if failed else f"skipped: {result.skipped}" if result.skipped else ""
        )
        rows.append((result.client, result.version or "-", passed, f"{result.seconds:.1f}", note))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    )


def record(results: Sequence[Result], earlier: dict[str, Any] | None = None) -> dict[str, Any]:
    """What is published: names, versions and checks; of errors only that there was one. Clients that did not run keep
    their entry of an earlier record."""
    date = datetime.now(UTC).date().isoformat()
    entries = {entry["client"]: entry for entry in (earlier or {}).get("clients", [])}
    limits = {client.name: client.max_model_len for client in CLIENTS}
    order = list(limits)
    for result in results:
        entries[result.client] = {
            "client": result.client,
            "version": result.version,
            "headrace": __version__,
            "date": date,
            "passed": [name for name, error in result.checks.items() if error is None],
            "failed": [name for name, error in result.checks.items() if error is not None],
            "seconds": round(result.seconds, 1),
            "max_model_len": limits[result.client],
            **({"skipped": result.skipped} if result.skipped else {}),
            **({"failure": result.failure} if result.failure else {}),
        }
    return {
        "record": "clients",
        "command": "python -m tests.clients.run [NAME ...] --record benchmarks/results/clients.json",
        "model": MODEL,
        "settings": " ".join(SETTINGS),
        "clients": sorted(entries.values(), key=lambda entry: order.index(entry["client"])),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.run", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(client.name for client in CLIENTS))
    parser.add_argument("--latest", action="store_true", help="install the newest versions, not those of the catalogue")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the results as JSON, into an earlier record")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - {client.name for client in CLIENTS}:
        parser.error(f"there is no client {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in CLIENTS)}")
    chosen = [client for client in CLIENTS if not given.names or client.name in given.names]
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    write_tokenizer(TOKENIZER)
    results: list[Result] = []
    if any(client.shows_tools for client in chosen):
        write_tools_model(locate(MODEL), TOOLS_MODEL)
    for (max_model_len, shows_tools), group in groupby(chosen, key=lambda c: (c.max_model_len, c.shows_tools)):
        with server(ENVIRONMENTS / "server.log", max_model_len=max_model_len, shows_tools=shows_tools) as url:
            results += [run(client, url, latest=given.latest) for client in group]
    print(table(results))
    if given.record is not None:
        earlier = json.loads(given.record.read_text(encoding="utf-8")) if given.record.exists() else None
        given.record.write_text(json.dumps(record(results, earlier), indent=2) + "\n", encoding="utf-8")
    return 0 if all(result.is_good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
