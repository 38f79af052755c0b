"""What a draw costs on a CPU, and whether rows with features slow down those without.

Usage: python benchmarks/sampling_cpu.py [--seconds 2] [--threads 1] [--output results.json]

A batch of rows draws from the same logits, its features on for none, one, half or all of them. Sampling one row with a
feature beside many without should cost what the batch costs without features, and that row's own feature.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from headrace.sampling import Sampler
from headrace.types import SamplingParams

NUM_ROWS, VOCAB_SIZE, PROMPT_LEN, ANSWER_LEN = 64, 49_152, 512, 256
USERS = (1, NUM_ROWS // 2, NUM_ROWS)
FEATURES: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 50},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "presence_and_frequency_penalty": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": dict.fromkeys(range(0, 3000, 10), 1.0)},
    "allowed_token_ids": {"allowed_token_ids": list(range(0, VOCAB_SIZE, 2))},
    "bad_words": {"bad_words_token_ids": [[token, token + 1] for token in range(64)]},
    "logprobs": {"logprobs": 5},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each number")
    parser.add_argument("--threads", type=int, default=1, help="one unless set: what others run disturbs it least")
    parser.add_argument("--output", type=Path, help="where to write the record")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    logits = torch.randn(NUM_ROWS, VOCAB_SIZE) * 3
    tokens = torch.randint(0, VOCAB_SIZE, (NUM_ROWS, PROMPT_LEN + ANSWER_LEN), dtype=torch.int32)
    rows: dict[str, dict[str, float]] = {}
    print(f"{NUM_ROWS} rows of {VOCAB_SIZE:,}, milliseconds; features on for so many rows:")
    print(f"{'':<32}{'none':>8}" + "".join(f"{num:>8}" for num in USERS))
    for name, settings in FEATURES.items():
        found = {"none": measure(logits, tokens, {}, 0, given.seconds)}
        found |= {str(num): measure(logits, tokens, settings, num, given.seconds) for num in USERS}
        rows[name] = {num: round(1e3 * seconds, 2) for num, seconds in found.items()}
        print(f"{name:<32}" + "".join(f"{value:8.2f}" for value in rows[name].values()))
    if given.output is not None:
        record = {
            "command": "python benchmarks/sampling_cpu.py",
            "commit": commit(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cpu": cpu_name(),
            "threads": torch.get_num_threads(),
            "shape": {"rows": NUM_ROWS, "vocabulary": VOCAB_SIZE, "prompt": PROMPT_LEN, "answer": ANSWER_LEN},
            "milliseconds_by_feature_and_rows_that_use_it": rows,
        }
        given.output.write_text(json.dumps(record, indent=2) + "\n")


def measure(logits: torch.Tensor, tokens: torch.Tensor, settings: dict[str, Any], num: int, seconds: float) -> float:
    """The least time of a draw of all rows, the first `num` of which use the feature."""
    sampler = Sampler(NUM_ROWS, VOCAB_SIZE, tokens=tokens)
    for row in range(NUM_ROWS):
        params = SamplingParams(**(settings if row < num else {}), max_tokens=None)
        sampler.admit(row, params, seed=row, prompt_len=PROMPT_LEN, end_len=10**6, stop_token_ids=())
    rows, lens = torch.arange(NUM_ROWS), torch.full((NUM_ROWS,), PROMPT_LEN + ANSWER_LEN)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or best == float("inf"):
        fresh = logits.clone()
        start = time.perf_counter()
        sampler.sample(fresh, rows, lens)
        best = min(best, time.perf_counter() - start)
    return best


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
