"""`headrace doctor` as a command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.main import main
from tests.bench.records import offline_record
from tests.doctor.builders import COUNTERS, job_summary


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", *arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def summary(tmp_path: Path) -> Path:
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(job_summary()))
    return path


def test_nothing_wrong_is_exit_code_0(summary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(summary)]) == 0
    assert "Nothing wrong in what could be judged" in capsys.readouterr().out


def test_problems_are_exit_code_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = offline_record((1000.0,))
    record["rounds"][0]["counters"] = COUNTERS
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    assert main(["doctor", str(path)]) == 3
    assert "Limited by cache" in capsys.readouterr().out


def test_too_little_is_exit_code_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(offline_record(())))
    assert main(["doctor", str(path)]) == 4
    assert "Not enough evidence" in capsys.readouterr().out


def test_errors_are_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "no.json")]) == 1
    assert main(["doctor", "--url", "http://127.0.0.1:9", "--interval", "0.01"]) == 1
    assert "connection refused" in capsys.readouterr().err


def test_a_command_may_be_quoted_or_follow_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["vllm", "serve", "qwen3-8b", "--max-num-batched-tokens", "0"]
    documents = []
    for given in (["--", *words], [" ".join(words)]):
        assert main(["doctor", "--json", *given]) == 3
        documents.append(json.loads(capsys.readouterr().out))
    assert documents[0] == documents[1]
    assert documents[0]["findings"][0]["rule"] == "impossible-value"


def test_flags_of_headrace_serve_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    good = ["--max-num-queued-reqs", "64", "--gpu-memory-utilization", "0.9", "--shutdown-timeout", "5"]
    assert main(["doctor", "--", "headrace", "serve", "qwen3-8b", *good]) == 0
    assert main(["doctor", "--", "headrace", "serve", "qwen3-8b", "--max-num-queued-requests", "64"]) == 3
    assert "'--max-num-queued-reqs'" in capsys.readouterr().out


def test_a_gpu_and_lengths_make_predictions_possible(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--", "vllm", "serve", "qwen3-8b", "--max-num-seqs", "512"]
    lengths = ["--input-len", "4000", "--output-len", "500"]
    assert main(["doctor", "--gpu", "H100", *lengths, *command]) == 3
    assert "sequences that fit" in capsys.readouterr().out


def test_wrong_usage_is_explained(capsys: pytest.CaptureFixture[str], summary: Path) -> None:
    assert "needs the ADDRESS of a server, a RECORD or a command" in usage_error(capsys)
    assert "judged alone" in usage_error(capsys, str(summary), "--url", "http://x")
    assert "--interval must be above 0" in usage_error(capsys, "--url", "http://x", "--interval", "0")
    assert "unknown GPU" in usage_error(capsys, str(summary), "--gpu", "H999")
    assert "'vllm serve ...'" in usage_error(capsys, "--", "ollama", "run", "llama3")


@pytest.mark.parametrize("kind", ["record", "command", "run"])
def test_reading_imports_no_torch(kind: str, summary: Path) -> None:
    command = ["--gpu", "H100", "--", "vllm", "serve", "qwen3-8b", "-tp", "2", "--max-num-seqs", "512"]
    run = ["--", "headrace", "run", "prompts.jsonl", "-o", "answers.jsonl", "--max-num-batched-tokens", "0"]
    arguments = ["doctor", *{"record": [str(summary)], "command": command, "run": run}[kind]]
    code = (
        f"import sys\nfrom headrace.cli.main import main\nmain({arguments!r})\n"
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "rule" in done.stdout
    assert not set(done.stderr.split()) & {"torch", "numba", "transformers", "huggingface_hub"}


def test_an_address_needs_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "http://127.0.0.1:9", "--interval", "0.01"]) == 1
    assert "connection refused" in capsys.readouterr().err
