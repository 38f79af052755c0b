from __future__ import annotations

import json
import subprocess
import sys

import pytest

from headrace.cli.main import main
from headrace.plan.constants import ERRORS


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_a_plan_imports_no_torch() -> None:
    arguments = ["plan", "llama-3.1-8b", "--gpu", "H200", "--compare", "A100,H100"]
    code = (
        f"import sys\nfrom headrace.cli.main import main\nassert main({arguments!r}) == 0\n"
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "tokens/s" in done.stdout
    imported = set(done.stderr.split())
    assert not imported & {"torch", "numba", "transformers", "tokenizers", "huggingface_hub", "jinja2"}


def test_a_plan_shows_memory_speed_formats_and_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, "llama-3.1-8b", "--gpu", "H200")
    error = f"±{ERRORS['16 bits'].max_error:.0%}"
    for part in ("weights", "KV cache", "longest context", "TTFT", "TPOT", "FP8", "INT4", error, "an assumption"):
        assert part in text


def test_what_does_not_fit_shows_the_ways_out(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, "llama-3.3-70b", "--gpu", "H100")
    assert "Does not fit" in text and "Ways out" in text


def test_a_comparison_shows_the_cost_at_the_given_price(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, "llama-3.1-8b", "--compare", "L40S,H100", "--gpu-price", "9.99")
    assert text.count("$9.99") == 2
    assert "L40S" in text and "assumed" not in text


def test_the_json_document_has_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--input-len", "512", "--output-len", "128"]
    text = plan(capsys, "qwen3-8b", "--gpu", "h200", *lengths, "--concurrency", "16", "--json")
    read = json.loads(text)
    assert read["plan"]["workload"]["concurrency"] == 16
    assert read["plan"]["fits"] and read["plan"]["speed"]["max_running"] == 16
    assert [each["precision"]["weights"] for each in read["formats"]] == ["bfloat16", "fp8", "fp8", "int4"]


def test_the_built_in_models_and_gpus_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, "--list")
    assert "meta-llama/Llama-3.1-8B" in text and "MI300X" in text


def test_a_cpu_with_given_rates_needs_no_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    assert "fp32" in plan(capsys, "smollm2", "--gpu", "cpu", "--bandwidth", "40", "--gflops", "300")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "needs a MODEL"),
        (["llama-3.1-8b"], "needs --gpu NAME"),
        (["lama-3.1-8b", "--gpu", "H200"], "did you mean 'llama-3.1-8b'"),
        (["llama-3.1-8b", "--gpu", "H20"], "did you mean 'H200'"),
        (["llama-3.1-8b", "--gpu", "H200", "--input-len", "5"], "belong together"),
        (["llama-3.1-8b", "--gpu", "H200", "--workload", "chats"], "did you mean 'chat'"),
        (["llama-3.1-8b", "--gpu", "A100", "--quantization", "fp8"], "no FP8 tensor cores"),
        (["llama-3.1-8b", "--gpu", "H200", "--quantization", "fp9"], "did you mean 'fp8'"),
        (["llama-3.1-8b", "--gpu", "H200", "--gpus", "0"], "at least 1"),
        (
            ["llama-3.1-8b", "--gpu", "H200", "--input-len", "9", "--output-len", "9", "--requests", "1000000"],
            "between 1",
        ),
        (["./nothing/config.json", "--gpu", "H200"], "no such file"),
        (["llama-3.1-8b", "--gpu", "H200", "--gpu-memory-utilization", "2"], "gpu_memory_utilization"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = usage_error(capsys, *arguments)
    assert problem in error
    assert len(error.strip().splitlines()) == 2  # the second one names --help
