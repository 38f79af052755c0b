"""Runs the server tests of vLLM and SGLang against `headrace serve`: `make compat VLLM=CHECKOUT SGLANG=CHECKOUT`.

Nothing is fetched and nothing is written into the checkouts. The tests run in an environment of their own under
build/compat, with the adapter in place of what they import of their own project. The result is docs/compatibility.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.models import open_checkpoint
from headrace.models.sources import locate
from headrace.text import load_tokenizer
from headrace.version import __version__
from tests.clients.tools_model import TEMPLATE, write_tools_model
from tests.compat.report import NO_REASON, Project, Result, page

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
BUILD = ROOT / "build/compat"
MODEL_FILE, TOKENIZER, LOG = BUILD / "model.gguf", BUILD / "tokenizer", BUILD / "server.log"
PAGE = ROOT / "docs/compatibility.md"
PACKAGES = (
    *("anthropic==2.8.0", "openai==3.49.0", "pytest-asyncio", "schemathesis==4.32.5", "httpx", "jsonschema"),
    *("pybase64", "regex", "requests", "fastapi", "prometheus-client"),
)
MODEL, MAX_MODEL_LEN, SHORT_LEN = "smollm2", 16384, 1536
FILE_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Suite:
    """The tests of one project, and how they are run."""

    name: str  # as in scope.toml
    plugin: str
    folder: str  # in the checkout

    @property
    def scope(self) -> dict[str, Any]:
        found: dict[str, Any] = tomllib.loads((HERE / "scope.toml").read_text(encoding="utf-8"))[self.name]
        return found

    @property
    def results(self) -> Path:
        return BUILD / f"{self.name}.jsonl"


VLLM = Suite("vllm", "vllm_plugin", "tests/entrypoints")
SGLANG = Suite("sglang", "sglang_plugin", "test")


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


def write_model() -> None:
    """The embedded model with a template that shows tools and with a longer context, and its tokenizer as files."""
    write_tools_model(locate(MODEL), MODEL_FILE)
    command = [sys.executable, "-m", "gguf.scripts.gguf_set_metadata", "--force", str(MODEL_FILE)]
    subprocess.run([*command, "llama.context_length", str(MAX_MODEL_LEN)], check=True, capture_output=True)
    tokenizer = load_tokenizer(open_checkpoint(MODEL).text)
    TOKENIZER.mkdir(parents=True, exist_ok=True)
    (TOKENIZER / "tokenizer.json").write_text(tokenizer.serialized(), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_tokens,
    }
    (TOKENIZER / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def files_of(suite: Suite, checkout: Path, wanted: Sequence[str]) -> Iterator[Path]:
    for pattern in suite.scope["files"]:
        for path in sorted((checkout / suite.folder).glob(pattern)):
            shown = str(path.relative_to(checkout))
            if not wanted or any(name in shown for name in wanted):
                yield path


def run_file(suite: Suite, python: Path, checkout: Path, path: Path, *, only: str | None = None) -> None:
    """Run one file of tests; each test adds its line to the results."""
    settings = {
        "command": [sys.executable, "-m", "headrace"],
        "environment": {"PYTHONPATH": str(ROOT / "src")},
        "model": str(MODEL_FILE),
        "tokenizer": str(TOKENIZER),
        "log": str(LOG),
        "max_model_len": SHORT_LEN,
    }
    variables = {
        "PYTHONPATH": os.pathsep.join([str(HERE / "adapter"), str(checkout)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HEADRACE_COMPAT_SETTINGS": json.dumps(settings),
        "HEADRACE_COMPAT_RESULTS": str(suite.results),
    }
    command = [str(python), "-m", "pytest", "-q", "-c", str(HERE / "adapter/pytest.ini"), "--rootdir", str(checkout)]
    command += ["--confcutdir", str(checkout / suite.folder), "-p", suite.plugin, "-p", "no:xdist", str(path)]
    if only is not None:
        command += ["-k", only]
    print(f"---- {path.relative_to(checkout)}", flush=True)
    try:
        subprocess.run(command, cwd=BUILD, env={**os.environ, **variables}, timeout=FILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        print(f"not done after {FILE_TIMEOUT_S:g} s", flush=True)


def read_results(suite: Suite) -> list[Result]:
    """The last result of each test, in the order of the files. A test that both fails and errs counts once."""
    found: dict[str, Result] = {}
    for line in suite.results.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        found[entry["test"]] = Result(**entry)
    return sorted(found.values(), key=lambda result: (result.file, result.line or 0, result.test))


def project_of(suite: Suite, checkout: Path) -> Project:
    results = read_results(suite)
    files = [str(path.relative_to(checkout)) for path in files_of(suite, checkout, ())]
    ran = {result.file for result in results}
    return Project(
        commit=commit_of(checkout),
        folder=suite.folder,
        results=results,
        scope=suite.scope,
        not_run=[file for file in files if file not in ran],
    )


def commit_of(checkout: Path) -> str:
    done = subprocess.run(
        ["git", "-C", str(checkout), "log", "-1", "--format=%h of %cs"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "an unknown commit"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compat.run", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only files whose path has this in it")
    parser.add_argument("--vllm", type=Path, metavar="DIRECTORY", help="a checkout of vLLM")
    parser.add_argument("--sglang", type=Path, metavar="DIRECTORY", help="a checkout of SGLang")
    parser.add_argument("-k", dest="only", metavar="EXPRESSION", help="only these tests, as for pytest")
    parser.add_argument("--report", action="store_true", help="run nothing, and write the page from the last results")
    given = parser.parse_args(arguments)
    checkouts = [(VLLM, given.vllm), (SGLANG, given.sglang)]
    checkouts = [(suite, path.resolve()) for suite, path in checkouts if path is not None]
    if not checkouts:
        parser.error("give a checkout: make compat VLLM=DIRECTORY SGLANG=DIRECTORY")
    BUILD.mkdir(parents=True, exist_ok=True)
    if not given.report:
        python = prepare()
        write_model()
        for suite, checkout in checkouts:
            if not given.names:
                suite.results.unlink(missing_ok=True)
            for path in files_of(suite, checkout, given.names):
                run_file(suite, python, checkout, path, only=given.only)
    projects = [project_of(suite, checkout) for suite, checkout in checkouts]
    if not given.names:
        date = datetime.now(UTC).date().isoformat()
        PAGE.write_text(page(projects, date=date, version=__version__), encoding="utf-8")
    for project in projects:
        print(project.summary)
        for each in project.judged:
            if each.kind == NO_REASON:
                print(f"    {each.result.test}: {each.result.message[:200]!r}")
    return 1 if any(project.counts[NO_REASON] for project in projects) else 0


if __name__ == "__main__":
    sys.exit(main())
