"""NVIDIA's AIPerf: benchmarks of chats and completions."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.clients.checks import check, main, shell

NUM_REQUESTS = 8
RUN = r"""
# docs: run
aiperf profile --model $MODEL --url $BASE --api-key $KEY --endpoint-type chat --streaming --tokenizer $TOKENIZER \
    --prompt-input-tokens-mean 32 --prompt-output-tokens-mean 8 --extra-inputs ignore_eos:true \
    --request-count 8 --concurrency 2 --artifact-dir results --ui none
# docs: end
"""


def measured(command: str, folder: str) -> dict[str, Any]:
    print(shell(command.replace("results", folder))[-200:])
    (path,) = Path(folder).glob("**/profile_export_aiperf.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def check_metrics(found: dict[str, Any]) -> None:
    assert found["request_count"]["avg"] == NUM_REQUESTS and not found.get("error_summary")
    for name in ("time_to_first_token", "inter_token_latency", "request_latency", "output_token_throughput"):
        assert found[name]["avg"] > 0, name


@check
def chats() -> None:
    check_metrics(measured(RUN, "chats"))


@check
def completions_with_the_token_counts_of_the_server() -> None:
    more = "--endpoint-type completions --use-server-token-count"
    found = measured(RUN.replace("--endpoint-type chat", more), "completions")
    check_metrics(found)
    assert found["output_sequence_length"]["avg"] == 8  # as the usage in the stream says


if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())
    main("aiperf")
