"""Command lines, above all those that guides give, with their known mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.cli.run import build_parser as run_parser
from headrace.cli.serve import build_parser as serve_parser
from headrace.doctor.diagnosis import Diagnosis, diagnose
from headrace.doctor.readers.command_line import parse_command, read_command
from headrace.errors import ConfigError
from headrace.plan.gpus import find_gpu

FLAGS = {"serve": serve_parser().flags, "run": run_parser().flags}


def judged(text: str, **options: Any) -> Diagnosis:
    return diagnose(read_command([text], headrace_flags=FLAGS.__getitem__, **options))


def mistakes(text: str, **options: Any) -> list[str]:
    return [finding.rule for finding in judged(text, **options).findings if finding.severity == "mistake"]


def test_a_quoted_command_and_one_in_words_are_the_same() -> None:
    words = ["vllm", "serve", "qwen3-8b", "--max-num-seqs", "64"]
    quoted = parse_command(["vllm serve qwen3-8b \\\n  --max-num-seqs 64  # slots"])
    assert parse_command(words).flags == quoted.flags
    assert (quoted.positional, quoted.comments) == (("qwen3-8b",), ("slots",))


@pytest.mark.parametrize(
    ("written", "setting", "value"),
    [
        ("--max-num-seqs=64", "max_num_seqs", 64),
        ("--max_num_seqs 64", "max_num_seqs", 64),
        ("-tp 2", "tensor_parallel_size", 2),
        ("--no-enable-prefix-caching", "enable_prefix_caching", False),
        ("--enable-chunked-prefill False", "enable_chunked_prefill", False),
        ("--enable-chunked-prefill=True", "enable_chunked_prefill", True),
        ("--device-memory-utilization 0.8", "gpu_memory_utilization", 0.8),
        ("--max-model-len 8k", "max_model_len", 8000),
        ("--max-model-len 8K", "max_model_len", 8192),
        ("--speculative-config.method ngram --speculative-config.model x", "speculative_config", "x"),
        ("--api-key one --api-key two", "api_key", "***"),
    ],
)
def test_flags_are_read_as_vllm_reads_them(written: str, setting: str, value: object) -> None:
    seen = read_command([f"vllm serve qwen3-8b {written}"])
    assert seen.settings[setting] == value and setting in seen.given
    assert mistakes(f"vllm serve qwen3-8b {written}") == []


@pytest.mark.parametrize(
    "text",
    [
        "python -m vllm.entrypoints.openai.api_server --model qwen3-8b",
        "python3 -m headrace serve qwen3-8b",
        "VLLM_USE_V1=1 CUDA_VISIBLE_DEVICES=0 vllm serve qwen3-8b",
        "/opt/venv/bin/vllm serve qwen3-8b",
        "docker run --gpus all -p 8000:8000 vllm/vllm-openai:latest --model qwen3-8b",
    ],
)
def test_programs_are_recognised(text: str) -> None:
    seen = read_command([text])
    assert seen.model is not None and seen.model.num_params > 8e9


def test_another_program_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'vllm serve \.\.\.', 'headrace serve"):
        read_command(["ollama run llama3"])


@pytest.mark.parametrize("flag", ["--api-key sesame", "--api_key=sesame", "--hf-token sesame", "--api-key a sesame"])
def test_keys_are_shown_nowhere(flag: str) -> None:
    diagnosis = judged(f"vllm serve qwen3-8b {flag} --max-num-seqs 0")
    assert diagnosis.evidence.origin.endswith("*** --max-num-seqs 0")
    assert "sesame" not in str(diagnosis.as_json())


def test_keys_in_the_environment_of_a_container_are_hidden_too() -> None:
    text = "docker run -e HF_TOKEN=sesame vllm/vllm-openai --model qwen3-8b --hf-token a --hf-token b"
    document = str(judged(text).as_json())
    assert "HF_TOKEN=***" in document and "sesame" not in document


def test_a_file_that_does_not_exist_is_said() -> None:
    (remark,) = read_command(["vllm serve qwen3-8b --config nowhere.yaml"]).remarks
    assert remark == "nowhere.yaml does not exist here, so the settings in it are not known"


VLLM_FILE = """\
model: qwen3-8b
max-num-seqs: 64
max_num_batched_tokens: 0
enable-prefix-caching: false
no-enable-chunked-prefill: true
api-key: sesame
speculative-config: {method: ngram}
max-num-batch-tokens: 100
"""
HEADRACE_FILE = """\
model = "qwen3-8b"
max-num-seqs = 64
max_num_batched_tokens = 0
enable_prefix_caching = false
enable-chunked-prefill = false
api-key = "sesame"
max-num-batch-tokens = 100
"""


@pytest.mark.parametrize(("program", "text"), [("vllm", VLLM_FILE), ("headrace", HEADRACE_FILE)])
def test_settings_in_a_file_are_read_and_the_command_overrides_them(program: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "settings"
    path.write_text(text)
    seen = read_command(
        [f"{program} serve --config {path} --max-num-seqs 8"], headrace_flags=FLAGS.__getitem__, gpu=find_gpu("H100")
    )
    assert (seen.settings["max_num_seqs"], seen.settings["max_num_batched_tokens"]) == (8, 0)
    assert seen.settings["enable_prefix_caching"] is seen.settings["enable_chunked_prefill"] is False
    assert {"max_num_batched_tokens", "enable_prefix_caching"} <= seen.given
    assert seen.model is not None and seen.model.num_params > 8e9
    diagnosis = diagnose(seen)
    found = [finding.rule for finding in diagnosis.findings if finding.severity == "mistake"]
    assert found == ["unknown-flag", "impossible-value"]
    (unknown,) = diagnosis.findings[0].numbers
    assert unknown[0] == f"max-num-batch-tokens in {path}"
    assert "sesame" not in str(diagnosis.as_json())


@pytest.mark.parametrize(
    ("program", "text", "message"),
    [("vllm", "a: [", "is not YAML"), ("headrace", "a = ", "is not TOML"), ("vllm", "- a", "no keys and values")],
)
def test_a_file_that_cannot_be_read_is_an_error(program: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "settings"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_command([f"{program} serve --config {path}"])


def test_a_batch_job_is_read_with_its_own_flags() -> None:
    good = "headrace run prompts.jsonl -o answers.jsonl --overwrite --model qwen3-8b --keep-order --max-num-seqs 64"
    seen = judged(good)
    assert (seen.outcome, seen.evidence.settings["max_num_seqs"]) == ("nothing wrong", 64)
    assert seen.evidence.model is not None and seen.evidence.model.num_params > 8e9  # not prompts.jsonl
    assert mistakes(f"{good} --port 8000") == ["unknown-flag"]
    assert mistakes("headrace serve qwen3-8b --keep-order") == ["unknown-flag"]
    assert mistakes(f"{good} --max-num-batched-tokens 0") == ["impossible-value"]


def test_a_large_budget_is_no_problem_for_a_batch_job() -> None:
    budget = "--model qwen3-8b --max-model-len 2048 --max-num-batched-tokens 8192"
    assert judged(f"headrace run prompts.jsonl -o answers.jsonl {budget}").findings == ()
    assert [finding.rule for finding in judged(f"headrace serve {budget}").findings] == ["large-budget"]


def test_an_unknown_model_is_said() -> None:
    seen = read_command(["vllm serve my-org/my-model"])
    assert seen.model is None and "shape is not known" in seen.remarks[0]


# The guides' command lines.


def test_chunked_prefill_offered_as_prefix_caching() -> None:
    text = "vllm serve qwen3-8b --enable-chunked-prefill  # enable prefix caching"
    assert mistakes(text) == ["chunked-as-prefix"]
    assert "--enable-prefix-caching" in judged(text).headline
    assert mistakes("vllm serve qwen3-8b --enable-chunked-prefill --enable-prefix-caching  # prefix caching") == []


def test_a_flag_that_does_not_exist_is_named_with_the_nearest() -> None:
    diagnosis = judged("vllm serve qwen3-8b --max-num-batch-tokens 8192")
    assert diagnosis.findings[0].rule == "unknown-flag"
    assert "'--max-num-batched-tokens'" in diagnosis.findings[0].advice[0].text


@pytest.mark.parametrize("flag", ["--scheduler-delay-factor 0.5", "--num-scheduler-steps 8", "--use-v2-block-manager"])
def test_flags_that_vllm_removed_are_mistakes_there_and_ignored_here(flag: str) -> None:
    assert mistakes(f"vllm serve qwen3-8b {flag}") == ["unknown-flag"]
    ours = judged(f"headrace serve qwen3-8b {flag}")
    assert ours.outcome == "nothing wrong"
    assert [finding.severity for finding in ours.findings] == ["note"]


def test_a_flag_that_headrace_refuses_comes_with_its_answer() -> None:
    flag = "--decode-context-parallel-size"
    (finding,) = judged(f"headrace serve qwen3-8b {flag} 2").problems[:1]
    assert finding.severity == "mistake" and "on --nnodes machines" in dict(finding.numbers)[flag]
    assert mistakes(f"headrace serve qwen3-8b {flag} 1") == []


@pytest.mark.parametrize(
    ("flags", "number"),
    [
        ("--block-size 7", ("block_size", "7 (must be one of 1, 2, 4, 8, 16, 32, 64, 128, 256)")),
        ("--max-num-seqs 100000", ("max_num_seqs", "100,000 (at most 16,384)")),
    ],
)
def test_values_that_headrace_refuses(flags: str, number: tuple[str, str]) -> None:
    (finding,) = [each for each in judged(f"headrace serve qwen3-8b {flags}").findings if each.severity == "mistake"]
    assert (finding.rule, finding.numbers) == ("impossible-value", (number,))
    assert mistakes("headrace serve qwen3-8b --block-size 32 --max-num-seqs 512") == []
    assert "impossible-value" not in mistakes(f"vllm serve qwen3-8b {flags}")


def test_a_token_budget_of_0() -> None:
    text = "vllm serve qwen3-8b --max-num-batched-tokens 0"
    assert mistakes(text) == ["impossible-value"]
    assert "does not mean 'no limit'" in judged(text).headline


def test_a_token_budget_below_the_slots_or_the_context() -> None:
    assert mistakes("vllm serve qwen3-8b --max-num-batched-tokens 128 --max-num-seqs 256") == ["impossible-value"]
    unchunked = "vllm serve qwen3-8b --no-enable-chunked-prefill --max-model-len 4096 --max-num-batched-tokens"
    assert mistakes(f"{unchunked} 2048") == ["impossible-value"]
    assert mistakes(f"{unchunked} 4096") == []


def test_tensor_parallelism_on_a_small_model_is_a_problem() -> None:
    diagnosis = judged("vllm serve qwen3-8b --tensor-parallel-size 2", gpu=find_gpu("H100"))
    assert [finding.rule for finding in diagnosis.problems] == ["tensor-parallel"]


def test_settings_that_contradict_each_other_are_a_mistake() -> None:
    twice = "vllm serve qwen3-8b --gpu-memory-utilization 0.9 --device-memory-utilization 0.75"
    assert mistakes(twice) == ["contradiction"]
    sized = "vllm serve qwen3-8b --gpu-memory-utilization 0.9 --kv-cache-memory-bytes 8000000000"
    assert mistakes(sized) == ["contradiction"]
    assert mistakes("vllm serve qwen3-8b --enable-prefix-caching --no-enable-prefix-caching") == ["contradiction"]


def test_a_share_in_percent_is_a_mistake() -> None:
    assert mistakes("vllm serve qwen3-8b --gpu-memory-utilization 90") == ["impossible-value"]


def test_slots_that_the_cache_cannot_hold_depend_on_the_lengths() -> None:
    text, gpu = "vllm serve qwen3-8b --max-num-seqs 512 --max-num-queued-reqs 512", find_gpu("H100")
    long = judged(text, gpu=gpu, prompt_len=4000, output_len=500)
    assert [finding.rule for finding in long.problems] == ["slots-over-cache"]
    held = dict(long.problems[0].numbers)
    assert held["tokens per sequence"] == "4,500"
    assert judged(text, gpu=gpu, prompt_len=300, output_len=100).problems == []


def test_without_a_gpu_the_memory_is_not_judged() -> None:
    diagnosis = judged("vllm serve qwen3-8b --max-num-seqs 100000")
    missing = {each.rule: each.missing for each in diagnosis.not_judged}
    assert "--gpu NAME" in missing["fit"][0] and "slots-over-cache" in missing


def test_a_context_that_does_not_fit_is_a_mistake_with_the_length_that_does() -> None:
    found = judged("vllm serve llama-3.1-8b --max-model-len 131072", gpu=find_gpu("RTX4090")).problems
    assert [finding.rule for finding in found] == ["fit"]
    assert found[0].title == "max_model_len is longer than the KV cache"


def test_the_budget_that_a7_asks_for_is_a_note_that_corrects_the_guides() -> None:
    diagnosis = judged("vllm serve qwen3-8b --max-model-len 4096 --max-num-batched-tokens 8192", gpu=find_gpu("H100"))
    note = next(finding for finding in diagnosis.findings if finding.rule == "large-budget")
    assert note.severity == "note" and "wrong direction" in note.correction
    assert "ms" in dict(note.numbers)["a step full of prompts"]


def test_an_unlimited_queue_is_a_note_for_vllm_only() -> None:
    assert [finding.rule for finding in judged("vllm serve qwen3-8b").findings] == ["queue"]
    assert judged("headrace serve qwen3-8b").findings == ()


def test_a_good_command_has_nothing_wrong() -> None:
    text = "vllm serve llama-3.1-8b --max-num-seqs 256 --max-num-queued-reqs 1024 --gpu-memory-utilization 0.92"
    diagnosis = judged(text, gpu=find_gpu("H100"), prompt_len=600, output_len=200)
    assert diagnosis.findings == () and diagnosis.not_judged == ()
    assert diagnosis.outcome == "nothing wrong"
