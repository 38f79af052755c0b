"""docs/compatibility.md from the results of other projects' tests, and the reasons in scope.toml."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from textwrap import wrap
from typing import Any

from tests.compat.flags import Flags
from tests.compat.results import OUTSIDE, PASSED, Result

WIDTH = 120  # of lines in the docs
NO_REASON = "no reason yet"
KINDS = {  # of tests that do not pass, in the order of the page
    NO_REASON: "Failed",
    "missing": "Missing here",
    "different": "Different on purpose",
    "model": "Need the model that they were written for",
    "outside": "Not about a server",
}


_INTRODUCTION = """\
The server tests of vLLM, SGLang and llama.cpp, run against `headrace serve`. Their files are not changed. An adapter
starts the server with another model, leaves out flags of types, GPUs and images, limits contexts, and runs tests that
are marked to be skipped on other hardware; llama.cpp's paths get the prefix /v1. `make compat VLLM=DIRECTORY
SGLANG=DIRECTORY LLAMA_CPP=DIRECTORY` writes this page from checkouts of the projects; the reasons are in
`tests/compat/scope.toml`, the date and the commit of each test's last run in `tests/compat/results/`.

Headrace {version} on a CPU, {runs}. The models that stand for those of the tests:

- In most files a tiny Qwen3 whose weights are computed to write given texts (`tests/compat/scripted_model.py`):
  reasoning between tags, then a short answer or a call of the test's tool; in `/v1/completions` prose without an end.
  So these tests show what the server does, and nothing about a model.
- SmolLM2-135M-Instruct, with a chat template that shows tools, in some, with a LoRA adapter of random weights; small
  encoders with random weights in tests of an embedding model or a reranker. `tests/compat/results/` names the model of
  each.

Tests that expect words, knowledge or token counts of another model cannot pass."""


@dataclass(frozen=True)
class Judged:
    """A result with the kind of it and, unless it passed, the reason."""

    result: Result
    kind: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Project:
    """The results of one project; `scope` is its part of scope.toml."""

    commit: str
    folder: str
    results: Sequence[Result]
    scope: dict[str, Any]
    not_run: Sequence[str] = ()  # files of the scope without results
    flags: Flags | None = None  # of its server; None: they are not compared

    @cached_property
    def judged(self) -> list[Judged]:
        return [self._judged(result) for result in self.results]

    @cached_property
    def counts(self) -> Counter[str]:
        return Counter(each.kind for each in self.judged)

    @property
    def num_applicable(self) -> int:
        return len(self.results) - self.counts["outside"]

    @property
    def summary(self) -> str:
        others = ", ".join(f"{self.counts[kind]} {kind}" for kind in KINDS if self.counts[kind])
        title = self.scope["title"]
        return f"{title}: {self.counts[PASSED]} of {self.num_applicable} tests of its server pass; others: {others}"

    def _judged(self, result: Result) -> Judged:
        if result.outcome == OUTSIDE:
            own = self.scope.get("own_code", f"calls functions of {self.scope['title']}")
            return Judged(result, "outside", own)
        rule = self._rule_of(result)
        if result.outcome == PASSED and not (rule or {}).get("even_if_passed"):
            return Judged(result, PASSED)
        return Judged(result, NO_REASON) if rule is None else Judged(result, rule["kind"], rule["reason"])

    def _rule_of(self, result: Result) -> dict[str, Any] | None:
        name = result.test.removeprefix(self.folder + "/")
        rules: list[dict[str, Any]] = self.scope.get("reasons", [])
        return next((each for each in rules if any(fnmatchcase(name, pattern) for pattern in each["tests"])), None)


def page(projects: Sequence[Project], *, version: str) -> str:
    return "\n".join([*_introduction(projects, version), *(line for each in projects for line in _part(each))])


def _introduction(projects: Sequence[Project], version: str) -> Iterator[str]:
    yield "# Compatibility"
    yield ""
    yield from _INTRODUCTION.format(version=version, runs=_runs(projects)).splitlines()
    yield ""
    yield "| Tests of | commit | of its server | passed | missing | different | other model | not about a server |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for project in projects:
        counts, title = project.counts, project.scope["title"]
        missing = counts["missing"] + counts[NO_REASON]
        cells = [counts[PASSED], missing, counts["different"], counts["model"], counts["outside"]]
        yield f"| {title} | {project.commit} | {project.num_applicable} | " + " | ".join(map(str, cells)) + " |"
    yield ""


def _runs(projects: Sequence[Project]) -> str:
    """When and at which commits the tests ran."""
    results = [result for project in projects for result in project.results]
    dates = sorted({result.date for result in results}) or ["not run"]
    commits = sorted({result.commit for result in results if result.commit})
    shown = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{shown}, at commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}" if commits else shown


def _part(project: Project) -> Iterator[str]:
    yield f"## {project.scope['title']}"
    yield ""
    yield project.scope["about"]
    yield ""
    if project.flags is not None:
        yield from wrap(project.flags.summary, WIDTH)
        yield ""
    for kind, title in KINDS.items():
        found = [each for each in project.judged if each.kind == kind]
        if found:
            yield from _not_passed(title, found)
    if project.not_run:
        yield "### Not run"
        yield ""
        yield from (f"- `{file}`" for file in project.not_run)
        yield ""
    yield "### Passed"
    yield ""
    by_file: dict[str, list[Result]] = defaultdict(list)
    for each in project.judged:
        if each.kind == PASSED:
            by_file[each.result.file].append(each.result)
    for file, results in by_file.items():
        yield from _item(f"- `{file}`: {_tests(results)}")
    yield ""


def _not_passed(title: str, judged: Sequence[Judged]) -> Iterator[str]:
    yield f"### {title}"
    yield ""
    by_reason: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for each in judged:
        by_reason[each.reason, each.result.file].append(each.result)
    last = None
    for (reason, file), results in sorted(by_reason.items(), key=lambda item: item[0]):
        if reason != last:
            yield from _item(f"- {reason or 'no reason is written down'}:")
            last = reason
        yield from _item(f"    - `{file}`: {_tests(results)}")
    yield ""


def _item(text: str) -> list[str]:
    """An item of a list, in lines that fit."""
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _tests(results: Sequence[Result]) -> str:
    """Names with their lines; of a test with parameters the number of those."""
    found: dict[tuple[str, int | None], int] = Counter((each.name.partition("[")[0], each.line) for each in results)
    shown = []
    for (name, line), number in found.items():
        text = f"{name.removeprefix('test_')} ({line})" if line is not None else name
        shown.append(f"{text} x {number}" if number > 1 else text)
    return ", ".join(shown)
