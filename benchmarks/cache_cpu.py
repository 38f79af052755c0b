"""Decoding on this CPU with keys and values in float32, float16 and FP8: speed by context length, and loss.

python benchmarks/cache_cpu.py --json benchmarks/results/cache-cpu.json [--llama-python PYTHON]

Speed: output tokens per second of greedy answers after prompts of random tokens that are in the cache already, so that
hardly anything but decoding is timed. Each engine runs in its own process, one after the other, in rounds; medians
count. llama.cpp (llama-cpp-python, which --llama-python names another interpreter with) reads the same file; its cache
is in float16, or in Q8_0.

Cost: perplexity of the default model on Python's help topics, in windows of 1,024 tokens whose keys and values are read
back from the cache, and the Kullback-Leibler divergence from the model with a cache in float32.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from packed_cpu import MARK, LlamaCpp, model_path, prompts_of

ENGINES = ("float32", "float16", "fp8", "llama.cpp", "llama.cpp q8_0")
Q8_0 = 8  # ggml's number of the type
CASES = ((1, 64), (1, 1024), (1, 4096), (1, 7936), (4, 2048), (16, 512), (64, 64))
COSTS = {"float16": "float16", "fp8": "float8_e4m3fn"}


def run_headrace(engine: str, given: argparse.Namespace) -> dict[str, float]:
    from headrace import LLM, SamplingParams

    llm, rates = LLM(given.model, kv_cache_dtype=engine), {}
    for num_seqs, context_len in given.cases:
        prompts = [{"prompt_token_ids": ids} for ids in prompts_of(num_seqs, context_len, seed=1)]
        for num_tokens in (1, given.answer_len, given.answer_len):  # the first computes the prompts
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            started = perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            rates[f"{num_seqs} x {context_len}"] = num_seqs * num_tokens / (perf_counter() - started)
    return rates


def run_llama_cpp(engine: str, given: argparse.Namespace) -> dict[str, float]:
    import llama_cpp.llama_cpp as c

    silent = c.llama_log_callback(lambda level, text, data: None)
    c.llama_log_set(silent, None)
    c.llama_backend_init()
    model = c.llama_model_load_from_file(given.model_path.encode(), c.llama_model_default_params())
    rates = {}
    for num_seqs, context_len in given.cases:
        max_len = context_len + 2 * given.answer_len
        cache_type = Q8_0 if engine.endswith("q8_0") else None
        context = LlamaCpp(model, num_seqs, max_len=max_len, threads=given.threads, cache_type=cache_type)
        last = context.fill(prompts_of(num_seqs, context_len, seed=1))
        for length in (context_len, context_len + given.answer_len):
            started = perf_counter()
            context.extend(last, length, given.answer_len)
            rates[f"{num_seqs} x {context_len}"] = num_seqs * given.answer_len / (perf_counter() - started)
        context.close()
    return rates


def in_process(engine: str, given: argparse.Namespace) -> dict[str, float] | None:
    python = given.llama_python if engine.startswith("llama.cpp") else sys.executable
    own = ["--engine", engine, "--model-path", model_path(given.model)]
    done = subprocess.run([python, __file__, *sys.argv[1:], *own], capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    if line is None:
        print(f"{engine}: {done.stderr.strip().splitlines()[-1:]}", flush=True)
        return None
    found: dict[str, float] = json.loads(line.removeprefix(MARK))
    return found


def measure_costs(model: str, num_windows: int) -> dict[str, dict[str, float]]:
    import numpy as np
    import torch
    from accuracy import WINDOW, text, whole_prompt

    from headrace.models import load_decoder, open_checkpoint
    from headrace.text import load_tokenizer

    checkpoint = open_checkpoint(model)
    token_ids = np.asarray(load_tokenizer(checkpoint.text).encode(text()[:80_000]))[: num_windows * WINDOW]
    decoder = load_decoder(checkpoint, dtype=torch.float32, device="cpu")
    losses: dict[str, list[float]] = {"float32": [], **{name: [] for name in COSTS}}
    divergences: dict[str, list[float]] = {name: [] for name in COSTS}
    for window in token_ids.reshape(num_windows, WINDOW):
        ids = torch.from_numpy(window.astype(np.int32))
        wide = None
        for name, so_far in losses.items():
            layout, caches = whole_prompt(decoder, getattr(torch, COSTS.get(name, name)))
            with torch.inference_mode():
                found = torch.log_softmax(decoder.logits(decoder.hidden(ids, layout, caches)[:-1]), -1)
            so_far.append(-float(found.gather(1, ids[1:].long()[:, None]).mean()))
            if wide is None:
                wide = found
            else:
                divergences[name].append(float((wide.exp() * (wide - found)).sum(1).mean()))
    perplexities = {name: math.exp(statistics.mean(each)) for name, each in losses.items()}
    return {
        name: {
            "perplexity": perplexities[name],
            "change": perplexities[name] / perplexities["float32"] - 1,
            "divergence": statistics.mean(divergences[name]) if name in divergences else 0.0,
        }
        for name in losses
    }


def cases_of(given: str) -> list[tuple[int, int]]:
    return [(int(seqs), int(length)) for seqs, length in (part.split("x") for part in given.split(","))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or the default model")
    parser.add_argument(
        "--cases", type=cases_of, default=list(CASES), help="sequences x tokens of context: 1x64,4x4096"
    )
    parser.add_argument("--answer-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--windows", type=int, default=8, help="of 1,024 tokens, for the cost; 0 leaves it out")
    parser.add_argument("--engines", default=",".join(ENGINES), help="some of them, separated by commas")
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--model-path", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        run = run_llama_cpp if given.engine.startswith("llama.cpp") else run_headrace
        print(MARK + json.dumps(run(given.engine, given)))
        return
    rounds: dict[str, list[dict[str, float]]] = {engine: [] for engine in given.engines.split(",")}
    for number in range(given.rounds):
        for engine, found in rounds.items():
            rates = in_process(engine, given)
            if rates is not None:
                found.append(rates)
                print(
                    f"round {number + 1}, {engine}: " + ", ".join(f"{k} {v:.0f}" for k, v in rates.items()), flush=True
                )
    record = record_of(given, rounds)
    print(json.dumps(record["costs"], indent=1))
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")


def record_of(given: argparse.Namespace, rounds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    import torch
    from about import commit

    from headrace.hardware import read_facts

    facts = read_facts()
    return {
        "command": "python benchmarks/cache_cpu.py "
        + " ".join("PYTHON" if part == given.llama_python else part for part in sys.argv[1:]),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "unit": "output tokens/s",
        "model": given.model,
        "answer_len": given.answer_len,
        "threads": given.threads,
        "cpu": f"{facts.cpu_model}, {facts.num_cores} cores",
        "versions": {"torch": torch.__version__},
        "engines": {
            engine: {
                "median": {case: round(statistics.median(each[case] for each in found), 1) for case in found[0]},
                "rounds": [{case: round(rate, 1) for case, rate in each.items()} for each in found],
            }
            for engine, found in rounds.items()
            if found
        },
        "costs": measure_costs(given.model, given.windows) if given.windows else None,
    }


if __name__ == "__main__":
    main()
