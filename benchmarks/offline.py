"""Seconds for a whole offline workload on a GPU, with random weights: one command per model shape.

    python benchmarks/offline.py --model llama-3.1-8b --workload chat --json benchmarks/results/8b.jsonl
    python benchmarks/offline.py --model llama-3.1-8b --fp8

All requests are submitted at once; end of sequence is ignored and temperature is 1, as for every engine measured on
these workloads. A few short requests run first, so that kernels are compiled; the prefix cache is emptied before each
round. The record's figure is the best round; it holds all rounds. After the rounds a part of the workload runs once
more under the profiler (`headrace.profile`), for the share of time in which the GPU was busy. It has fewer sequences,
so this share is a low estimate. With --profile-whole the middle of another round is profiled instead.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import msgspec
import torch
from about import commit
from gpu_workloads import WORKLOADS, Task

from headrace import LLM, SamplingParams
from headrace.bench.engines.shapes import SHAPES
from headrace.engine.profiler import model_numbers
from headrace.profile.ceilings import achieved_rates
from headrace.profile.report import Report, report_of
from headrace.profile.trace import ModelNumbers, read_profile

# Seconds by (model, workload, dtype): vLLM 0.26.0 on one H200 with the best settings tried; and the limit of the
# hardware when its parts run one after the other without waste. See docs/performance.md for both.
VLLM_BEST_SECONDS = {
    ("llama-3.2-1b", "chat", "bfloat16"): 17.5,
    ("llama-3.2-1b", "decode", "bfloat16"): 31.0,
    ("llama-3.2-1b", "prefix", "bfloat16"): 10.5,
    ("llama-3.2-3b", "chat", "bfloat16"): 25.6,
    ("llama-3.2-3b", "decode", "bfloat16"): 53.9,
    ("llama-3.2-3b", "prefix", "bfloat16"): 19.4,
    ("llama-3.1-8b", "chat", "bfloat16"): 33.1,
    ("llama-3.1-8b", "decode", "bfloat16"): 59.4,
    ("llama-3.1-8b", "prefill", "bfloat16"): 55.5,
    ("llama-3.1-8b", "prefix", "bfloat16"): 27.9,
    ("llama-3.1-8b", "chat", "fp8"): 28.5,
    ("llama-3.1-8b", "decode", "fp8"): 54.1,
    ("llama-3.1-8b", "prefill", "fp8"): 35.7,
    ("llama-3.1-8b", "prefix", "fp8"): 21.3,
}
LIMIT_SECONDS = {
    ("llama-3.2-1b", "chat", "bfloat16"): 4.2,
    ("llama-3.2-1b", "decode", "bfloat16"): 9.0,
    ("llama-3.2-1b", "prefix", "bfloat16"): 2.2,
    ("llama-3.2-3b", "chat", "bfloat16"): 12.5,
    ("llama-3.2-3b", "decode", "bfloat16"): 28.0,
    ("llama-3.2-3b", "prefix", "bfloat16"): 6.4,
    ("llama-3.1-8b", "chat", "bfloat16"): 23.7,
    ("llama-3.1-8b", "decode", "bfloat16"): 44.6,
    ("llama-3.1-8b", "prefill", "bfloat16"): 48.2,
    ("llama-3.1-8b", "prefix", "bfloat16"): 13.5,
    ("llama-3.1-8b", "chat", "fp8"): 13.0,
    ("llama-3.1-8b", "decode", "fp8"): 24.0,
    ("llama-3.1-8b", "prefill", "fp8"): 26.0,
    ("llama-3.1-8b", "prefix", "fp8"): 8.0,
}
PROFILED_SECONDS = 1.0
KERNELS_NAMED = 8


def run(llm: LLM, tasks: list[Task]) -> dict[str, Any]:
    params = [SamplingParams(max_tokens=task.num_tokens_out, ignore_eos=True, detokenize=False) for task in tasks]
    before = llm.stats
    started = perf_counter()
    outputs = llm.generate([task.prompt for task in tasks], params, use_tqdm=False)
    seconds = perf_counter() - started
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert num_tokens == sum(task.num_tokens_out for task in tasks), "a request has not generated all its tokens"
    after = llm.stats
    num_steps = after.scheduler.num_steps - before.scheduler.num_steps
    return {
        "seconds": round(seconds, 3),
        "out_tok_s": round(num_tokens / seconds),
        "num_steps": num_steps,
        "host_ms_per_step": round(1e3 * (after.host_seconds - before.host_seconds) / num_steps, 3),
        "host_ms_per_steady_step": round(
            1e3
            * (after.steady_host_seconds - before.steady_host_seconds)
            / max(1, after.num_steady_steps - before.num_steady_steps),
            3,
        ),
        "wait_ms_per_step": round(1e3 * (after.wait_seconds - before.wait_seconds) / num_steps, 3),
        "num_preemptions": after.scheduler.num_preemptions - before.scheduler.num_preemptions,
        "prefix_hit_tokens": after.scheduler.num_prefix_hit_tokens - before.scheduler.num_prefix_hit_tokens,
    }


def warm_up(llm: LLM, tasks: list[Task]) -> None:
    """Compile kernels with a few short answers of the workload."""
    few = [Task(task.prompt, min(4, task.num_tokens_out)) for task in tasks[:256]]
    run(llm, few)


def work(llm: LLM, tasks: list[Task], rates: dict[str, Any]) -> dict[str, float]:
    """Achieved rates of a round; see `headrace.profile.ceilings`."""
    model = msgspec.convert(model_numbers(llm.spec, llm.settings), ModelNumbers)
    lengths = [(len(task.prompt), task.num_tokens_out) for task in tasks]
    return achieved_rates(model, lengths, num_steps=rates["num_steps"], seconds=rates["seconds"])._asdict()


def some_of(tasks: list[Task], num_tokens: float) -> list[Task]:
    """Return the tasks with the longest answers that fit into this many tokens."""
    part = []
    for task in sorted(tasks, key=lambda task: -task.num_tokens_out):
        num_tokens -= len(task.prompt) + task.num_tokens_out
        if num_tokens < 0:
            break
        part.append(task)
    return part


def profile(llm: LLM, tasks: list[Task], after_seconds: float) -> dict[str, Any]:
    """Return the GPU's busy share, the parts of a step and the kernels that took most time, while these tasks run."""
    llm.forget_prefixes()
    with ThreadPoolExecutor(1) as beside, tempfile.TemporaryDirectory() as directory:
        running = beside.submit(run, llm, tasks)
        sleep(after_seconds)
        llm.start_profile("window", directory=directory)
        sleep(PROFILED_SECONDS)
        llm.stop_profile()
        running.result()
        record, trace = read_profile(Path(directory) / "window.profile.json")
    assert trace is not None
    return busy_share(report_of(record, trace))


