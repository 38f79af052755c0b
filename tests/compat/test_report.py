"""The page about other projects' tests: each result is judged by the reasons, and a failure without one is seen."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from tests.compat.adapter.compat_server import translated
from tests.compat.flags import flags_of
from tests.compat.report import KINDS, NO_REASON, Project, page
from tests.compat.results import OUTSIDE, OWN_CODE, Result, merged, read_notes, read_results, write_results
from tests.compat.run import Part, Suite

SCOPE = {
    "title": "vLLM",
    "about": "Its tests.",
    "reasons": [{"tests": ["chat/test_chat.py::test_lora*"], "kind": "missing", "reason": "no adapters"}],
}
HERE = Path(__file__).parent


def project(*results: Result) -> Project:
    return Project(commit="abc of 2026-08-22", folder="tests/entrypoints", results=results, scope=SCOPE)


def result(name: str, outcome: str = "failed", *, date: str = "2026-11-17", commit: str = "") -> Result:
    return Result(f"tests/entrypoints/chat/test_chat.py::{name}", outcome, 12, date=date, commit=commit)


def test_each_result_has_its_kind_and_reason() -> None:
    made = project(
        result("test_a", "passed"),
        result("test_lora[x]"),
        result("test_unit", OUTSIDE),
        result("test_b"),
    )
    assert [each.kind for each in made.judged] == ["passed", "missing", "outside", NO_REASON]
    assert made.num_applicable == 3 and made.summary.startswith("vLLM: 1 of 3 tests")


def test_a_pass_that_shows_nothing_is_not_counted() -> None:
    rule = {"tests": ["chat/*"], "kind": "missing", "reason": "no such route", "even_if_passed": True}
    made = Project(
        commit="abc",
        folder="tests/entrypoints",
        results=[result("test_a", "passed")],
        scope={**SCOPE, "reasons": [rule]},
    )
    assert [each.kind for each in made.judged] == ["missing"]


def test_the_page_names_each_test_with_its_line() -> None:
    made = project(result("test_a[1]", "passed"), result("test_a[2]", "passed"), result("test_lora[x]"))
    text = page([made], version="0.1.0")
    assert "| vLLM | abc of 2026-08-22 | 3 | 2 | 1 | 0 | 0 | 0 |" in text
    assert "`tests/entrypoints/chat/test_chat.py`: a (12) x 2" in text
    assert "- no adapters:\n    - `tests/entrypoints/chat/test_chat.py`: lora (12)" in text


def test_the_page_names_every_commit_of_its_runs() -> None:
    runs = [result("test_a", "passed", commit="b2"), result("test_b", "passed", commit="a1", date="2026-11-18")]
    assert "on a CPU, 2026-11-17 to 2026-11-18, at commits a1, b2." in page([project(*runs)], version="0.1.0")


def test_a_run_of_some_tests_keeps_the_results_of_the_others(tmp_path: Path) -> None:
    path, old = tmp_path / "results/vllm.jsonl", [result("test_a"), result("test_b")]
    new = result("test_b", "passed", date="2026-11-18")
    write_results(path, merged(old, [new], file=new.file, is_whole=False))
    assert [(each.name, each.outcome, each.date) for each in read_results(path)] == [
        ("test_a", "failed", "2026-11-17"),
        ("test_b", "passed", "2026-11-18"),
    ]
    assert merged(old, [new], file=new.file, is_whole=True) == [new], "test_a is gone from the file"


def test_a_test_that_passes_and_errs_in_its_teardown_has_failed() -> None:
    notes = [
        {"test": "a.py::test_a", "outcome": "failed", "line": 3, "message": "no"},
        {"test": "a.py::test_a", "outcome": "passed", "line": 3, "message": ""},
        {"test": "a.py::test_b", "outcome": "skipped", "line": 9, "message": f"Skipped: {OWN_CODE}: vllm.x"},
    ]
    read = read_notes("\n".join(map(json.dumps, notes)), model="smollm2", date="", commit="")
    assert [each.outcome for each in read] == ["failed", OUTSIDE]


def test_a_test_that_was_started_and_did_not_end_has_failed() -> None:
    notes = [
        {"test": "a.py::test_a", "outcome": "started", "line": 3, "message": ""},
        {"test": "a.py::test_a", "outcome": "passed", "line": 3, "message": ""},
        {"test": "a.py::test_b", "outcome": "started", "line": 9, "message": ""},
    ]
    read = read_notes("\n".join(map(json.dumps, notes)), model="smollm2", date="", commit="")
    assert [(each.outcome, each.message) for each in read] == [("passed", ""), ("failed", "it did not end")]


def test_flags_are_read_from_the_source_of_a_checkout(tmp_path: Path) -> None:
    sources = {
        "vllm/engine/arg_utils.py": 'group.add_argument("--max-num-seqs", **x)\ngroup.add_argument("--gpu", "-g")\n',
        "vllm/entrypoints/cli/serve.py": 'parser.add_argument("model")\nparser.add_argument("--enforce-eager")\n',
        "vllm/entrypoints/openai/cli_args.py": "class Arguments:\n    tool_server: str | None = None\n",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = flags_of(tmp_path)
    assert found is not None
    assert found.outcomes == {
        "--enforce-eager": "ignored",
        "--gpu": "unknown",
        "--max-num-seqs": "same",
        "--tool-server": "refused",
    }
    made = Project(commit="abc", folder="tests/entrypoints", results=[], scope=SCOPE, flags=found)
    assert "4 long flags" in page([made], version="0.1.0") and "1 unknown (--gpu)" in page([made], version="0.1.0")
    assert flags_of(tmp_path / "other") is None


def test_flags_of_the_tests_are_dropped_with_their_values_or_renamed() -> None:
    given = ["--dtype", "half", "--enforce-eager", "--max_model_len", "64", "--dtype=half", "--seed", "1"]
    assert translated(given, "vllm") == ["--max-model-len", "64", "--seed", "1"]
    adapters = ["--enable-lora", "--lora-modules", "a=b"]
    assert (translated(adapters, "vllm"), translated(adapters, "vllm", has_lora=True)) == ([], adapters)
    assert translated(["--context-length", "64", "--tp-size", "2"], "sglang") == ["--max-model-len", "64"]


def test_tests_that_are_named_run_with_a_model_of_their_own() -> None:
    suite = Suite("vllm", "vllm_plugin", "tests/entrypoints")
    chat = suite.parts_of(Path("/x/tests/entrypoints/openai/chat_completion/test_chat.py"))
    other = suite.parts_of(Path("/x/tests/entrypoints/openai/chat_completion/test_chat_completion.py"))
    split = suite.parts_of(Path("/x/tests/entrypoints/openai/completion/test_completion.py"))
    assert (chat, other) == ([Part("smollm2")], [Part("scripted")])
    assert split == [
        Part("smollm2", "not (test_completion_streaming)"),
        Part("scripted", "test_completion_streaming"),
    ]


@pytest.mark.parametrize("name", ["vllm", "sglang", "llama_cpp"])
def test_every_reason_has_a_known_kind_and_a_sentence(name: str) -> None:
    scope = tomllib.loads((HERE / "scope.toml").read_text(encoding="utf-8"))[name]
    assert scope["title"] and scope["about"] and scope["files"]
    for rule in scope["reasons"]:
        assert rule["tests"] and rule["reason"] and rule["kind"] in KINDS and rule["kind"] != NO_REASON
