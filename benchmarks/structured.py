"""Cost of structured output on a CPU: the masks of a step, and unconstrained requests next to constrained ones.

    python benchmarks/structured.py --json benchmarks/results/structured-cpu.json

The masks are those of the default model's vocabulary, for sequences that write given texts: each step reads one token
per sequence and computes which tokens may follow. The requests run on the default model; every answer has the same
length. On a busy machine look at the CPU time, which does not count other programs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import llguidance
import numpy as np
from about import commit, cpu_name

from headrace import LLM, SamplingParams, StructuredOutputs
from headrace.engine.constraints import Constraints
from headrace.engine.grammars import Grammars
from headrace.models import open_checkpoint
from headrace.steps import UNFINISHED, SlotEntry, StepPlan, StepResult
from headrace.text import Tokenizer, load_tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "pattern": "^[a-z.]+@[a-z]+\\.(com|org)$"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "email", "tags", "active"],
    "additionalProperties": False,
}
GRAMMARS = {
    "json_schema": StructuredOutputs(json=PERSON),
    "json_object": StructuredOutputs(json_object=True),
    "regex": StructuredOutputs(regex="[a-z ]{1,400}"),
}
NAMES = ["Ada Lovelace", "Grace Hopper", "Alan Turing", "Edsger Dijkstra", "Barbara Liskov", "Donald Knuth"]
NUM_ROWS = (1, 32, 256)
NUM_TOKENS = 48
NUM_REQUESTS = 32


def text_of(kind: str, number: int) -> str:
    name = NAMES[number % len(NAMES)]
    if kind == "regex":
        return f"the name of number {'one' * (1 + number % 7)} is {name.lower()} and there is more to say of it"
    first = name.split()[0].lower()
    return json.dumps(
        {"name": name, "age": number % 100, "email": f"{first}@mail.com", "tags": [first, "person"], "active": True}
    )


def measure_masks(tokenizer: Tokenizer, grammars: Grammars, kind: str, num_rows: int) -> dict[str, float]:
    """Returns the time in ms of a step's masks, over the steps of all texts."""
    grammar = grammars.compile(GRAMMARS[kind])
    texts = [tokenizer.encode(text_of(kind, slot), add_special_tokens=False) for slot in range(num_rows)]
    slots = np.arange(num_rows)
    milliseconds: list[float] = []
    cpu_seconds = 0.0
    for _ in range(max(1, 64 // num_rows)):
        constraints = Constraints(grammars)
        for slot in range(num_rows):
            entry = SlotEntry(slot, np.zeros(1, np.int32), 0, 1, 10**6, 0, SamplingParams(), (2,))
            constraints.enter(entry, (str(slot), 0), grammar)
        for step in range(min(map(len, texts))):
            samples = np.ones(num_rows, np.bool_)
            masks = constraints.masks(StepPlan(step, slots, np.ones(num_rows, np.int64), samples, num_rows))
            assert masks is not None
            started, cpu_started = perf_counter(), process_time()
            masks.bits()
            milliseconds.append(1e3 * (perf_counter() - started))
            cpu_seconds += process_time() - cpu_started
            tokens = np.array([text[step] for text in texts])
            result = StepResult(step, slots, tokens, np.full(num_rows, UNFINISHED, np.uint8))
            masks.result = lambda result=result: result  # type: ignore[misc]
    found = np.array(milliseconds)
    return {
        "p50": round(float(np.median(found)), 3),
        "mean": round(float(found.mean()), 3),
        "p99": round(float(np.quantile(found, 0.99)), 3),
        "cpu_mean_per_row": round(1e3 * cpu_seconds / len(found) / num_rows, 4),
    }


def measure_requests(num_rounds: int) -> dict[str, Any]:
    """Returns output tokens per second of mixes of requests, measured in turn."""
    free = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=1)
    people = {"type": "array", "items": PERSON, "minItems": 50}
    bound = SamplingParams(max_tokens=NUM_TOKENS, seed=1, structured_outputs=StructuredOutputs(json=people))
    mixes = {
        f"{2 * NUM_REQUESTS} unconstrained": [free] * 2 * NUM_REQUESTS,
        f"{NUM_REQUESTS} unconstrained, {NUM_REQUESTS} constrained": [free, bound] * NUM_REQUESTS,
        f"{2 * NUM_REQUESTS} constrained": [bound] * 2 * NUM_REQUESTS,
    }
    rates: dict[str, list[float]] = {name: [] for name in mixes}
    costs: dict[str, list[float]] = {name: [] for name in mixes}
    with LLM(max_model_len=512) as llm:
        for _ in range(num_rounds + 1):
            for name, params in mixes.items():
                prompts = [f"Person {i}: write about them." for i in range(len(params))]
                started, cpu_started = perf_counter(), process_time()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                seconds, cpu_seconds = perf_counter() - started, process_time() - cpu_started
                assert all(len(output.outputs[0].token_ids) == NUM_TOKENS for output in outputs)
                rates[name].append(len(params) * NUM_TOKENS / seconds)
                costs[name].append(1e3 * cpu_seconds / (len(params) * NUM_TOKENS))
    return {
        name: {
            "median_tokens_per_second": round(statistics.median(rates[name][1:]), 1),
            "median_cpu_milliseconds_per_token": round(statistics.median(costs[name][1:]), 3),
            "rounds_tokens_per_second": [round(rate, 1) for rate in rates[name][1:]],
            "rounds_cpu_milliseconds_per_token": [round(cost, 3) for cost in costs[name][1:]],
        }
        for name in mixes
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    checkpoint = open_checkpoint("smollm2")
    tokenizer, spec = load_tokenizer(checkpoint.text), checkpoint.spec
    grammars = Grammars(tokenizer, vocab_size=spec.vocab_size, eos_token_ids=spec.eos_token_ids)
    started = perf_counter()
    grammars.compile(StructuredOutputs(choice=["first"]))
    record: dict[str, Any] = {
        "command": "python benchmarks/structured.py",
        "commit": commit(),
        "llguidance": llguidance.__version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_average_before": os.getloadavg()[0],  # of other programs
        "vocabulary": spec.vocab_size,
        "first_grammar_seconds": round(perf_counter() - started, 3),  # includes reading the vocabulary
    }
    masks: dict[str, Any] = {}
    for kind in GRAMMARS:
        masks[kind] = {str(num): measure_masks(tokenizer, grammars, kind, num) for num in NUM_ROWS}
        print(kind, json.dumps(masks[kind]), flush=True)
    record["mask_milliseconds_by_grammar_and_rows"] = masks
    record["requests"] = measure_requests(given.rounds)
    print(json.dumps(record["requests"], indent=2))
    if given.json is not None:
        given.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
