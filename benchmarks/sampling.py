"""What sampling costs, and whether rows with features slow down rows without.

Usage: python benchmarks/sampling.py [--device cuda] [--seconds 2] [--threads 1] [--output results.json]

A batch of rows samples from the same logits, with features on for none, one, half or all rows. Sampling one row with a
feature among many without should cost what the batch costs without features, plus that row's own feature.

On a GPU the logits are first in bfloat16, as in the decode graphs, and then in float32, as for rows with more than
filters. Only the GPU's work is timed: the GPU is kept busy until the host has launched all of it.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from about import commit, cpu_name

from headrace.sampling import Sampler
from headrace.types import SamplingParams

PROMPT_LEN, ANSWER_LEN = 512, 256
FEATURES: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 50},
    "top_k_and_top_p": {"top_k": 50, "top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "presence_and_frequency_penalty": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": dict.fromkeys(range(0, 3000, 10), 1.0)},
    "allowed_token_ids": {"allowed_token_ids": list(range(0, 40_000, 2))},
    "bad_words": {"bad_words_token_ids": [[token, token + 1] for token in range(64)]},
    "logprobs": {"logprobs": 5},
}


@dataclass(frozen=True)
class Shape:
    """The batch of logits."""

    rows: int
    vocabulary: int
    dtype: torch.dtype
    prompt: int = PROMPT_LEN
    answer: int = ANSWER_LEN


SHAPES = {
    "cpu": (Shape(64, 49_152, torch.float32),),
    "cuda": (Shape(1000, 128_256, torch.bfloat16), Shape(1000, 128_256, torch.float32)),
}
_WARM_UPS = 3  # calls that compile kernels and fill caches, and are not timed
_BUSY_CYCLES = 6_000_000  # some 3 ms, in which the host launches the kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=SHAPES)
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each number")
    parser.add_argument("--threads", type=int, default=1, help="default 1, which other load disturbs least")
    parser.add_argument("--commit", help="commit of the record; default: asked from git")
    parser.add_argument("--output", type=Path, help="where to write the record")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    tables = [{"shape": described(shape), **measured(shape, given)} for shape in SHAPES[given.device]]
    if given.output is not None:
        record = {
            "command": f"python benchmarks/sampling.py --device {given.device}",
            "commit": given.commit or commit(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": cpu_name() if given.device == "cpu" else torch.cuda.get_device_name(),
            "threads": torch.get_num_threads(),
            "tables": tables,
        }
        given.output.write_text(json.dumps(record, indent=2) + "\n")


def described(shape: Shape) -> dict[str, Any]:
    return {**asdict(shape), "dtype": str(shape.dtype).removeprefix("torch.")}


def measured(shape: Shape, given: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """Measures every feature, on for none, one, half and all of the rows."""
    batch = LogitsBatch(shape, given.device)
    counts = (1, shape.rows // 2, shape.rows)
    table: dict[str, dict[str, float]] = {}
    dtype = described(shape)["dtype"]
    print(f"{shape.rows} rows of {shape.vocabulary:,} in {dtype}, milliseconds; features on for so many rows:")
    print(f"{'':<32}{'none':>8}" + "".join(f"{num:>8}" for num in counts))
    for name, settings in FEATURES.items():
        found = {"none": batch.measure({}, 0, given.seconds)}
        found |= {str(num): batch.measure(settings, num, given.seconds) for num in counts}
        table[name] = {num: round(milliseconds, 3) for num, milliseconds in found.items()}
        print(f"{name:<32}" + "".join(f"{value:8.3f}" for value in table[name].values()), flush=True)
    return {"milliseconds_by_feature_and_rows_that_use_it": table}


class LogitsBatch:
    """A batch of logits and the tokens before them, sampled from repeatedly."""

    def __init__(self, shape: Shape, device: str) -> None:
        self._shape, self._device = shape, device
        self._logits = (torch.randn(shape.rows, shape.vocabulary, device=device) * 3).to(shape.dtype)
        size = (shape.rows, shape.prompt + shape.answer)
        self._tokens = torch.randint(0, shape.vocabulary, size, dtype=torch.int32, device=device)

    def measure(self, settings: dict[str, Any], num: int, seconds: float) -> float:
        """Returns the minimum time in ms to sample all rows, the first `num` of which use the feature."""
        shape = self._shape
        sampler = Sampler(shape.rows, shape.vocabulary, self._device, tokens=self._tokens)
        for slot in range(shape.rows):
            params = SamplingParams(**(settings if slot < num else {}), max_tokens=None)
            sampler.enter_slot(slot, params, seed=slot, prompt_len=shape.prompt, end_len=10**6, stop_token_ids=())
        host_slots, host_lens = np.arange(shape.rows), np.full(shape.rows, shape.prompt + shape.answer)
        slots = torch.arange(shape.rows, device=self._device)
        lens = torch.full((shape.rows,), shape.prompt + shape.answer, device=self._device)

        def timed() -> float:
            run = partial(sampler.sample, self._logits.clone(), slots, lens, host_slots=host_slots, host_lens=host_lens)
            return self._timed(run)

        for _ in range(_WARM_UPS):
            timed()
        best, end = timed(), time.perf_counter() + seconds
        while time.perf_counter() < end:
            best = min(best, timed())
        return best

    def _timed(self, run: Callable[[], object]) -> float:
        """Returns the time in ms; on a GPU from the start of the first kernel to the end of the last."""
        if self._device == "cpu":
            start = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - start)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_BUSY_CYCLES)
        first.record()
        run()
        last.record()
        last.synchronize()
        return first.elapsed_time(last)


if __name__ == "__main__":
    main()