def busy_share(report: Report) -> dict[str, Any]:
    shares = Counter[str]()
    for (_, name), us in report.timeline.us_by_name().items():
        shares[name.split("(")[0][:60]] += us / report.timeline.span_us
    return {
        "gpu_busy_share": round(report.busy_share, 4),
        "part_shares": {row.part: round(row.share, 4) for row in report.rows},
        "kernel_shares": {name: round(share, 4) for name, share in shares.most_common(KERNELS_NAMED)},
    }


def measure(llm: LLM, model: str, workload: str, num_rounds: int, *, profiles_whole: bool) -> dict[str, Any]:
    tasks = WORKLOADS[workload]()
    warm_up(llm, tasks)
    rounds = []
    dtype = llm.settings.quantization or llm.settings.dtype
    for _ in range(num_rounds):
        llm.forget_prefixes()
        rounds.append(run(llm, tasks))
        print(f"{model} {dtype} {workload}: {rounds[-1]}", flush=True)
    best = min(rounds, key=lambda result: result["seconds"])
    key = (model, workload, dtype)
    num_tokens = sum(len(task.prompt) + task.num_tokens_out for task in tasks)
    if profiles_whole:
        profiled = profile(llm, tasks, best["seconds"] / 2)
    else:
        tokens_per_second = num_tokens / best["seconds"]
        profiled = profile(llm, some_of(tasks, 4 * PROFILED_SECONDS * tokens_per_second), PROFILED_SECONDS)
    print(f"  {profiled}", flush=True)
    return {
        "model": model,
        "workload": workload,
        "dtype": dtype,
        **best,
        **work(llm, tasks, best),
        **profiled,
        "rounds": rounds,
        "vllm_best_seconds": VLLM_BEST_SECONDS.get(key),
        "limit_seconds": LIMIT_SECONDS.get(key),
        "share_of_limit": round(LIMIT_SECONDS[key] / best["seconds"], 3) if key in LIMIT_SECONDS else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), required=True)
    parser.add_argument("--workload", choices=list(WORKLOADS), action="append", help="may be repeated")
    parser.add_argument("--fp8", action="store_true", help="weights, activations and cache in eight bits")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=N", help="an integer engine setting")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--profile-whole", action="store_true", help="profile the middle of another whole round")
    parser.add_argument("--commit", help="commit of the code, if git is not available")
    parser.add_argument("--json", type=Path, help="write the records here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SHAPES[arguments.model]))
        started = perf_counter()
        fp8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"} if arguments.fp8 else {}
        chosen = {name: int(value) for name, value in (item.split("=") for item in arguments.set)}
        llm = LLM(directory, load_format="random", max_model_len=4096, **fp8, **chosen)
        ready_seconds = perf_counter() - started
    print(f"{arguments.model}: ready in {ready_seconds:.1f} s", flush=True)
    common = {
        "ready_seconds": round(ready_seconds, 1),
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": "python benchmarks/offline.py " + " ".join(sys.argv[1:]),
        "commit": arguments.commit or commit(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": _version("triton"),
            "fa3-fwd": _version("fa3-fwd"),
        },
        "settings": {choice.name: choice.value for choice in llm.settings.choices},
    }
    lines = ""
    for name in arguments.workload or list(WORKLOADS):
        record = measure(llm, arguments.model, name, arguments.rounds, profiles_whole=arguments.profile_whole)
        lines += json.dumps(record | common) + "\n"
        if arguments.json:  # after each workload, so that an interrupted run keeps the finished ones
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(lines)
    llm.close()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
