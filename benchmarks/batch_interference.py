"""What a batch costs the other requests of a server: the time to first token of interactive streams, with and without
a saturating batch (`/v1/batches`), at several loads.

    python benchmarks/batch_interference.py --json benchmarks/results/batch-interference.json

Starts `headrace serve --batch-dir`. Interactive requests arrive at random times (an open loop of `headrace.bench`) and
are streamed. Each load is measured without a batch, then beside a batch of more lines than the server can finish in
that time. The rate of the batch alone is measured before. The client runs on the same cores as the server.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import openai
from about import commit, cpu_name

from headrace.bench.engines.base import RunningEngine
from headrace.bench.engines.headrace_engine import HeadraceEngine
from headrace.bench.online import loads_of, measure_online, num_requests_of
from headrace.bench.workloads import Workload, WorkloadSpec, build
from headrace.hardware.describe import package_versions
from headrace.models import open_checkpoint

MAX_RATIO = 2.0  # of p95 of the time to first token
SETTLE_S = 8.0  # from the start of a batch until it fills the engine
WORDS = ("river", "mountain", "engine", "paper", "window", "garden", "number", "winter", "letter", "market", "silver")


def batch_file(given: argparse.Namespace) -> bytes:
    dice = random.Random(0)
    lines = []
    for number in range(given.lines):
        prompt = " ".join(dice.choices(WORDS, k=given.batch_prompt_len))
        body = {"prompt": prompt, "max_tokens": given.batch_answer_len, "ignore_eos": True, "temperature": 1.0}
        lines.append({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


class SaturatingBatch:
    """A batch that runs from `start` to `stop`."""

    def __init__(self, running: RunningEngine, content: bytes) -> None:
        self._running = running
        self._client = openai.OpenAI(base_url=f"{running.address}/v1", api_key="none")
        self._content = content
        self._id = ""

    def start(self) -> None:
        file = self._client.files.create(file=("batch.jsonl", self._content), purpose="batch")
        self._id = self._client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        ).id
        before = self._running.counters()["num_generated_tokens"]
        while self._running.counters()["num_generated_tokens"] == before:
            time.sleep(0.1)
        time.sleep(SETTLE_S)

    def tokens_per_s(self, seconds: float) -> float:
        """Of the whole server: nothing else may run."""
        before, started = self._running.counters()["num_generated_tokens"], time.perf_counter()
        time.sleep(seconds)
        return (self._running.counters()["num_generated_tokens"] - before) / (time.perf_counter() - started)

    def stop(self) -> None:
        if self._client.batches.retrieve(self._id).status != "in_progress":
            raise SystemExit("the batch ended while it was measured; give it more --lines")
        self._client.batches.cancel(self._id)
        while self._client.batches.retrieve(self._id).status != "cancelled":
            time.sleep(0.1)


def levels_of(running: RunningEngine, workload: Workload, given: argparse.Namespace) -> list[dict[str, Any]]:
    loads = loads_of(rates=given.rates, seconds=given.seconds, seed=1)
    return measure_online(running, workload, loads, on_level=show).record["levels"]


def show(level: dict[str, Any]) -> None:
    print(json.dumps({"load": level["load"], **flat(level, has_batch=True)}), file=sys.stderr, flush=True)


def flat(level: dict[str, Any], *, has_batch: bool) -> dict[str, Any]:
    summary = level["summary"]
    num_others = level["counters"]["num_generated_tokens"] - summary["num_output_tokens"]
    figures = {
        "requests": summary["num_ok"],
        "not_ok": summary["num_requests"] - summary["num_ok"],
        **{f"ttft_ms_p{p}": round(summary["ttft_ms"][f"p{p}"], 1) for p in (50, 95)},
        "ttft_ms_max": round(summary["ttft_ms"]["max"], 1),
        **{f"tpot_ms_p{p}": round(summary["tpot_ms"][f"p{p}"], 1) for p in (50, 95)},
    }
    return figures | ({"batch_tok_s": round(num_others / summary["seconds"], 1)} if has_batch else {})


def measured(given: argparse.Namespace, directory: str) -> dict[str, Any]:
    loads = loads_of(rates=given.rates, seconds=given.seconds)
    spec = WorkloadSpec(
        name="random",
        num_requests=sum(num_requests_of(load) or 0 for load in loads) + 16,
        input_len=given.prompt_len,
        output_len=given.answer_len,
        spread=0.5,
    )
    workload = build(spec.for_vocabulary(open_checkpoint(given.model).spec.vocab_size))
    with HeadraceEngine(given.model).start({"batch_dir": directory}, serves=True) as running:
        alone = [flat(level, has_batch=False) for level in levels_of(running, workload, given)]
        batch = SaturatingBatch(running, batch_file(given))
        batch.start()
        rate = round(batch.tokens_per_s(given.alone_seconds), 1)
        beside = [flat(level, has_batch=True) for level in levels_of(running, workload, given)]
        batch.stop()
        settings = {
            name: running.settings_in_force()[name].value for name in ("max_num_seqs", "max_num_batched_tokens")
        }
    curve = [
        {
            "requests_per_s": load_rate,
            "without_batch": without,
            "with_batch": with_batch,
            "ttft_p95_ratio": round(with_batch["ttft_ms_p95"] / without["ttft_ms_p95"], 2),
            "tpot_p50_ratio": round(with_batch["tpot_ms_p50"] / without["tpot_ms_p50"], 2),
        }
        for load_rate, without, with_batch in zip(given.rates, alone, beside, strict=True)
    ]
    return {"settings": settings, "batch_alone_tok_s": rate, "curve": curve}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0, 1.5], help="interactive requests/s")
    parser.add_argument("--seconds", type=float, default=35.0, help="of each load")
    parser.add_argument("--alone-seconds", type=float, default=15.0, help="of the batch alone")
    parser.add_argument("--prompt-len", type=int, default=96, help="mean tokens of an interactive prompt")
    parser.add_argument("--answer-len", type=int, default=24)
    parser.add_argument("--lines", type=int, default=4000, help="of the batch")
    parser.add_argument("--batch-prompt-len", type=int, default=64, help="words")
    parser.add_argument("--batch-answer-len", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write a record of the numbers to this file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        figures = measured(given, directory)
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "commit": commit(),
        "versions": {**package_versions(), "python": platform.python_version()},
        "cpu": cpu_name(),
        "model": given.model,
        "interactive": {"prompt_len": given.prompt_len, "answer_len": given.answer_len, "seconds": given.seconds},
        "batch": {"prompt_words": given.batch_prompt_len, "answer_len": given.batch_answer_len},
        **figures,
    }
    print(json.dumps(record, indent=2))
    if given.json is not None:
        given.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if all(level["ttft_p95_ratio"] <= MAX_RATIO for level in figures["curve"]) else 1


if __name__ == "__main__":
    sys.exit(main())
