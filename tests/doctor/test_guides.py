"""Command lines as guides print them, over several lines and with comments, each with a known mistake.

doctor must name the mistake of each, and find no other mistake in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from headrace.cli.run import build_parser as run_parser
from headrace.cli.serve import build_parser as serve_parser
from headrace.doctor.diagnosis import Diagnosis, diagnose
from headrace.doctor.readers.command_line import read_command
from headrace.plan.gpus import find_gpu

FLAGS = {"serve": serve_parser().flags, "run": run_parser().flags}


@dataclass(frozen=True)
class Guide:
    command: str
    rule: str
    title: str  # of the finding
    shown: str  # in its numbers
    advice: str


GUIDES = {
    "chunked prefill offered as prefix caching": Guide(
        """
        # Enable prefix caching for shared system prompts
        vllm serve meta-llama/Llama-3.1-8B-Instruct \\
            --enable-chunked-prefill \\
            --max-num-batched-tokens 4096 \\
            --gpu-memory-utilization 0.92
        """,
        rule="chunked-as-prefix",
        title="chunked prefill is not prefix caching",
        shown="Enable prefix caching for shared system prompts",
        advice="--enable-prefix-caching",
    ),
    "the same in a comment at the end of a line": Guide(
        """
        python -m vllm.entrypoints.openai.api_server \\
            --model meta-llama/Llama-3.1-8B-Instruct \\
            --max-num-seqs 256 --enable-chunked-prefill  # prefix caching: reuse the KV cache of common prompts
        """,
        rule="chunked-as-prefix",
        title="chunked prefill is not prefix caching",
        shown="prefix caching: reuse",
        advice="--enable-prefix-caching",
    ),
    "a flag of an older version": Guide(
        """
        python -m vllm.entrypoints.openai.api_server \\
            --model meta-llama/Llama-3.1-8B-Instruct \\
            --max-num-seqs 256 \\
            --scheduler-delay-factor 0.1   # wait a little to form larger batches
        """,
        rule="unknown-flag",
        title="flags that vLLM 0.32.0 does not have",
        shown="of an older version, or of another engine",
        advice="leave out --scheduler-delay-factor",
    ),
    "a flag that never existed": Guide(
        """
        vllm serve meta-llama/Llama-3.1-8B-Instruct \\
            --enable-continuous-batching \\
            --max-num-seqs 512
        """,
        rule="unknown-flag",
        title="flags that vLLM 0.32.0 does not have",
        shown="not known",
        advice="leave out --enable-continuous-batching",
    ),
    "a flag of TensorRT-LLM": Guide(
        """
        vllm serve meta-llama/Llama-3.1-8B-Instruct \\
            --max-tokens-in-paged-kv-cache 131072
        """,
        rule="unknown-flag",
        title="flags that vLLM 0.32.0 does not have",
        shown="",
        advice="leave out --max-tokens-in-paged-kv-cache",
    ),
    "a token budget of 0": Guide(
        """
        docker run --gpus all -p 8000:8000 vllm/vllm-openai:latest \\
            --model meta-llama/Llama-3.1-8B-Instruct \\
            --enable-chunked-prefill \\
            --max-num-batched-tokens 0    # 0 = automatic
        """,
        rule="impossible-value",
        title="values that the engine refuses",
        shown="0 (must be a whole number of at least 1)",
        advice="0 does not mean 'no limit'",
    ),
    "contradictory memory shares": Guide(
        """
        vllm serve meta-llama/Llama-3.1-8B-Instruct \\
            --gpu-memory-utilization 0.95 \\
            --max-num-seqs 256 \\
            --gpu-memory-utilization 0.85   # safer
        """,
        rule="contradiction",
        title="settings that contradict each other",
        shown="given as 0.95, 0.85; the last one counts",
        advice="keep one value of each",
    ),
    "a memory share beside the size of the cache": Guide(
        """
        vllm serve meta-llama/Llama-3.1-8B-Instruct \\
            --gpu-memory-utilization 0.9 \\
            --num-gpu-blocks-override 4096
        """,
        rule="contradiction",
        title="settings that contradict each other",
        shown="num_gpu_blocks_override sets the size of the cache instead",
        advice="keep one value of each",
    ),
    "a batch job with a budget of 0": Guide(
        """
        headrace run prompts.jsonl -o answers.jsonl \\
            --model meta-llama/Llama-3.1-8B-Instruct \\
            --max-num-batched-tokens 0
        """,
        rule="impossible-value",
        title="values that the engine refuses",
        shown="0 (must be a whole number of at least 1)",
        advice="0 does not mean 'no limit'",
    ),
}


def judged(command: str) -> Diagnosis:
    return diagnose(read_command([command], headrace_flags=FLAGS.__getitem__, gpu=find_gpu("H100")))


@pytest.mark.parametrize("name", GUIDES)
def test_the_mistake_of_a_guides_command_is_named(name: str) -> None:
    guide = GUIDES[name]
    diagnosis = judged(guide.command)
    (mistake,) = [finding for finding in diagnosis.findings if finding.severity == "mistake"]
    assert (mistake.rule, mistake.title) == (guide.rule, guide.title)
    assert guide.shown in str(mistake.numbers)
    assert any(guide.advice in advice.text for advice in mistake.advice)
    assert diagnosis.outcome == "problems found" and guide.advice in diagnosis.headline


def test_tensor_parallelism_of_2_on_a_small_model_is_a_problem_with_a_prediction() -> None:
    diagnosis = judged(
        """
        vllm serve meta-llama/Llama-3.1-8B-Instruct \\
            --tensor-parallel-size 2 \\
            --max-num-seqs 256 \\
            --max-num-queued-reqs 1024
        """
    )
    (problem,) = diagnosis.problems
    assert problem.rule == "tensor-parallel" and problem.guide == "A6, D2"
    assert problem.gain is not None and problem.gain > 0


def test_two_mistakes_of_one_guide_are_both_named() -> None:
    diagnosis = judged(
        """
        python3 -m vllm.entrypoints.openai.api_server --model meta-llama/Llama-3.1-8B-Instruct \\
            --max-num-batched-tokens 0 --num-scheduler-steps 8 --tensor-parallel-size 2
        """
    )
    assert {finding.rule for finding in diagnosis.problems} == {"unknown-flag", "impossible-value", "tensor-parallel"}


def test_the_same_command_without_its_mistake_has_none() -> None:
    diagnosis = judged(
        """
        # Enable prefix caching for shared system prompts
        vllm serve meta-llama/Llama-3.1-8B-Instruct \\
            --enable-prefix-caching --enable-chunked-prefill \\
            --max-num-batched-tokens 4096 \\
            --gpu-memory-utilization 0.92
        """
    )
    assert diagnosis.problems == []
