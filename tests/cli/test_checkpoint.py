"""`headrace checkpoint` as its user sees it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.bench.record import write_record
from headrace.checkpoint.document import read_checkpoint
from headrace.cli.main import main
from tests.bench.engines_for_tests import FakeEngine
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


# ---- written by other commands


def test_a_benchmark_writes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from headrace.bench.load.null_server import null_server

    path = tmp_path / "a.checkpoint"
    with null_server() as server:
        arguments = ["--url", server.address, "--workload", "random", "--input-len", "4", "--output-len", "6"]
        arguments += ["--concurrency", "2", "--num-requests", "10", "--no-warm-up", "-o", str(tmp_path / "r.json")]
        assert main(["bench", *arguments, "--checkpoint", str(path)]) == 0
        made = read_checkpoint(path)
        assert made.at("engine", "address") == server.address
        assert made.at("load", "levels") == [{"kind": "closed_loop", "concurrency": 2, "num_requests": 10}]
        assert "decision: measured as it was started" in capsys.readouterr().err
        assert main(["checkpoint", "verify", str(path), "--quiet"]) in (0, 3)  # the null server's speed varies
        assert "2 concurrent" in capsys.readouterr().out


def test_a_benchmark_refuses_a_place_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for command in (["bench"], ["bench", "sweep", "c.json"], ["run", "in", "-o", "out"], ["serve"]):
        with pytest.raises(SystemExit):
            main([*command, "--checkpoint", str(tmp_path / "file" / "a")])
        assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("place", [None, "chosen.checkpoint"])
def test_a_sweep_writes_one_of_its_best_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str | None
) -> None:
    def seconds(settings: Any, workload: Any) -> float:
        return float(settings.get("max_num_seqs", 1))

    monkeypatch.setattr("headrace.cli.bench.sweep.engine_of", lambda given: FakeEngine(seconds))
    configs, record = tmp_path / "configs.json", tmp_path / "s.json"
    configs.write_text(json.dumps([{"max_num_seqs": 4}, {"max_num_seqs": 2}, {}]))
    arguments = [str(configs), "llama-3.2-1b", "--workload", "random", "--num-requests", "4", "-o", str(record)]
    arguments += [] if place is None else ["--checkpoint", str(tmp_path / place)]
    assert main(["bench", "sweep", *arguments]) == 0
    path = tmp_path / (place or "s.checkpoint")
    made = read_checkpoint(path)
    assert made.kind == "sweep"
    assert made.at("decision", "chosen") == "defaults"
    assert made.at("decision", "alternatives")[0]["ratio"] == 2.0
    assert f"checkpoint: {path}" in capsys.readouterr().err
    again = tmp_path / "again.checkpoint"
    assert main(["checkpoint", "create", str(record), "-o", str(again)]) == 0
    volatile = {"created_at", "digest"}
    assert {name: value for name, value in read_checkpoint(again).facts.items() if name not in volatile} == {
        name: value for name, value in made.facts.items() if name not in volatile
    }


def test_a_job_writes_one_that_names_its_input_and_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from headrace.engine.core import EngineStats
    from headrace.engine.settings import SettingInForce
    from headrace.jobs.status.report import JobReport, Tally
    from headrace.sched import SchedulerStats

    def run_job(job: Any, **options: Any) -> JobReport:
        return JobReport(
            output=job.output,
            model_name="m",
            was_stopped=False,
            num_in_flight=0,
            tally=Tally(num_answered=2, num_prompt_tokens=20, num_generated_tokens=40),
            seconds=2.0,
            start_seconds=1.0,
            stats=EngineStats(SchedulerStats(), 0.0, 0.0),
            choices=(),
            in_force={"max_num_seqs": SettingInForce(3, "given")},
        )

    monkeypatch.setattr("headrace.jobs.run.run_job.run_job", run_job)
    monkeypatch.setattr("headrace.cli.fetching.fetch_if_missing", lambda model, **options: None)
    source, path = tmp_path / "in.jsonl", tmp_path / "a.checkpoint"
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    arguments = [str(source), "-o", str(tmp_path / "out"), "--max-num-seqs", "3", "--checkpoint", str(path)]
    assert main(["run", *arguments]) == 0
    made = read_checkpoint(path)
    assert made.kind == "job"
    assert made.workload_kind == "batch"
    assert made.at("rerun", "arguments") == ["{input}", "--max-num-seqs", "3"]
    assert made.at("verification", "loads")[0]["figures"]["output_tokens_per_s"]["mean"] == 20.0
    assert made.at("workload", "num_requests") == 2
    assert made.at("engine", "settings", "max_num_seqs") == {"value": 3, "source": "given", "reason": ""}
    with pytest.raises(SystemExit):
        main(["run", *arguments, "--check"])

    # Verified by running the job again, here with a stand-in for its process.
    seen: list[list[str]] = []
    summary = run_job(SimpleNamespace(output="o")).as_json()

    def run_once(words: list[str]) -> dict[str, Any]:
        seen.append(words)
        return summary | {"completion_tokens_per_second": 10.0 if len(seen) > 1 else 20.0}

    monkeypatch.setattr("headrace.checkpoint.rerun.run_once", run_once)
    verify = ["checkpoint", "verify", str(path), "--model", str(tmp_path)]
    assert main(verify) == 0
    assert seen == [[str(source), "--max-num-seqs", "3", "--model", str(tmp_path)]]
    assert main(verify) == 3
    source.write_text('{"prompt": "c"}\n')
    assert main(verify) == 1
    assert "is not the recorded one" in capsys.readouterr().err


def test_a_server_writes_its_settings_and_no_key(tiny_directory: Path, tmp_path: Path) -> None:
    import asyncio

    from headrace.checkpoint.rerun import settings_given
    from headrace.cli.serve import _writes_checkpoint
    from headrace.config import EngineConfig
    from headrace.engine.async_engine import AsyncEngine
    from headrace.engine.start import start_engine
    from headrace.server.http.keys import Keys
    from headrace.server.options import ServerOptions
    from headrace.server.serve import Server

    path = tmp_path / "a.checkpoint"
    config = EngineConfig(model=str(tiny_directory), max_num_seqs=4, num_gpu_blocks_override=64)
    options = ServerOptions(port=0, api_key="secret", max_num_queued_reqs=9)
    printed: list[str] = []

    async def start() -> None:
        engine = AsyncEngine.over(lambda deliver: start_engine(config, deliver))
        keys = Keys(options, environ={}, print_line=printed.append)
        server = Server(engine, options, keys, model_name="tiny", config=config, print_line=printed.append)
        await _writes_checkpoint(path, config, ["--api-key", "secret"])(server)
        await engine.close()

    asyncio.run(start())
    made = read_checkpoint(path)
    assert "secret" not in path.read_text()
    assert "4 of 4 requests answered" in made.at("decision", "text")
    assert made.at("model", "name") == str(tiny_directory)
    assert settings_given(made) == {"max_num_seqs": 4, "num_gpu_blocks_override": 64, "max_num_queued_reqs": 9}


@pytest.mark.embedded
@pytest.mark.slow
@pytest.mark.processes
def test_the_default_model_is_measured_recorded_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole way with the real engine: benchmark, job, and their verification."""
    path, record = tmp_path / "bench.checkpoint", tmp_path / "r.json"
    work = ["--workload", "uniform", "--num-requests", "16", "--output-len", "16", "--max-num-seqs", "16"]
    assert main(["bench", *work, "--rounds", "2", "-o", str(record), "--checkpoint", str(path)]) == 0
    made = read_checkpoint(path)
    assert made.at("model", "digest")
    assert made.at("engine", "settings", "max_num_seqs") == {"value": 16, "source": "given", "reason": ""}
    new = tmp_path / "new.checkpoint"
    capsys.readouterr()
    main(["checkpoint", "verify", str(path), "--rounds", "1", "-o", str(new)])  # the outcome depends on the machine
    assert "Verification of" in capsys.readouterr().out
    again = read_checkpoint(new)
    assert again.at("workload") == made.at("workload")
    assert again.at("model") == made.at("model")
    assert again.at("engine", "settings", "max_num_seqs") == made.at("engine", "settings", "max_num_seqs")
    assert again.at("verification", "num_rounds") == 1

    source, job = tmp_path / "in.jsonl", tmp_path / "job.checkpoint"
    source.write_text("".join(f'{{"prompt": "{i} and", "max_tokens": 4}}\n' for i in range(8)))
    arguments = ["run", str(source), "-o", str(tmp_path / "out.jsonl"), "--max-num-seqs", "4", "--quiet"]
    assert main([*arguments, "--checkpoint", str(job)]) == 0
    assert main(["checkpoint", "verify", str(job)]) in (0, 3)
    assert "share answered" in capsys.readouterr().out


@pytest.mark.embedded
@pytest.mark.slow
@pytest.mark.processes
def test_a_server_writes_one_at_its_start_that_can_be_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serve.checkpoint"
    command = [sys.executable, "-m", "headrace", "serve", "--port", "0", "--max-num-seqs", "8", "--checkpoint"]
    with subprocess.Popen([*command, str(path)], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines = []
        for line in server.stderr:
            lines.append(line)
            if "serving smollm2" in line:
                break
        server.terminate()
        server.stderr.read()
    assert any("self-check: 4 of 4 requests answered" in line for line in lines), lines
    made = read_checkpoint(path)
    assert (made.kind, made.workload_kind) == ("serve", "serve")
    assert made.at("engine", "settings", "max_num_seqs", "value") == 8
    assert made.at("verification", "judged") == ["success_share"]
    assert main(["checkpoint", "verify", str(path)]) == 0
    assert "The checkpoint holds." in capsys.readouterr().out
