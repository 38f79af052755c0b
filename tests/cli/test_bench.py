"""`headrace bench` as its user sees it: what is refused at once, what is kept when something breaks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.bench.load.null_server import Behaviour, null_server
from headrace.bench.record import read_records, read_rows, write_record
from headrace.cli.main import main
from tests.bench.records import level, offline_record, online_record, outcomes


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--workload", "chatt"], "did you mean 'chat'"),
        (["--slo", "ttft:p99<300"], "cannot be read"),
        (["--concurrency", "4,x"], "numbers separated by commas"),
        (["--concurrency", "0"], "concurrency"),
        (["--data", "missing.jsonl"], "does not exist"),
        (["--data", "a.jsonl", "--workload", "chat"], "give one"),
        (["--lengths-only"], "--lengths-only is for --data"),
        (["--trace"], "--trace needs --data"),
        (["--engine", "openai"], "needs --url"),
        (["--engine", "vllm", "--url", "http://x"], "Leave out --engine"),
        (["--set", "max_num_seqs"], "NAME=VALUE"),
        (["--set", "max_num_seqs=0"], "max_num_seqs must be an integer of at least 1, got 0"),
        (["--block-size", "7"], "block_size=7 is not one of 1, 2, 4, 8, 16"),
        (["one", "--model", "two"], "two models"),
        (["--spread", "2"], "spread"),
        (["--max-num-seq", "3"], "did you mean '--max-num-seqs'"),
        (["sweep", "missing.json"], "cannot be read"),
        (["batching", "--url", "http://x"], "cannot be restarted"),
        (["compare", "a", "b", "--fail-if-worse", "much"], "--fail-if-worse"),
    ],
)
def test_wrong_usage_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    error = usage_error(capsys, *arguments)
    assert message in error
    assert "Traceback" not in error


def test_bad_lines_of_a_workload_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": \n')
    error = usage_error(capsys, "--url", "http://127.0.0.1:9", "--data", str(path))
    assert "line 2" in error
    assert "--skip-bad-lines" in error


def test_an_unknown_setting_of_a_sweep_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "configs.json"
    path.write_text(json.dumps([{"max_num_seqs": 4}, {"max_num_seq": 8}, {"enable_prefix_cache": False}]))
    error = usage_error(capsys, "sweep", str(path))
    assert "config 2" in error
    assert "max_num_seqs" in error
    assert "config 3" in error


def test_a_bad_address_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:9", "--concurrency", "1"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_a_running_server_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, page, text = tmp_path / "r.json", tmp_path / "r.html", tmp_path / "r.md"
    with null_server() as server:
        arguments = ["--url", server.address, "--workload", "random", "--input-len", "4", "--output-len", "6"]
        arguments += ["--concurrency", "2,4", "--num-requests", "10", "--slo", "e2e:p50<60s", "--no-warm-up"]
        arguments += ["-o", str(path), "--html", str(page), "--markdown", str(text)]
        assert main(["bench", *arguments]) == 0
    (record,) = read_records([path])
    assert [each["summary"]["num_ok"] for each in record["levels"]] == [10, 10]
    assert [len(read_rows(each, tmp_path) or []) for each in record["levels"]] == [10, 10]
    assert "2 concurrent" in capsys.readouterr().out
    assert "<svg" in page.read_text()
    assert "| 2 concurrent" in text.read_text()


def test_a_server_that_dies_costs_only_what_was_not_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    with null_server(Behaviour(dies_after=15)) as server:
        arguments = ["--url", server.address, "--workload", "random", "--input-len", "4", "--output-len", "6"]
        arguments += ["--concurrency", "2", "--num-requests", "60", "--no-warm-up", "-o", str(path)]
        assert main(["bench", *arguments]) == 1
    (record,) = read_records([path])
    summary = record["levels"][0]["summary"]
    assert summary["num_ok"] == 15
    assert summary["num_failed"] == 45
    assert record["failure"]["message"] == "the server died"


def test_refusals_are_warned_about(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with null_server(Behaviour(refused_share=0.5)) as server:
        arguments = ["--url", server.address, "--workload", "random", "--input-len", "4", "--output-len", "6"]
        arguments += ["--concurrency", "2", "--num-requests", "20", "--no-warm-up", "-o", str(tmp_path / "r.json")]
        assert main(["bench", *arguments]) == 0
    assert "10 of 20 requests were not answered (429 or 503)" in " ".join(capsys.readouterr().out.split())


def test_a_full_disk_is_said_and_the_figures_are_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    path = tmp_path / "r.jsonl"
    path.symlink_to("/dev/full")
    with null_server() as server:
        arguments = ["--url", server.address, "--workload", "random", "--input-len", "4", "--output-len", "6"]
        arguments += ["--concurrency", "2", "--num-requests", "4", "--no-warm-up", "-o", str(path)]
        assert main(["bench", *arguments]) == 1
    shown = capsys.readouterr()
    assert "No space left on device" in shown.err
    assert "2 concurrent" in shown.out


def test_a_place_that_cannot_be_written_is_refused_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written" in usage_error(capsys, "-o", str(tmp_path / "file" / "r.json"))


def test_two_records_are_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    for path, ttft in ((before, 0.05), (after, 0.2)):
        rows = outcomes(300, ttft_s=ttft)
        write_record(online_record([level(8, rows)], id=path.stem), path, [rows])
    assert main(["bench", "compare", str(before), str(before), "--fail-if-worse", "5%"]) == 0
    assert main(["bench", "compare", str(before), str(after), "--fail-if-worse", "5%"]) == 3
    assert "worse" in capsys.readouterr().out


def test_a_record_is_shown_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_record(offline_record(), tmp_path / "r.json")
    assert main(["bench", "report", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]) == 0
    assert "Offline benchmark" in capsys.readouterr().out
    assert (tmp_path / "r.html").exists()


def test_the_named_workloads_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "workloads"]) == 0
    assert "prefix" in capsys.readouterr().out


@pytest.mark.parametrize("subcommand", ["", "batching", "sweep", "compare", "report", "workloads"])
def test_help_of_every_subcommand_imports_no_torch(subcommand: str) -> None:
    code = "import sys; from headrace.cli.main import main; main(sys.argv[1:])"
    code = f"import atexit, sys\natexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n{code}"
    arguments = [part for part in ("bench", subcommand, "--help") if part]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "False"


def test_reading_and_comparing_imports_no_torch(tmp_path: Path) -> None:
    rows = outcomes(50)
    write_record(online_record([level(8, rows)]), tmp_path / "r.json", [rows])
    path = str(tmp_path / "r.json")
    for arguments in (["report", path], ["compare", path, path]):
        code = "import sys; from headrace.cli.main import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
        subprocess.run([sys.executable, "-c", code, "bench", *arguments], capture_output=True, check=True)
