"""The page of clients, the catalogue and the scripts agree. `make clients` runs the scripts themselves."""

from __future__ import annotations

import ast
import builtins
import json
import re
import subprocess
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.clients import run, snippets
from tests.clients.catalogue import CLIENTS, HERE, TORCH, Client
from tests.clients.run import ADMIN_KEY, KEY, Result, main, record, table

ROOT = Path(__file__).parents[2]
TEXT = snippets.PAGE.read_text(encoding="utf-8")
GIVEN = {"URL", "KEY", "MODEL"}  # the page defines them
RECORD = ROOT / "benchmarks/results/clients.json"


def blocks_of(client: Client) -> list[tuple[str, str]]:
    """The language and the text of the code blocks in the client's section."""
    section = TEXT.partition(f"\n## {client.name}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```(\w+)\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)


def test_every_client_has_a_script_and_every_script_a_client() -> None:
    scripts = {path.name for path in HERE.glob("*_client.py")}
    assert scripts == {client.script.name for client in CLIENTS}
    assert len({client.name for client in CLIENTS}) == len(CLIENTS)


def test_the_page_has_what_the_scripts_have() -> None:
    assert snippets.rewritten(TEXT) == TEXT, "run: python -m tests.clients.snippets"


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_every_client_has_a_section_with_all_parts_of_its_script(client: Client) -> None:
    assert blocks_of(client), f"no section ## {client.name}"
    placed = re.findall(rf"^<!-- {client.script.name}: (.*) -->$", TEXT, flags=re.MULTILINE)
    names = [name for places in placed for name in places.split(", ")]
    assert sorted(names) == sorted(snippets.parts_of(client.script))


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_the_snippets_of_a_client_define_every_name_they_use(client: Client) -> None:
    code = "\n".join(text for language, text in blocks_of(client) if language == "python")
    names = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
    used = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    defined = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
            defined |= {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}
    assert used - defined - GIVEN - set(dir(builtins)) == set()


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_every_script_has_checks_and_reports_them(client: Client) -> None:
    assert snippets.checks_of(client.script)
    assert "main(" in ast.unparse(ast.parse(client.script.read_text(encoding="utf-8")).body[-1])


def test_versions_are_exact() -> None:
    assert [package for client in CLIENTS for package in client.packages if "==" not in package] == []


def test_the_newest_versions_are_installed_only_when_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed: list[list[str]] = []

    def fake_run(command: list[object], **_: object) -> SimpleNamespace:
        installed.append([str(part) for part in command[5:]])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(run, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(venv, "create", lambda home, with_pip: home.mkdir(exist_ok=True))
    monkeypatch.setattr(subprocess, "run", fake_run)
    client = Client(name="one", packages=("one[more]==1.0", TORCH))
    for latest in (False, False, True, False):
        run.prepare(client, latest=latest)
    pinned, newest = ["--upgrade", "one[more]==1.0", TORCH], ["--upgrade", "one[more]", TORCH]
    assert installed == [pinned, newest, pinned]  # not again while the versions are the same


def test_an_unknown_client_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["opneai"])
    assert stopped.value.code == 2 and "there is no client opneai" in capsys.readouterr().err


def test_a_failed_check_is_in_the_table() -> None:
    failed = Result("one", "1.0", {"chat": None, "stream": "AssertionError: at /home/user"}, 1.25)
    skipped = Result("two", None, {}, 0.0, skipped="not installed")
    broken = Result("three", None, {}, 3.0, failure="not done after 3 s")
    shown = table([failed, skipped, broken]).splitlines()
    assert shown[1].split() == ["one", "1.0", "1/2", "1.2", "failed:", "stream"]
    assert shown[2].endswith("skipped: not installed") and shown[3].endswith("not done after 3 s")
    assert not failed.is_good and skipped.is_good and not broken.is_good


def test_a_record_has_no_messages_and_keeps_what_did_not_run_again() -> None:
    first = record([Result("litellm", "1.0", {"chat": None}, 1.0), Result("openai", "1.0", {"chat": None}, 1.0)])
    failed = Result("openai", "2.0", {"chat": "AssertionError: at /home/user"}, 1.0)
    written = record([failed], first)
    assert [(entry["client"], entry["failed"]) for entry in written["clients"]] == [
        ("openai", ["chat"]),
        ("litellm", []),
    ]
    assert "/home" not in json.dumps(written)


def test_the_record_is_of_these_clients_and_all_passed() -> None:
    found = json.loads(RECORD.read_text(encoding="utf-8"))
    assert [entry["client"] for entry in found["clients"]] == [client.name for client in CLIENTS]
    for entry, client in zip(found["clients"], CLIENTS, strict=True):
        assert entry["passed"] == snippets.checks_of(client.script) and entry["failed"] == [], client.name
        if client.packages:
            assert f"=={entry['version']}" in client.packages[0]
    assert KEY not in RECORD.read_text() and ADMIN_KEY not in RECORD.read_text()
