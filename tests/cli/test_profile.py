from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from headrace.cli.main import main
from tests.profile.builders import record_of, step


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    event = {"ph": "X", "cat": "kernel", "name": "_norm", "ts": 1.5, "dur": 2, "pid": 0, "tid": 7}
    trace = {"baseTimeNanoseconds": 5, "traceEvents": [event]}
    (tmp_path / "a.trace.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))
    path = tmp_path / "a.profile.json"
    path.write_bytes(msgspec.json.encode(record_of([step()], trace="a.trace.json.gz")))
    return path


def test_a_recorded_profile_is_shown(profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = [tmp_path / "out.json", tmp_path / "out.html"]
    arguments = ["profile", "--trace", str(profile), "--json", str(outputs[0]), "--picture", str(outputs[1])]
    assert main(arguments) == 0
    assert "norms, activations, routing" in capsys.readouterr().out
    assert json.loads(outputs[0].read_text())["parts"]["elementwise"]["share"] == 1.0
    assert outputs[1].read_text().startswith("<!doctype html>")


def test_json_can_replace_the_table(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--trace", str(profile), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["num_steps"] == 1


def test_reading_a_profile_imports_no_torch(profile: Path) -> None:
    code = "import sys; from headrace.cli.main import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    found = subprocess.run(
        [sys.executable, "-c", code, "profile", "--trace", str(profile)], capture_output=True, check=False
    )
    assert found.returncode == 0, found.stderr.decode()


def test_a_bad_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("{}")
    assert main(["profile", "--trace", str(tmp_path / "x.json")]) == 2
    assert "neither a trace nor a record" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m", "--url", "http://x"], "give one of MODEL, --url and --trace"),
        (["--url", "http://x", "--trace", "y"], "give one of MODEL, --url and --trace"),
        (["--api-key", "k"], "--api-key is for --url"),
        (["--url", "http://x", "--steps", "3"], "--steps is for a run in this process"),
        (["--seconds", "0"], "must be above 0"),
        (["--seconds", "61"], "at most 60"),
        (["--tool", "cuda", "--json", "x"], "leaves no trace"),
        (["--picture", "/no/such/directory/x.html"], "does not exist"),
        (["m", "--model", "n"], "two models are given"),
        (["--worklod", "chat"], "did you mean '--workload'"),
    ],
)
def test_wrong_usage_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["profile", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
