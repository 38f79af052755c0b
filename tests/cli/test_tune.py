from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.engines import EngineFailure
from headrace.cli import tune as command
from headrace.cli.main import main
from headrace.tune import run
from headrace.tune.spec import Tune
from tests.tune.builders import SimulatedEngine
from tests.tune.surfaces import larger_batches

# A shape with random weights: nothing is fetched.
FEW = (
    "llama-3.1-8b",
    "--workload",
    "random",
    "--num-requests",
    "600",
    "--input-len",
    "16",
    "--output-len",
    "64",
    "--quiet",
)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimulatedEngine:
    """The engine of the command line, simulated, and its clock."""
    simulated = SimulatedEngine(larger_batches, noise=0.01)

    real = run.run_tune

    def quick(tune: Tune, path: Path, say: Any) -> Any:
        return real(replace(tune, clock=simulated.clock, check=lambda *_: None), path, say)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "engine_of", lambda given, **_: simulated)
    monkeypatch.setattr(run, "run_tune", quick)
    return simulated


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["tune", *arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_serve_needs_an_slo_and_shows_one(capsys: pytest.CaptureFixture[str]) -> None:
    text = usage_error(capsys, "--goal", "serve")
    assert "--slo" in text and "ttft:p95<500ms" in text


def test_an_slo_needs_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--goal serve" in usage_error(capsys, "--slo", "ttft:p95<500ms")


def test_a_running_server_is_for_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert "only the load of a running server" in usage_error(capsys, "--url", "http://127.0.0.1:1")


def test_a_budget_that_cannot_be_read_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "20m" in usage_error(capsys, "--budget", "soon")


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("max_num_seq=1,2", "max_num_seqs"),
        ("max_num_seqs", "NAME=V1,V2"),
        ("max_num_seqs=", "NAME=V1,V2"),
    ],
)
def test_a_search_that_is_wrong_is_refused(capsys: pytest.CaptureFixture[str], item: str, message: str) -> None:
    assert message in usage_error(capsys, "--search", item)


def test_a_setting_cannot_be_fixed_and_searched(capsys: pytest.CaptureFixture[str]) -> None:
    text = usage_error(capsys, "--max-num-seqs", "64", "--search", "max_num_seqs=32,64")
    assert "fixes it" in text


def test_the_result_is_printed_and_written(engine: SimulatedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *FEW]) == 0
    out = capsys.readouterr().out
    assert out.startswith("tuned against default: 1.2")
    record = json.loads(Path("headrace-tune/llama-3.1-8b-batch.tune.json").read_text())
    assert record["kind"] == "tune" and record["decision"]["verdict"] == "tuned"
    text = Path("headrace-tune/llama-3.1-8b-batch.tune.toml").read_text()
    assert 'model = "llama-3.1-8b"' in text and "max_num_seqs = " in text


def test_given_values_are_read_as_json(engine: SimulatedEngine) -> None:
    searches = ["--search", "max-num-seqs=64,256", "--search", "enable_prefix_caching=false"]
    assert main(["tune", *FEW, *searches, "-o", "found.json"]) == 0
    record = json.loads(Path("found.json").read_text())
    assert {knob["name"]: knob["values"] for knob in record["knobs"]} == {
        "max_num_seqs": [64, 256],
        "enable_prefix_caching": [False],
    }


def test_a_fixed_setting_holds_for_all_configs(engine: SimulatedEngine) -> None:
    assert main(["tune", *FEW, "--set", "max_num_seqs=64"]) == 0
    assert {settings["max_num_seqs"] for settings in engine.started} == {64}


def test_an_interruption_can_be_resumed(engine: SimulatedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.interrupt_after = 5
    assert main(["tune", *FEW]) == 75
    assert capsys.readouterr().out.startswith("not confirmed")
    engine.interrupt_after = None
    assert main(["tune", *FEW]) == 0
    assert capsys.readouterr().out.startswith("tuned against default")


def test_a_default_that_fails_is_an_error(engine: SimulatedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    def refuses(settings: Mapping[str, Any]) -> EngineFailure:
        return EngineFailure("crash", "no such model")

    engine.refuses = refuses
    assert main(["tune", *FEW]) == 1
    assert "no such model" in capsys.readouterr().err
