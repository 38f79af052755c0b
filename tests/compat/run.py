"""Runs the server tests of vLLM, SGLang and llama.cpp against `headrace serve`:
`make compat VLLM=CHECKOUT SGLANG=CHECKOUT LLAMA_CPP=CHECKOUT`.

Nothing is fetched and nothing is written into the checkouts. The tests run in an environment of their own under
build/compat, with the adapter in place of what they import of their own project. Results are kept in results/, so that
a part can be run again; docs/compatibility.md is written from them.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from headrace.version import __version__
from tests.compat.flags import flags_of
from tests.compat.models import SCRIPTED, StandIn, StandIns
from tests.compat.report import NO_REASON, Project, page
from tests.compat.results import Result, merged, read_notes, read_results, write_results

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
BUILD = ROOT / "build/compat"
NOTES, LOG = BUILD / f"notes-{os.getpid()}.jsonl", BUILD / "server.log"
PAGE = ROOT / "docs/compatibility.md"
PACKAGES = (
    *("anthropic==0.125.0", "openai==3.49.0", "pytest-asyncio", "schemathesis==4.32.5", "httpx", "jsonschema"),
    "pytest<9.2",  # as schemathesis needs it
    *("pybase64", "regex", "requests", "fastapi", "prometheus-client", "model-hosting-container-standards"),
)
FILE_TIMEOUT_S, STOP_TIMEOUT_S = 900.0, 60.0


@dataclass(frozen=True)
class Part:
    """Tests of a file that run with one model."""

    model: str
    only: str | None = None  # as for pytest's -k; None: all


@dataclass(frozen=True)
class Suite:
    """The tests of one project, and how they are run."""

    name: str  # as in scope.toml
    plugin: str
    folder: str  # in the checkout

    @cached_property
    def scope(self) -> dict[str, Any]:
        found: dict[str, Any] = tomllib.loads((HERE / "scope.toml").read_text(encoding="utf-8"))[self.name]
        return found

    @property
    def results(self) -> Path:
        return HERE / f"results/{self.name}.jsonl"

    def parts_of(self, path: Path) -> list[Part]:
        """The tests of a file by the model that stands for theirs: one for all, but for tests that are named."""
        models: dict[str, list[str]] = self.scope.get("models", {})
        listed = [(name, *entry.partition("::")[::2]) for name, entries in models.items() for entry in entries]
        found = [(name, test) for name, file, test in listed if str(path).endswith(f"/{file}")]
        rest = next((name for name, test in found if not test), SCRIPTED)
        named = {name: [test for other, test in found if other == name and test] for name, test in found if test}
        if not named:
            return [Part(rest)]
        others = " or ".join(test for tests in named.values() for test in tests)
        return [Part(rest, f"not ({others})"), *(Part(name, " or ".join(tests)) for name, tests in named.items())]


VLLM = Suite("vllm", "vllm_plugin", "tests/entrypoints")
SGLANG = Suite("sglang", "sglang_plugin", "test")
LLAMA_CPP = Suite("llama_cpp", "llama_cpp_plugin", "tools/server/tests")


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs one file of tests after the other."""

    python: Path
    models: StandIns
    has_lora: bool
    only: str | None = None  # tests, as for pytest

    def run(self, suite: Suite, checkout: Path, path: Path) -> None:
        """Run one file; its results replace those that it had."""
        for number, part in enumerate(suite.parts_of(path)):
            self._run_part(suite, checkout, path, part, replaces_all=number == 0 and self.only is None)

    def _run_part(self, suite: Suite, checkout: Path, path: Path, part: Part, *, replaces_all: bool) -> None:
        model = self.models[part.model]
        shown = str(path.relative_to(checkout))
        print(f"---- {shown}", flush=True)
        NOTES.unlink(missing_ok=True)
        NOTES.touch()
        is_done = self._run_pytest(suite, checkout, path, model, part.only)
        date = datetime.now(UTC).date().isoformat()
        notes = NOTES.read_text(encoding="utf-8")
        new = read_notes(notes, model=model.name, date=date, commit=commit_of(ROOT, "%h", "src"))
        for result in new:
            if result.message and result.outcome == "failed":
                print(f"    {result.name}: {result.message[:300]!r}", flush=True)
        is_whole = is_done and replaces_all
        NOTES.unlink()
        with (BUILD / f"{suite.name}.lock").open("w") as lock:  # two runs may end at the same time
            fcntl.flock(lock, fcntl.LOCK_EX)
            write_results(suite.results, merged(read_results(suite.results), new, file=shown, is_whole=is_whole))

    def _run_pytest(self, suite: Suite, checkout: Path, path: Path, model: StandIn, only: str | None) -> bool:
        settings = {
            "command": [sys.executable, "-m", "headrace"],
            "environment": {"PYTHONPATH": str(ROOT / "src")},
            "log": str(LOG),
            "has_lora": self.has_lora,
            "version": __version__,
            **model.settings(),
        }
        variables = {
            "PYTHONPATH": os.pathsep.join([str(HERE / "adapter"), str(checkout)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HEADRACE_COMPAT_SETTINGS": json.dumps(settings),
            "HEADRACE_COMPAT_RESULTS": str(NOTES),
        }
        command = [str(self.python), "-m", "pytest", "-q", "-c", str(HERE / "adapter/pytest.ini")]
        command += ["--rootdir", str(checkout), "--confcutdir", str(checkout / suite.folder)]
        command += ["-p", suite.plugin, "-p", "no:xdist", str(path)]
        wanted = [f"({expression})" for expression in (self.only, only) if expression is not None]
        if wanted:
            command += ["-k", " and ".join(wanted)]
        with subprocess.Popen(command, cwd=BUILD, env={**os.environ, **variables}) as process:
            try:
                process.wait(FILE_TIMEOUT_S)
                return True
            except subprocess.TimeoutExpired:
                print(f"not done after {FILE_TIMEOUT_S:g} s", flush=True)
            process.send_signal(signal.SIGINT)  # so that it stops its server
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        return False


def prepare() -> Path:
    """The interpreter of the tests. It sees the packages of this environment (torch is large) and has its own."""
    python, stamp = BUILD / "venv/bin/python", BUILD / "installed.json"
    if stamp.exists() and json.loads(stamp.read_text()) == list(PACKAGES):
        return python
    print(f"installing {' '.join(PACKAGES)} ...", flush=True)
    if not python.exists():
        venv.create(BUILD / "venv", with_pip=True)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    parent = BUILD / f"venv/lib/{version}/site-packages/parent_environment.pth"
    parent.write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    stamp.write_text(json.dumps(PACKAGES), encoding="utf-8")
    return python


def knows_flag(flag: str) -> bool:
    """Whether `headrace serve` has this flag."""
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "serve", "--help"], capture_output=True, text=True, check=True
    )
    return flag in done.stdout


