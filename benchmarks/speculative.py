"""Speculative decoding: output tokens per second with and without drafts, interleaved, by the number of sequences.

    python benchmarks/speculative.py --json benchmarks/results/speculative-cpu.json
    python benchmarks/speculative.py --shape llama-3.1-8b --device cuda --rows --json ...

`edits` and `quotes` are greedy answers that repeat their prompt, `chat` are sampled ones that do not. With --rows the
model may have random weights, whose text says nothing: drafts are wrong on purpose, so each step gives one token, and
the time of a step with and without drafts is compared. From it follows the acceptance at which drafts pay.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter
from typing import Any

import numpy as np
from about import record_facts

from headrace import LLM, SamplingParams
from headrace.bench.engines.shapes import shape_directory

FUNCTIONS = [
    (
        "def {0}(values):\n    result = []\n    for value in values:\n        if value is not None:\n"
        "            result.append(value * {1})\n    return result\n"
    ),
    (
        "def {0}(path):\n    with open(path) as file:\n        lines = file.readlines()\n    total = {1}\n"
        "    for line in lines:\n        total += len(line.strip())\n    return total\n"
    ),
]
NOTES = [
    (
        "The {0} opened in {1} after four years of work. Visitors enter through the old gate, walk along the river and "
        "reach the main hall, where the first machines of the factory are shown. The director said that the hall "
        "will be open every day except Monday."
    ),
    (
        "The meeting of the {0} began at nine. The members agreed to repair the bridge before winter, to ask the city "
        "for {1} euros, and to meet again in the first week of March. Nobody voted against the plan."
    ),
]
NAMES = ["museum", "council", "library", "harbour", "school", "theatre", "market", "garden"]
TOPICS = ["a walk in the rain", "how bread is made", "why the sky is blue", "a day at sea", "the first train"]


def prompts(kind: str, num: int) -> list[str]:
    texts = {"edits": FUNCTIONS, "quotes": NOTES, "chat": ["Tell a story about {0} and the {1}."]}[kind]
    asks = {
        "edits": "Rename the function below to new_name and write the whole function again.\n\n",
        "quotes": "Repeat the text below word for word, then name its topic.\n\n",
        "chat": "",
    }
    names = [[TOPICS[i % len(TOPICS)], NAMES[i % len(NAMES)]] if kind == "chat" else [NAMES[i % len(NAMES)], str(i + 2)]
             for i in range(num)]  # fmt: skip
    return [asks[kind] + texts[i % len(texts)].format(*names[i]) for i in range(num)]


def measure(llm: LLM, kind: str, num_seqs: int, num_tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0.8, "seed": 1} if kind == "chat" else {"temperature": 0}
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **sampling)
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts(kind, num_seqs)]
    before = llm.stats.scheduler
    started = perf_counter()
    outputs = llm.chat(messages, params, use_tqdm=False)
    seconds = perf_counter() - started
    after = llm.stats.scheduler
    drafted = after.num_draft_tokens - before.num_draft_tokens
    return {
        "tokens_per_s": num_seqs * num_tokens / seconds,
        "steps": after.num_steps - before.num_steps,
        "drafted": drafted,
        "accepted": after.num_accepted_tokens - before.num_accepted_tokens,
        "answers": [output.outputs[0].token_ids for output in outputs],
    }


def compare(engines: dict[str, LLM], given: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each kind of text and number of sequences, with the median over the rounds."""
    rows = []
    for kind in given.kinds.split(","):
        for num_seqs in map(int, given.sizes.split(",")):
            if monotonic() > given.until:
                return rows
            num_tokens = given.tokens if num_seqs <= 16 else given.tokens // 4
            rounds = [
                {name: measure(llm, kind, num_seqs, num_tokens) for name, llm in engines.items()}
                for _ in range(given.rounds)
            ]
            rows += [_row(kind, num_seqs, name, rounds) for name in engines]
            for row in rows[-len(engines) :]:
                print(_line(row), flush=True)
    return rows


