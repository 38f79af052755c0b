"""GuideLLM: benchmarks of chats and completions from a file of prompts."""

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
for number in 1 2 3 4 5 6 7 8; do
    echo '{"prompt": "Name a colour.", "output_tokens_count": 8}'
done > prompts.jsonl
guidellm run --backend kind=openai_http,target=$BASE,model=$MODEL,api_key=$KEY,http2=false \
    --data kind=json_file,path=prompts.jsonl --profile kind=concurrent,streams=2 \
    --constraint kind=max_requests,count=8 --output kind=json,path=out.json
# docs: end
"""


def measured(command: str, **variables: str) -> dict[str, Any]:
    shell(f"rm -f out.json; {command}", **variables)
    (benchmark,) = json.loads(Path("out.json").read_text(encoding="utf-8"))["benchmarks"]
    found: dict[str, Any] = benchmark["metrics"]
    return found


def check_metrics(found: dict[str, Any]) -> None:
    totals = found["request_totals"]
    assert totals["successful"] == totals["total"] == NUM_REQUESTS, totals
    for name in ("time_to_first_token_ms", "inter_token_latency_ms", "output_tokens_per_second", "request_latency"):
        assert found[name]["successful"]["mean"] > 0, name
    assert found["output_token_count"]["successful"]["mean"] == 8  # as the usage of the stream says
    assert found["prompt_token_count"]["successful"]["mean"] > 0


@check
def chats() -> None:
    check_metrics(measured(RUN))


@check
def completions_at_a_constant_rate() -> None:
    command = RUN.replace("http2=false", "http2=false,request_format=/v1/completions")
    check_metrics(measured(command.replace("kind=concurrent,streams=2", "kind=constant,rate=4")))


@check
def a_wrong_key_makes_every_request_an_error() -> None:
    totals = measured(RUN, KEY="wrong")["request_totals"]
    assert totals["errored"] == totals["total"] == NUM_REQUESTS, totals


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    os.chdir(tempfile.mkdtemp())
    main("guidellm")
