"""`headrace doctor --fix` as a command: what is run again for each kind of evidence, and exit codes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.engines.headrace_engine import HeadraceEngine
from headrace.bench.offline import measure_offline
from headrace.bench.record import write_record
from headrace.bench.workloads import Workload, WorkloadSpec, build
from headrace.cli import doctor_fix
from headrace.cli.main import main
from headrace.doctor.evidence import Evidence
from tests.bench.engines_for_tests import FakeEngine
from tests.doctor.builders import COUNTERS, job_summary, live

WORKLOAD = build(WorkloadSpec(name="random", num_requests=4, input_len=8, output_len=4))
COMMAND = "headrace serve smollm2 --max-num-seqs 4 --gpu-memory-utilization 0.5 --port 9000"


class Named(FakeEngine):
    """Stands in for Headrace. A batch of 72 or more memory is twice as fast."""

    name = "headrace"

    def __init__(self) -> None:
        super().__init__(_seconds)


def _seconds(settings: Mapping[str, Any], workload: Workload) -> float:
    is_fast = settings.get("max_num_seqs") == 72 or settings.get("gpu_memory_utilization", 0) > 0.9
    return 0.5 if is_fast else 1.0


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Named:
    found = Named()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("headrace.checkpoint.rerun.engine_of", lambda checkpoint, options: found)
    monkeypatch.setattr(doctor_fix, "engine_of", lambda given: found)
    monkeypatch.setattr(doctor_fix, "fetch_if_missing", lambda model, quiet: None)
    monkeypatch.setattr(doctor_fix, "workload_of", lambda given, model, num_requests: (WORKLOAD, []))
    return found


@pytest.fixture
def record(tmp_path: Path, engine: Named) -> Path:
    """A preempting offline run, with a cache of 64 blocks that was given."""
    with engine.start({"num_gpu_blocks_override": 64}, serves=False) as running:
        found = measure_offline(running, WORKLOAD, num_rounds=1)
    found["engine"]["name"] = "headrace"
    found["rounds"][0]["counters"] = COUNTERS
    engine.started.clear()
    path = tmp_path / "record.json"
    write_record(found, path)
    return path


def test_the_first_advice_of_a_record_is_tested(
    record: Path, engine: Named, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(record), "--fix"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == (
        "max_num_seqs=72 instead of the default: 2.00x [2.00, 2.00] output tokens/s, shown in 5 interleaved rounds"
    )
    settings = [{name: each.value for name, each in one.settings_in_force().items()} for one in engine.started[:2]]
    assert settings == [
        {"num_gpu_blocks_override": 64},
        {"num_gpu_blocks_override": 64, "max_num_seqs": 72},
    ]


def test_the_same_requests_are_sent_again(record: Path, engine: Named) -> None:
    main(["doctor", "--fix", str(record)])
    assert engine.started[0].runs[-1].requests == WORKLOAD.requests
    assert not list(Path("headrace-bench").glob("*.journal"))


def test_a_document_and_a_record_are_written(record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "fix.json"
    assert main(["doctor", str(record), "--fix", "all", "--rounds", "6", "--json", "-o", str(output)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(output.read_text())
    assert document["tested"][0]["verdict"] == "better" and document["tested"][0]["num_rounds"] == 6


def test_a_change_that_does_not_help_is_exit_code_3(
    tmp_path: Path, engine: Named, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(job_summary(preemptions=90, recomputed_tokens=90_000)))
    data = tmp_path / "data.jsonl"
    data.write_text("")
    engine._seconds = lambda settings, workload: 1.0
    assert main(["doctor", str(path), "--fix", "--data", str(data)]) == 3
    assert "no difference shown in 5 interleaved rounds" in capsys.readouterr().out


def test_a_command_is_tested_with_its_own_settings(engine: Named, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", COMMAND, "--fix", "--input-len", "8", "--output-len", "4"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("gpu_memory_utilization=0.92 instead of 0.5: 2.00x")
    assert "requests of 8 random tokens and 4 out" in out
    assert engine.started[0].settings_in_force().keys() == {"max_num_seqs", "gpu_memory_utilization"}


def test_the_assumed_workload_of_a_command_is_stated(engine: Named, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", COMMAND, "--fix"])
    assert "768 random tokens and 256 out (assumed;" in capsys.readouterr().out


def test_copies_of_a_server_have_its_settings_and_its_load(
    engine: Named, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {
        "model": {"name": "smollm2"},
        "settings": {
            "max_num_seqs": {"value": 4, "source": "given"},
            "block_size": {"value": 16, "source": "default"},
            "port": {"value": 9000, "source": "given"},
            "api_key": {"value": "set", "source": "given"},
        },
    }
    asked: list[Any] = []

    def seen(*arguments: Any, **options: Any) -> Evidence:
        return live(
            is_on_cpu=True, num_running=4.0, num_waiting=9.0, kv_use=0.1, prompt_len=30.0, settings={"max_num_seqs": 4}
        )

    def workload_of(given: Any, model: str, num_requests: int) -> tuple[Workload, list[str]]:
        asked.append((given.concurrency, given.input_len, given.output_len, model))
        return WORKLOAD, []

    monkeypatch.setattr("headrace.doctor.readers.live.read_live", seen)
    monkeypatch.setattr("headrace.bench.engines.http.ServerClient.get_json", lambda self, path: told)
    monkeypatch.setattr(doctor_fix, "workload_of", workload_of)
    monkeypatch.setattr(doctor_fix, "measure_of", lambda given, loads, slo: _measure)
    assert main(["doctor", "--url", "http://127.0.0.1:9", "--fix"]) == 3
    assert asked == [([13], 30, 250, "smollm2")]
    assert {name for one in engine.started for name in one.settings_in_force()} == {"max_num_seqs"}
    assert "copies of the server were measured on this machine" in capsys.readouterr().out


def _measure(running: Any, workload: Workload) -> dict[str, Any]:
    return measure_offline(running, workload, num_rounds=1)


def test_without_a_setting_to_test_nothing_is_started(
    tmp_path: Path, engine: Named, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(job_summary(limited_by_seconds={"disk": 9.0, "decode": 1.0})))
    assert main(["doctor", str(path), "--fix"]) == 3
    out = capsys.readouterr().out
    assert out.startswith("No advice has a setting that can be tested.") and "it is no setting of the engine" in out
    assert not engine.started


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RECORD", "--fix", "--rounds", "4"], "--rounds must be at least 5"),
        (["SUMMARY", "--fix"], "give it with --data"),
        (["OPENAI", "--fix"], "bench did not start"),
    ],
)
def test_what_cannot_be_tested_is_wrong_usage(
    arguments: list[str], message: str, record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(record.read_text())
    others = {
        "SUMMARY": job_summary(preemptions=90, recomputed_tokens=90_000),
        "OPENAI": {**found, "engine": {**found["engine"], "name": "openai"}},
    }
    path = record
    if arguments[0] in others:
        path = tmp_path / "other.json"
        path.write_text(json.dumps(others[arguments[0]]))
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", str(path), *arguments[1:]])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.processes
def test_advice_is_tested_with_a_real_engine(
    tiny_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve slots of a cache for three: the record of a real run, and advice tested with real engines."""
    monkeypatch.chdir(tmp_path)
    spec = WorkloadSpec(name="random", num_requests=24, input_len=8, output_len=24).for_vocabulary(256)
    settings = {"block_size": 4, "num_gpu_blocks_override": 32, "max_num_seqs": 12, "max_model_len": 96}
    with HeadraceEngine(str(tiny_directory)).start(settings, serves=False) as running:
        found = measure_offline(running, build(spec), num_rounds=1)
    write_record(found, tmp_path / "record.json")
    code = main(["doctor", "record.json", "--fix", "-o", "fix.json"])
    document = json.loads((tmp_path / "fix.json").read_text())
    (tested,) = document["tested"]
    assert tested["setting"] == "num_gpu_blocks_override" and tested["verdict"] != "not measured"
    assert code == (0 if tested["verdict"] == "better" else 3)
    assert [len(row["rounds"]) for row in tested["sweep"]["configs"]] == [5, 5]
