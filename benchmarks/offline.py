"""Seconds for a whole offline workload on a GPU, with random weights: one command a model shape.

    python benchmarks/offline.py --model llama-3.1-8b --workload chat --json benchmarks/results/8b.jsonl

Every request is given at once; end of sequence is ignored and temperature is 1, as for every engine measured on these.
A few short requests run before the clock starts, so that kernels are compiled; the prefix cache is emptied before each
round. The best round is the record's figure; all rounds are in it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from gpu_workloads import SHAPES, WORKLOADS, Task

from headrace import LLM, SamplingParams

VLLM_BEST_SECONDS = {  # vLLM 0.26.0 on one H200, its best settings of those tried
    ("llama-3.2-1b", "chat"): 17.5,
    ("llama-3.2-1b", "decode"): 31.0,
    ("llama-3.2-1b", "prefix"): 10.5,
    ("llama-3.2-3b", "chat"): 25.6,
    ("llama-3.2-3b", "decode"): 53.9,
    ("llama-3.2-3b", "prefix"): 19.4,
    ("llama-3.1-8b", "chat"): 33.1,
    ("llama-3.1-8b", "decode"): 59.4,
    ("llama-3.1-8b", "prefill"): 55.5,
    ("llama-3.1-8b", "prefix"): 27.9,
}
LIMIT_SECONDS = {  # an engine that wastes nothing and does one thing after the other: see docs/performance.md
    ("llama-3.2-1b", "chat"): 4.2,
    ("llama-3.2-1b", "decode"): 9.0,
    ("llama-3.2-1b", "prefix"): 2.2,
    ("llama-3.2-3b", "chat"): 12.5,
    ("llama-3.2-3b", "decode"): 28.0,
    ("llama-3.2-3b", "prefix"): 6.4,
    ("llama-3.1-8b", "chat"): 23.7,
    ("llama-3.1-8b", "decode"): 44.6,
    ("llama-3.1-8b", "prefill"): 48.2,
    ("llama-3.1-8b", "prefix"): 13.5,
}


def run(llm: LLM, tasks: list[Task]) -> dict[str, Any]:
    params = [SamplingParams(max_tokens=task.num_tokens_out, ignore_eos=True, detokenize=False) for task in tasks]
    before = llm.stats
    started = perf_counter()
    outputs = llm.generate([task.prompt for task in tasks], params, use_tqdm=False)
    seconds = perf_counter() - started
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert num_tokens == sum(task.num_tokens_out for task in tasks), "every request gives all its tokens"
    after = llm.stats
    num_steps = after.scheduler.num_steps - before.scheduler.num_steps
    return {
        "seconds": round(seconds, 3),
        "out_tok_s": round(num_tokens / seconds),
        "num_steps": num_steps,
        "host_ms_per_step": round(1e3 * (after.host_seconds - before.host_seconds) / num_steps, 3),
        "wait_ms_per_step": round(1e3 * (after.wait_seconds - before.wait_seconds) / num_steps, 3),
        "num_preemptions": after.scheduler.num_preemptions - before.scheduler.num_preemptions,
        "prefix_hit_tokens": after.scheduler.num_prefix_hit_tokens - before.scheduler.num_prefix_hit_tokens,
    }


def warm_up(llm: LLM, tasks: list[Task]) -> None:
    """Compile what is compiled once: a few short answers of the workload's own kind."""
    few = [Task(task.prompt, min(4, task.num_tokens_out)) for task in tasks[:256]]
    run(llm, few)


def measure(llm: LLM, model: str, workload: str, num_rounds: int) -> dict[str, Any]:
    tasks = WORKLOADS[workload]()
    warm_up(llm, tasks)
    rounds = []
    for _ in range(num_rounds):
        llm.forget_prefixes()
        rounds.append(run(llm, tasks))
        print(f"{model} {workload}: {rounds[-1]}", flush=True)
    best = min(rounds, key=lambda result: result["seconds"])
    key = (model, workload)
    return {
        "model": model,
        "workload": workload,
        **best,
        "rounds": rounds,
        "vllm_best_seconds": VLLM_BEST_SECONDS.get(key),
        "limit_seconds": LIMIT_SECONDS.get(key),
        "share_of_limit": round(LIMIT_SECONDS[key] / best["seconds"], 3) if key in LIMIT_SECONDS else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), required=True)
    parser.add_argument("--workload", choices=list(WORKLOADS), action="append", help="may be given several times")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--commit", help="of the code that runs, where git cannot tell")
    parser.add_argument("--json", type=Path, help="write the records here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SHAPES[arguments.model]))
        started = perf_counter()
        llm = LLM(directory, load_format="random", max_model_len=4096)
        ready_seconds = perf_counter() - started
    print(f"{arguments.model}: ready in {ready_seconds:.1f} s", flush=True)
    common = {
        "dtype": llm.settings.dtype,
        "ready_seconds": round(ready_seconds, 1),
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": "python benchmarks/offline.py " + " ".join(sys.argv[1:]),
        "commit": arguments.commit or _commit(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": _version("triton")},
        "settings": {choice.name: choice.value for choice in llm.settings.choices},
    }
    records = [
        measure(llm, arguments.model, name, arguments.rounds) | common for name in arguments.workload or list(WORKLOADS)
    ]
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text("".join(json.dumps(record) + "\n" for record in records))
    llm.close()


def _commit() -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()


def _version(package: str) -> str:
    return importlib.metadata.version(package)


if __name__ == "__main__":
    main()