def files_of(suite: Suite, checkout: Path, wanted: Sequence[str]) -> Iterator[Path]:
    for pattern in suite.scope["files"]:
        for path in sorted((checkout / suite.folder).glob(pattern)):
            shown = str(path.relative_to(checkout))
            if not wanted or any(name in shown for name in wanted):
                yield path


def project_of(suite: Suite, checkout: Path) -> Project:
    results = read_results(suite.results)
    files = [str(path.relative_to(checkout)) for path in files_of(suite, checkout, ())]
    ran = {result.file for result in results}
    return Project(
        commit=commit_of(checkout, "%h of %cs"),
        folder=suite.folder,
        results=[result for result in results if result.file in files],
        scope=suite.scope,
        not_run=[file for file in files if file not in ran],
        flags=flags_of(checkout),
    )


def commit_of(checkout: Path, form: str, *paths: str) -> str:
    """The last commit, or the last that changed one of these paths."""
    command = ["git", "-C", str(checkout), "log", "-1", f"--format={form}", "--", *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "an unknown commit"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compat.run", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only files whose path has this in it")
    parser.add_argument("--vllm", type=Path, metavar="DIRECTORY", help="a checkout of vLLM")
    parser.add_argument("--sglang", type=Path, metavar="DIRECTORY", help="a checkout of SGLang")
    parser.add_argument("--llama-cpp", type=Path, metavar="DIRECTORY", help="a checkout of llama.cpp")
    parser.add_argument("-k", dest="only", metavar="EXPRESSION", help="only these tests, as for pytest")
    parser.add_argument("--report", action="store_true", help="run nothing, and write the page from the last results")
    given = parser.parse_args(arguments)
    checkouts = [(VLLM, given.vllm), (SGLANG, given.sglang), (LLAMA_CPP, given.llama_cpp)]
    checkouts = [(suite, path.resolve()) for suite, path in checkouts if path is not None]
    if not checkouts:
        parser.error("give a checkout: make compat VLLM=DIRECTORY SGLANG=DIRECTORY LLAMA_CPP=DIRECTORY")
    if not given.report:
        BUILD.mkdir(parents=True, exist_ok=True)
        runner = Runner(python=prepare(), models=StandIns(BUILD), has_lora=knows_flag("--enable-lora"), only=given.only)
        for suite, checkout in checkouts:
            for path in files_of(suite, checkout, given.names):
                runner.run(suite, checkout, path)
    return report([project_of(suite, checkout) for suite, checkout in checkouts])


def report(projects: Sequence[Project]) -> int:
    """Writes the page. Tests that fail without a written reason, and unknown flags, are an error."""
    PAGE.write_text(page(projects, version=__version__), encoding="utf-8")
    unexplained: list[Result] = []
    for project in projects:
        print(project.summary)
        if project.flags is not None:
            print(project.flags.summary)
        unexplained += [each.result for each in project.judged if each.kind == NO_REASON]
    for result in unexplained:
        print(f"    without a reason: {result.test}")
    has_unknown = any(project.flags is not None and project.flags.unknown for project in projects)
    return 1 if unexplained or has_unknown else 0


if __name__ == "__main__":
    sys.exit(main())