def _row(kind: str, num_seqs: int, name: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    ratios = [each[name]["tokens_per_s"] / each["off"]["tokens_per_s"] for each in rounds]
    last = rounds[-1]
    equal = [a == b for a, b in zip(last[name]["answers"], last["off"]["answers"], strict=True)]
    return {
        "text": kind,
        "num_seqs": num_seqs,
        "method": name,
        "tokens_per_s": [round(each[name]["tokens_per_s"], 1) for each in rounds],
        "times_off": round(median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "steps": last[name]["steps"],
        "drafted": last[name]["drafted"],
        "accepted": last[name]["accepted"],
        "equal_answers": sum(equal),
    }


def _line(row: dict[str, Any]) -> str:
    share = row["accepted"] / row["drafted"] if row["drafted"] else 0.0
    rate = f"{median(row['tokens_per_s']):8.1f} tokens/s  x {row['times_off']:.2f}"
    return f"{row['text']:7} {row['num_seqs']:4}  {row['method']:11} {rate}  {share:4.0%} of {row['drafted']} accepted"


def compare_rows(engines: dict[str, LLM], given: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of a step of one token each, and of one with wrong drafts."""
    rows = []
    rng = np.random.default_rng(0)
    for num_seqs in map(int, given.sizes.split(",")):
        tokens = [rng.integers(10, 5000, given.context).tolist() for _ in range(num_seqs)]
        params = SamplingParams(max_tokens=given.tokens, temperature=0, ignore_eos=True)
        milliseconds: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(given.rounds + 1):
            for name, llm in engines.items():
                before, started = llm.stats.scheduler, perf_counter()
                llm.generate(tokens, params, use_tqdm=False)
                seconds, after = perf_counter() - started, llm.stats.scheduler
                milliseconds[name].append(1e3 * seconds / (after.num_steps - before.num_steps))
        for name, llm in engines.items():
            ratio = median(milliseconds[name][1:]) / median(milliseconds["off"][1:])
            stats = llm.stats.scheduler
            rows.append({"num_seqs": num_seqs, "method": name, "step_ms": milliseconds[name][1:], "times_off": ratio})
            rows[-1] |= {"drafted": stats.num_draft_tokens, "accepted": stats.num_accepted_tokens}
            print(f"{num_seqs:4} {name:11} {median(milliseconds[name][1:]):7.3f} ms  x {ratio:.3f}  {rows[-1]}"[:150])
    return rows


def _draft_wrongly(llm: LLM, num_tokens: int) -> None:
    """Let every step of every sequence have `num_tokens` drafts that are not accepted."""
    drafting = llm._engine.client._core._scheduler.drafting  # type: ignore[attr-defined]
    drafting.look_up = lambda tokens, wanted: np.full(wanted, 3, np.int32)
    drafting._lens = lambda slots: np.full(
        len(slots), num_tokens if len(slots) <= drafting._speculation.max_seqs else 0
    )
    drafting._pays = lambda slots, lens: bool(lens.any())


@contextlib.contextmanager
def started(given: argparse.Namespace) -> Iterator[dict[str, LLM]]:
    configs: dict[str, dict[str, Any] | None] = {"off": None}
    for name in given.methods.split(","):
        configs[name] = {"method": name, "num_speculative_tokens": given.drafts}
        if name == "early_exit":
            configs[name] = {**configs[name], "num_layers": given.layers}  # type: ignore[dict-item]
    settings: dict[str, Any] = {"device": given.device, "max_model_len": 2048, "kv_cache_memory_bytes": given.cache}
    settings["max_num_seqs"] = given.max_num_seqs
    with contextlib.ExitStack() as stack:
        model = given.model
        if given.shape:
            model = str(stack.enter_context(shape_directory(given.shape)))
            settings |= {"load_format": "random"}
        engines = {
            name: stack.enter_context(LLM(model, speculative_config=config, **settings))
            for name, config in configs.items()
        }
        if given.rows:
            for name, llm in engines.items():
                if name != "off":
                    _draft_wrongly(llm, given.drafts)
        yield engines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--shape", help="a shape of bench, with random weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", default="ngram")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--layers", type=int, default=15, help="of early_exit")
    parser.add_argument("--sizes", default="1,2,4,8")
    parser.add_argument("--kinds", default="edits,quotes,chat")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--context", type=int, default=512, help="of --rows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=int, default=2 << 30)
    parser.add_argument("--max-num-seqs", type=int, help="default: the engine's choice")
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--seconds", type=float, default=280.0, help="start no further row after this")
    parser.add_argument("--json", help="write the record here")
    given = parser.parse_args()
    given.until = monotonic() + given.seconds
    with started(given) as engines:
        if not given.rows:
            for llm in engines.values():
                measure(llm, "edits", 1, 8)  # compiles kernels
        rows = compare_rows(engines, given) if given.rows else compare(engines, given)
    if given.json:
        record = {
            **record_facts(),
            "rows": rows,
        }
        Path(given.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
