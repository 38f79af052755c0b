from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.cli.main import main
from headrace.jobs.spec import JobSpec


def test_the_command_line_becomes_a_job(source: Path, jobs: list[JobSpec], tmp_path: Path) -> None:
    output = str(tmp_path / "out.jsonl")
    arguments = ["--limit", "5", "--overwrite", "--max-tokens", "9", "--model", "other", "--max-num-seqs", "3"]
    assert main(["run", str(source), "-o", output, *arguments, "--gpu-price", "2.5"]) == 0
    (job,) = jobs
    assert (job.input, job.output, job.limit, job.overwrite) == (str(source), output, 5, True)
    assert job.gpu_price == 2.5
    assert job.defaults == {"max_tokens": 9}
    assert (job.config.model, job.config.max_num_seqs) == ("other", 3)


@pytest.mark.parametrize("text, code", [("fine", 0), ("bad", 3), ("stop", 130)])
def test_the_exit_code_follows_the_outcome(
    source: Path, jobs: list[JobSpec], tmp_path: Path, text: str, code: int
) -> None:
    source.write_text(text)
    assert main(["run", str(source), "-o", str(tmp_path / "out.jsonl")]) == code


def test_the_summary_goes_to_stderr(
    source: Path, jobs: list[JobSpec], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["run", str(source), "-o", str(tmp_path / "out.jsonl")])
    out, err = capsys.readouterr()
    assert out == ""
    assert "1 of 1 line answered" in err and "the only one" in err


def test_quiet_prints_only_errors(
    source: Path, jobs: list[JobSpec], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["run", str(source), "-o", str(tmp_path / "out.jsonl"), "--quiet"])
    assert capsys.readouterr().err == ""
    source.write_text("bad")
    main(["run", str(source), "-o", str(tmp_path / "out.jsonl"), "--quiet"])
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_summary_can_be_written_as_json(source: Path, jobs: list[JobSpec], tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    main(["run", str(source), "-o", str(tmp_path / "out.jsonl"), "--json-summary", str(summary)])
    told = json.loads(summary.read_text())
    assert told["answered"] == 1
    assert {"model_digest", "model_shape", "machine", "versions", "commit", "settings"} <= told.keys()
    assert told["machine"]["num_cores"] >= 1 and told["versions"]["headrace"]


def test_an_existing_output_is_refused_before_anything_is_fetched(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(model: str, **options: Any) -> None:
        raise AssertionError("a model was fetched")

    monkeypatch.delenv("HEADRACE_DEBUG", raising=False)
    monkeypatch.setattr("headrace.cli.fetching.fetch_if_missing", fetch)
    output = tmp_path / "out.jsonl"
    output.touch()
    assert main(["run", str(source), "-o", str(output)]) == 1
    assert capsys.readouterr().err.endswith("exists; give another file, or --overwrite to replace it\n")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["in.jsonl"],
        ["in.jsonl", "-o", "x", "--limit", "0"],
        ["in.jsonl", "-o", "x", "--json-summary", "no/x.json"],
        ["in.jsonl", "-o", "x", "--gpu-price", "0"],
        ["in.jsonl", "-o", "x", "--gpu-price", "nan"],
    ],
)
def test_invalid_commands_are_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["run", *arguments])
    assert stopped.value.code == 2


def test_flags_for_tables_reach_the_job(source: Path, jobs: list[JobSpec], tmp_path: Path) -> None:
    output = str(tmp_path / "out.csv")
    flags = ["--prompt", "Say {text}", "--system", "In {lang}", "--input-format", "jsonl", "--max-error-rate", "0.5"]
    assert main(["run", str(source), "-o", output, *flags]) == 0
    (job,) = jobs
    assert job.template is not None
    assert job.template.columns == ("text", "lang") and job.template.is_chat
    assert (job.input_format, job.output_format, job.max_error_rate) == ("jsonl", None, 0.5)


@pytest.mark.parametrize(
    "flags",
    [
        ["--prompt", "{"],
        ["--chat"],
        ["--system", "x"],
        ["--prompt", "x", "--messages-column", "m"],
        ["--max-error-rate", "2"],
        ["--rate", "5"],
    ],
)
def test_invalid_flags_are_refused(
    source: Path, jobs: list[JobSpec], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["run", str(source), "-o", str(source.parent / "out.jsonl"), *flags])
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code in (1, 2) and not jobs
    assert capsys.readouterr().err


def test_a_check_needs_no_output_and_runs_nothing(
    source: Path, jobs: list[JobSpec], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from headrace.engine.checks import RequestChecks
    from headrace.jobs.preflight.front import Front
    from headrace.models.spec import ModelSpec
    from headrace.sched import SchedulerLimits

    limits = SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64, num_blocks=64)
    spec = cast(ModelSpec, SimpleNamespace(vocab_size=100, hidden_size=8, pooler=None, is_encoder=False))
    monkeypatch.setattr(
        "headrace.jobs.preflight.front.open_front", lambda config: Front("m", None, spec, RequestChecks(limits))
    )
    source.write_text('{"prompt": [1, 2]}\n{broken\n')
    summary = source.parent / "check.json"
    assert main(["run", str(source), "--check", "--rate", "10", "--json-summary", str(summary)]) == 3
    told = capsys.readouterr().out
    assert told.startswith("line 2, byte 19: invalid_json: ")
    assert "1 of 2 lines" in told and "at most 6 s at 10 tokens/s" in told
    assert json.loads(summary.read_text())["errors_by_code"] == {"invalid_json": 1}
    assert not jobs
    source.write_text('{"prompt": [1, 2]}\n')
    assert main(["run", str(source), "--check", "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_flags_of_other_engines_are_explained_as_for_the_server(
    source: Path, jobs: list[JobSpec], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", str(source), "-o", str(tmp_path / "out.jsonl"), "--quiet"]
    assert main([*command, "--swap-space", "4"]) == 0
    assert "--swap-space is ignored: preempted sequences are recomputed" in capsys.readouterr().err
    assert main([*command, "--scheduler-delay-factor=2"]) == 0
    assert "(--max-queue-delay-us: only in 'headrace serve')" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--batch-scheduler-policy", "max_utilization"])
    assert stopped.value.code == 2
    assert "--batch-scheduler-policy is refused: use --capacity-policy" in capsys.readouterr().err


def test_a_file_has_settings_and_the_command_line_overrides_it(
    source: Path, jobs: list[JobSpec], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file that `headrace tune` writes for a job."""
    file, output = tmp_path / "a.toml", str(tmp_path / "out.jsonl")
    file.write_text('model = "m"\nmax_num_seqs = 3\nenable-prefix-caching = false\n')
    assert main(["run", str(source), "-o", output, "--config", str(file), "--max-num-seqs", "5"]) == 0
    config = jobs[0].config
    assert (config.model, config.max_num_seqs, config.enable_prefix_caching) == ("m", 5, False)
    file.write_text("max_num_seq = 3\n")
    with pytest.raises(SystemExit):
        main(["run", str(source), "-o", output, "--config", str(file)])
    assert "did you mean 'max_num_seqs'" in capsys.readouterr().err
