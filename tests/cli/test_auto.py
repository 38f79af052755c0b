"""`--auto` of run and serve: which checkpoint is used, what is said, and what wins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint.create import from_records
from headrace.checkpoint.document import read_checkpoint, write_checkpoint
from headrace.cli import serve as serve_command
from headrace.cli.auto import TUNES, flags_of, user_directory
from headrace.cli.main import main
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.hardware.describe import current_commit, machine_facts, package_versions
from headrace.jobs.spec import JobSpec, job_directory
from headrace.jobs.store.manifest import read_manifest
from headrace.models.digests import digest_of_model
from headrace.server.options import ServerOptions
from tests.tune.report_builders import BEST, batch_record, interrupted_record, serve_record


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory and a data directory of the test's own."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def save(
    path: Path,
    model: Path,
    settings: Mapping[str, Any] = BEST,
    record: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A checkpoint of a tune of this model on this machine."""
    made = from_records([record or batch_record()])
    engine = made["engine"] | {
        "settings": {name: {"value": value, "source": "given", "reason": ""} for name, value in settings.items()}
    }
    here = {
        "model": {"name": str(model), "digest": digest_of_model(model)},
        "machine": machine_facts(),
        "versions": package_versions(),
        "commit": current_commit(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_checkpoint(made | {"engine": engine} | here | changes, path)
    return path


def run(model: Path, source: Path, *arguments: str) -> int:
    return main(["run", str(source), "-o", str(source.parent / "out.jsonl"), "--model", str(model), *arguments])


def test_a_job_takes_its_settings_from_the_checkpoint_and_says_so(
    model: Path, source: Path, jobs: list[JobSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(Path(TUNES) / "a.checkpoint", model)
    assert run(model, source, "--auto") == 0
    (job,) = jobs
    assert (job.config.max_num_seqs, job.config.max_num_batched_tokens) == (128, 2048)
    assert job.config.model == str(model)
    said = capsys.readouterr().err
    assert f"auto: {path}: tuned against default: 1.37x" in said
    assert "auto: settings from it: max_num_seqs=128, max_num_batched_tokens=2048" in said
    assert "since then" not in said and "given here" not in said


def test_without_auto_no_checkpoint_is_used(model: Path, source: Path, jobs: list[JobSpec]) -> None:
    save(Path(TUNES) / "a.checkpoint", model)
    assert run(model, source) == 0
    assert jobs[0].config.max_num_seqs is None
    assert jobs[0].auto_settings is None


def test_flags_win_and_are_named(
    model: Path, source: Path, jobs: list[JobSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    save(Path(TUNES) / "a.checkpoint", model)
    assert run(model, source, "--auto", "--max-num-seqs", "3") == 0
    assert (jobs[0].config.max_num_seqs, jobs[0].config.max_num_batched_tokens) == (3, 2048)
    said = capsys.readouterr().err
    assert "given here, and not taken from it: max_num_seqs\n" in said
    assert "settings from it: max_num_batched_tokens=2048\n" in said


def test_a_settings_file_wins_too(
    model: Path, source: Path, jobs: list[JobSpec], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save(Path(TUNES) / "a.checkpoint", model)
    file = tmp_path / "a.toml"
    file.write_text("max_num_seqs = 3\n")
    assert run(model, source, "--auto", "--config", str(file)) == 0
    assert (jobs[0].config.max_num_seqs, jobs[0].config.max_num_batched_tokens) == (3, 2048)
    assert "given here, and not taken from it: max_num_seqs\n" in capsys.readouterr().err


def test_versions_and_commits_that_differ_are_one_line(
    model: Path, source: Path, jobs: list[JobSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    versions = package_versions() | {"torch": "1.0.0"}
    save(Path(TUNES) / "a.checkpoint", model, versions=versions, commit="abc1234")
    assert run(model, source, "--auto") == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "since then" in line]
    assert "package, torch: recorded 1.0.0, now " in line and "commit: recorded abc1234, now " in line


def test_without_a_checkpoint_the_command_that_makes_one_is_offered(
    model: Path, source: Path, jobs: list[JobSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, source, "--auto") == 0
    assert jobs[0].config == EngineConfig(model=str(model))
    said = capsys.readouterr().err
    assert "continuing with automatic settings" in said
    assert f"headrace tune {model} --goal batch --data {source}\n" in said
    assert str(user_directory()) in said


@pytest.mark.parametrize("change", ["model", "machine", "kind", "engine"])
def test_a_checkpoint_of_something_else_is_not_used(
    model: Path, source: Path, jobs: list[JobSpec], capsys: pytest.CaptureFixture[str], change: str
) -> None:
    path = Path(TUNES) / "a.checkpoint"
    if change == "model":
        (model / "more.json").write_text("{}")
        save(path, model)
        (model / "more.json").unlink()
    elif change == "machine":
        save(path, model, machine=machine_facts() | {"cpu": "Another CPU"})
    elif change == "kind":
        save(path, model, record=serve_record())
    else:
        engine = from_records([batch_record()])["engine"] | {"name": "vllm"}
        write_checkpoint(dict(read_checkpoint(save(path, model)).facts) | {"engine": engine}, path)
    assert run(model, source, "--auto") == 0
    assert jobs[0].config.max_num_seqs is None
    assert "no checkpoint for" in capsys.readouterr().err


def test_directories_are_searched_in_order(model: Path, source: Path, jobs: list[JobSpec], tmp_path: Path) -> None:
    def found(*arguments: str) -> int | None:
        assert run(model, source, "--auto", "--overwrite", *arguments) == 0
        return jobs[-1].config.max_num_seqs

    save(user_directory() / "a.checkpoint", model, {"max_num_seqs": 1})
    assert found() == 1
    save(Path("headrace-bench") / "a.checkpoint", model, {"max_num_seqs": 2})
    assert found() == 2
    save(Path(TUNES) / "a.checkpoint", model, {"max_num_seqs": 3})
    assert found() == 3
    save(tmp_path / "given" / "a.checkpoint", model, {"max_num_seqs": 4})
    assert found("--checkpoints", str(tmp_path / "given")) == 4
    (tmp_path / "empty").mkdir()
    assert found("--checkpoints", str(tmp_path / "empty")) is None


def test_the_model_and_its_answers_stay_the_users(model: Path, source: Path, jobs: list[JobSpec]) -> None:
    save(Path(TUNES) / "a.checkpoint", model, {"load_format": "random", "seed": 7, "tokenizer": "t", **BEST})
    assert run(model, source, "--auto") == 0
    config = jobs[0].config
    assert (config.load_format, config.seed, config.tokenizer, config.max_num_seqs) == ("auto", 0, None, 128)


def test_settings_that_change_numbers_are_pointed_out(
    model: Path, source: Path, jobs: list[JobSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    save(Path(TUNES) / "a.checkpoint", model, {"kv_cache_dtype": "fp8"}, record=interrupted_record())
    assert run(model, source, "--auto") == 0
    said = capsys.readouterr().err
    assert "kv_cache_dtype changes the numbers" in said
    assert "before its choice was confirmed" in said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1, got 0"),
        ({"an_old_setting": 1}, "sets an_old_setting, which this command does not have"),
    ],
)
def test_settings_that_are_refused_are_an_error_with_the_file(
    model: Path,
    source: Path,
    jobs: list[JobSpec],
    capsys: pytest.CaptureFixture[str],
    settings: Mapping[str, Any],
    message: str,
) -> None:
    path = save(Path(TUNES) / "a.checkpoint", model, settings)
    assert run(model, source, "--auto") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("headrace: error: ") and message in error and str(path) in error
    assert not jobs


def test_settings_that_the_engine_refuses_at_its_start_name_the_file(
    model: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_job(job: JobSpec, **options: Any) -> None:
        raise ConfigError("quantization='fp8' needs a GPU")

    monkeypatch.setattr("headrace.jobs.run.run_job.run_job", run_job)
    path = save(Path(TUNES) / "a.checkpoint", model, {"quantization": "fp8"})
    assert run(model, source, "--auto") == 2
    error = capsys.readouterr().err
    assert "needs a GPU. With --auto, settings come from" in error and str(path) in error
    assert run(model, source) == 2
    assert str(path) not in capsys.readouterr().err


def test_checkpoints_need_auto_and_a_directory_that_exists(
    model: Path, source: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for arguments, message in (
        (["--checkpoints", str(tmp_path)], "add --auto"),
        (["--auto", "--checkpoints", str(tmp_path / "none")], "is not a directory"),
    ):
        with pytest.raises(SystemExit):
            run(model, source, *arguments)
        assert message in capsys.readouterr().err


def test_a_checkpoint_of_the_job_repeats_its_settings_by_name(
    model: Path, source: Path, jobs: list[JobSpec], tmp_path: Path
) -> None:
    save(Path(TUNES) / "a.checkpoint", model, {**BEST, "enable_prefix_caching": False})
    path = tmp_path / "job.checkpoint"
    assert run(model, source, "--auto", "--max-num-seqs", "3", "--checkpoint", str(path)) == 0
    arguments = read_checkpoint(path).at("rerun", "arguments")
    assert "--auto" not in arguments
    assert arguments[-3:] == ["--max-num-batched-tokens", "2048", "--no-enable-prefix-caching"]
    assert arguments.count("--max-num-seqs") == 1


def test_flags_say_the_same_as_settings() -> None:
    settings = {
        "max_num_seqs": 4,
        "enable_prefix_caching": True,
        "num_threads": None,
        "capacity_policy": "static_batch",
    }
    assert flags_of(settings) == ["--max-num-seqs", "4", "--enable-prefix-caching", "--capacity-policy", "static_batch"]


# ---- serve


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerOptions]]:
    seen: list[tuple[EngineConfig, ServerOptions]] = []

    def serve(config: EngineConfig, options: ServerOptions, **others: object) -> int:
        seen.append((config, options))
        return 0

    monkeypatch.setattr("headrace.server.serve.serve", serve)
    return seen


def test_a_server_takes_engine_and_server_settings_and_the_file_wins(
    model: Path,
    served: list[tuple[EngineConfig, ServerOptions]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    settings = {**BEST, "max_num_queued_reqs": 9, "block_size": 32, "port": 1}
    path = save(Path(TUNES) / "a.checkpoint", model, settings, record=serve_record())
    save(Path(TUNES) / "batch.checkpoint", model, {"max_num_seqs": 1})
    file = tmp_path / "server.toml"
    file.write_text("block-size = 8\n")
    assert serve_command.main([str(model), "--auto", "--config", str(file), "--max-num-seqs", "5"]) == 0
    ((config, options),) = served
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.block_size) == (5, 2048, 8)
    assert options.max_num_queued_reqs == 9
    assert options.port == ServerOptions().port  # where a server listens is not tuned
    said = capsys.readouterr().err
    assert f"auto: {path}: tuned against default" in said
    assert "not taken from it: max_num_seqs, block_size\n" in said


def test_a_server_without_a_checkpoint_offers_to_tune(
    model: Path, served: list[tuple[EngineConfig, ServerOptions]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve_command.main([str(model), "--auto"]) == 0
    assert served == [(EngineConfig(model=str(model)), ServerOptions())]
    assert f"headrace tune {model} --goal serve --slo 'ttft:" in capsys.readouterr().err


# ---- processes


def test_the_lookup_imports_no_torch(model: Path) -> None:
    save(Path(TUNES) / "a.checkpoint", model)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from headrace.cli.auto import directories, find_auto_settings\n"
        "import headrace.cli.run, headrace.cli.serve\n"
        f"found = find_auto_settings({str(model)!r}, 'batch', revision=None, given=[], known=['max_num_seqs',"
        " 'max_num_batched_tokens'], where=directories(None), print_line=print)\n"
        "assert found.settings['max_num_seqs'] == 128\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.processes
def test_a_job_that_was_killed_keeps_its_settings_when_it_is_resumed(tiny_directory: Path, tmp_path: Path) -> None:
    """max_model_len is a part of the job's fingerprint: another value would be refused."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(f'{{"prompt": "a{i}", "max_tokens": 2}}\n' for i in range(4)))
    first = save(Path(TUNES) / "a.checkpoint", tiny_directory, {"max_model_len": 64, "max_num_seqs": 2})
    command = [sys.executable, "-m", "headrace", "run", str(source), "-o", str(output)]
    command += ["--model", str(tiny_directory), "--num-gpu-blocks-override", "64", "--auto"]

    def start(**environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=120
        )

    killed = start(HEADRACE_CRASH_AT="written")
    assert killed.returncode == -9, killed.stderr
    manifest = read_manifest(job_directory(str(output)))
    assert manifest is not None and manifest.auto_settings == {
        "checkpoint": str(first),
        "settings": {"max_model_len": 64, "max_num_seqs": 2},
    }
    first.unlink()
    save(Path(TUNES) / "newer.checkpoint", tiny_directory, {"max_model_len": 32, "max_num_seqs": 1})
    resumed = start()
    assert resumed.returncode == 0, resumed.stderr
    assert f"keeps its settings from {first}: max_model_len=64, max_num_seqs=2" in resumed.stderr
    assert len([json.loads(line) for line in output.read_text().splitlines()]) == 4
    manifest = read_manifest(job_directory(str(output)))
    assert manifest is not None and manifest.fingerprint["max_model_len"] == 64


def test_a_job_that_found_none_looks_for_none_when_it_is_resumed(
    model: Path, source: Path, jobs: list[JobSpec], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from types import SimpleNamespace

    assert run(model, source, "--auto") == 0
    kept = jobs[0].auto_settings
    assert kept == {"checkpoint": None, "settings": {}}
    monkeypatch.setattr("headrace.jobs.store.manifest.read_manifest", lambda path: SimpleNamespace(auto_settings=kept))
    save(Path(TUNES) / "a.checkpoint", model)
    assert run(model, source, "--auto") == 0
    assert jobs[1].config.max_num_seqs is None
    assert "keeps its settings from no checkpoint: none" in capsys.readouterr().err
    assert run(model, source, "--auto", "--overwrite") == 0
    assert jobs[2].config.max_num_seqs == 128
