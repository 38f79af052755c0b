"""`headrace checkpoint` as its user sees it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.record import write_record
from headrace.checkpoint.document import read_checkpoint
from headrace.cli.main import main
from tests.bench.records import offline_record
from tests.checkpoint.made import STEADY, checkpoint, engine, offline_facts


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["checkpoint", *arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A checkpoint of a record, made by the command."""
    write_record(offline_record(), tmp_path / "r.json")
    path = tmp_path / "a.checkpoint"
    assert main(["checkpoint", "create", str(tmp_path / "r.json"), "-o", str(path), "--decision", "keep it"]) == 0
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shwo"], "unknown subcommand 'shwo', did you mean 'show'?"),
        (["show"], "FILE"),
        (["create", "r.json"], "-o/--output"),
        (["verify", "a", "--rounds", "0"], "at least 1"),
        (["verify", "a", "--round", "2"], "did you mean '--rounds'"),
    ],
)
def test_wrong_usage_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert message in usage_error(capsys, *arguments)


def test_a_record_becomes_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, path = tmp_path / "r.json", tmp_path / "a.checkpoint"
    write_record(offline_record(), record)
    assert main(["checkpoint", "create", str(record), "-o", str(path), "--decision", "keep it"]) == 0
    assert "keep it" in capsys.readouterr().out
    assert read_checkpoint(path).at("decision", "text") == "keep it"


def test_show_prints_decision_figures_settings_and_environment(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "show", str(recorded)]) == 0
    shown = capsys.readouterr().out
    for text in ("keep it", "output tokens/s", "1,000", "max_num_seqs", "A CPU", "2.11.0", "0123456789abcdef"):
        assert text in shown
    assert "was edited" not in shown


def test_an_edited_file_is_shown_with_a_warning(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded.write_text(recorded.read_text().replace("keep it", "change it"))
    assert main(["checkpoint", "show", str(recorded)]) == 0
    assert "was edited" in capsys.readouterr().out


def test_diff_names_facts_settings_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "a.checkpoint", tmp_path / "b.checkpoint"
    checkpoint(before, STEADY, max_num_seqs=4)
    checkpoint(after, [2.0, 2.02, 1.98], max_num_seqs=8)
    assert main(["checkpoint", "diff", str(before), str(after)]) == 0
    shown = capsys.readouterr().out
    assert "max_num_seqs" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith(" all requests at once   output tokens/s")]
    assert "0.500   0.487 to 0.513" in line
    assert main(["checkpoint", "diff", str(before), str(before)]) == 0
    assert "All facts and settings are equal." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "code", "message"),
    [
        (STEADY, 0, "The checkpoint holds."),
        ((2.0, 2.0, 2.0), 3, "The checkpoint does not hold."),
    ],
)
def test_verify_says_whether_it_holds(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds: tuple[float, ...],
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr("headrace.checkpoint.rerun.engine_of", lambda *_: engine(seconds))
    checkpoint(tmp_path / "a")
    assert main(["checkpoint", "verify", str(tmp_path / "a"), "-o", str(tmp_path / "new")]) == code
    shown = capsys.readouterr()
    assert message in shown.out
    assert "round 3 of 3" in shown.err
    assert read_checkpoint(tmp_path / "new").at("verification", "num_rounds") == 3


def test_what_cannot_be_verified_is_one_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(tmp_path / "a")
    assert main(["checkpoint", "verify", str(tmp_path / "a")]) == 1
    assert "unknown engine 'fake'" in capsys.readouterr().err
    (tmp_path / "b").write_text((tmp_path / "a").read_text()[:300])
    assert main(["checkpoint", "verify", str(tmp_path / "b")]) == 1
    assert "truncated" in capsys.readouterr().err


def test_too_much_recorded_noise_is_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headrace.checkpoint.rerun.engine_of", lambda *_: engine([2.0, 2.0]))
    checkpoint(tmp_path / "a", [1.0, 3.0])
    assert main(["checkpoint", "verify", str(tmp_path / "a"), "--quiet"]) == 1
    shown = capsys.readouterr()
    assert "could not be verified" in shown.out
    assert shown.err == ""


def test_commands_that_only_read_import_no_torch(recorded: Path) -> None:
    code = "import sys; from headrace.cli.main import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    for arguments in (["show", str(recorded)], ["diff", str(recorded), str(recorded)], ["--help"]):
        command = [sys.executable, "-c", code, "checkpoint", *arguments]
        subprocess.run(command, check=True, capture_output=True)


def test_create_imports_no_torch(recorded: Path, tmp_path: Path) -> None:
    code = "import sys; from headrace.cli.main import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    arguments = ["create", str(tmp_path / "r.json"), "-o", str(tmp_path / "b")]
    subprocess.run([sys.executable, "-c", code, "checkpoint", *arguments], check=True, capture_output=True)


def test_verification_names_a_changed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from headrace.checkpoint.document import write_checkpoint

    facts: dict[str, Any] = offline_facts()
    write_checkpoint(facts | {"versions": facts["versions"] | {"torch": "0.0.1"}}, tmp_path / "a")
    monkeypatch.setattr("headrace.checkpoint.rerun.engine_of", lambda *_: engine())
    assert main(["checkpoint", "verify", str(tmp_path / "a")]) == 0
    shown = capsys.readouterr().out
    assert "not the recorded environment: package differ" in " ".join(shown.split())
    assert "0.0.1" in shown
    assert json.loads((tmp_path / "a").read_text())["versions"]["torch"] == "0.0.1"
