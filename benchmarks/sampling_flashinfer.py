"""Compares the sampling kernels with FlashInfer's: 1,000 rows of 128,256 logits, in bfloat16 and in float32.

Usage: PYTHONPATH=src:FOLDER_WITH_FLASHINFER python benchmarks/sampling_flashinfer.py [--output results.json]

Every case has per-row parameters, as a batch of requests has them (FlashInfer's faster way for one top_k of all rows is
a case of its own, marked "one k"). What is timed is the GPU's work between two events; the GPU is kept busy until the
host has launched all of it, and a case in which that failed is marked "host-bound". Ours and FlashInfer's runs are
interleaved. FlashInfer samples from probabilities in float32; its softmax is part of the time, as our kernels start
from logits too.

Then each way samples many times from one row, and the tokens are compared with the exact distribution (float64,
sorted): how many lie outside of the kept set, and the largest deviation over groups of tokens of equal probability, in
standard deviations.

Without FlashInfer, or if a case of it fails, the reason is printed and recorded, and the rest is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

# FlashInfer looks at these when it is imported.
os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", tempfile.mkdtemp(prefix="flashinfer-"))

import numpy as np
import torch
from about import commit
from torch import Tensor

from headrace.sampling import Sampler
from headrace.types import SamplingParams

DEVICE = "cuda"
ROWS, VOCABULARY = 1000, 128_256
TOP_K, TOP_P, MIN_P = 50, 0.9, 0.05
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "top_k": {"top_k": TOP_K},
    "top_p": {"top_p": TOP_P},
    "top_k_and_top_p": {"top_k": TOP_K, "top_p": TOP_P},
    "min_p": {"min_p": MIN_P},
}
WARM_UPS = 5
BUSY_CYCLES = 20_000_000  # some 10 ms, in which the host launches a case
GROUPS = 64  # of tokens of equal probability together
ROUNDS_OF_SAMPLES = 200  # of ROWS samples each

Sample = Callable[[Tensor], Tensor]  # tokens [R] of logits [R, V]


# ---- ours


class Ours:
    """The calls of benchmarks/sampling.py."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._sampler = Sampler(ROWS, VOCABULARY, DEVICE)
        for row in range(ROWS):
            params = SamplingParams(**settings, max_tokens=None)
            self._sampler.enter_slot(row, params, seed=row, prompt_len=512, end_len=10**6, stop_token_ids=())
        self._host_slots = np.arange(ROWS)
        self._slots = torch.arange(ROWS, device=DEVICE)
        self._length = 768

    def __call__(self, logits: Tensor) -> Tensor:
        self._length += 1  # another random number of each row
        lens = self._lens(self._length)
        host_lens = np.full(ROWS, self._length)
        return self._sampler.sample(logits, self._slots, lens, host_slots=self._host_slots, host_lens=host_lens).tokens

    def _lens(self, length: int) -> Tensor:
        return torch.full((ROWS,), length, device=DEVICE)


def our_kernels(settings: dict[str, Any]) -> Sample:
    """Without what the sampler does beside them: the checks for the end of a sequence."""
    from headrace.kernels.gpu.sample import sample as launch_sample
    from headrace.kernels.gpu.threshold_types import Filters

    def column(name: str, neutral: float, dtype: torch.dtype) -> Tensor:
        return torch.full((ROWS,), settings.get(name, neutral), dtype=dtype, device=DEVICE)

    filters = Filters(
        min_p=column("min_p", 0.0, torch.float64),
        top_k=column("top_k", 0, torch.int64),
        top_p=column("top_p", 1.0, torch.float64),
    )
    rows = torch.arange(ROWS, device=DEVICE)
    lens = torch.full((ROWS,), 768, device=DEVICE)
    temperature = torch.ones(ROWS, dtype=torch.float64, device=DEVICE)
    seed = torch.arange(ROWS, device=DEVICE)
    tokens = torch.empty(ROWS, dtype=torch.int64, device=DEVICE)
    flags = torch.empty(ROWS, dtype=torch.uint8, device=DEVICE)

    def sample(logits: Tensor) -> Tensor:
        lens.add_(1)
        launch_sample(logits, rows, lens, temperature, seed, tokens, flags, filters if settings else None)
        return tokens

    return sample


# ---- FlashInfer's


def flashinfer_cases(*, with_cake: bool) -> dict[str, dict[str, Sample]]:
    """By case, by name of the way. The first one named is the one with parameters of each row's own."""
    from flashinfer import sampling

    top_k = torch.full((ROWS,), TOP_K, dtype=torch.int32, device=DEVICE)
    top_p = torch.full((ROWS,), TOP_P, dtype=torch.float32, device=DEVICE)
    min_p = torch.full((ROWS,), MIN_P, dtype=torch.float32, device=DEVICE)
    heat = torch.ones(ROWS, dtype=torch.float32, device=DEVICE)

    def probabilities(logits: Tensor) -> Tensor:
        return sampling.softmax(logits, temperature=heat)

    def both_of_logits(logits: Tensor, k: Any) -> Tensor:
        return sampling.top_k_top_p_sampling_from_logits(logits.float(), k, top_p, filter_apply_order="top_k_first")

    cases: dict[str, dict[str, Sample]] = {
        "none": {
            "softmax, sampling_from_probs": lambda x: sampling.sampling_from_probs(probabilities(x)),
            "sampling_from_logits": lambda x: sampling.sampling_from_logits(x.float()),
        },
        "top_k": {
            "softmax, top_k_sampling_from_probs": lambda x: sampling.top_k_sampling_from_probs(probabilities(x), top_k),
            "softmax, top_k_renorm_probs (no sampling)": lambda x: sampling.top_k_renorm_probs(probabilities(x), top_k),
        },
        "top_p": {
            "softmax, top_p_sampling_from_probs": lambda x: sampling.top_p_sampling_from_probs(probabilities(x), top_p),
            "softmax, top_p_renorm_probs (no sampling)": lambda x: sampling.top_p_renorm_probs(probabilities(x), top_p),
        },
        "top_k_and_top_p": {
            "top_k_top_p_sampling_from_logits": lambda x: both_of_logits(x, top_k),
            "softmax, top_k_top_p_sampling_from_probs, joint": lambda x: sampling.top_k_top_p_sampling_from_probs(
                probabilities(x), top_k, top_p, filter_apply_order="joint"
            ),
            "top_k_top_p_sampling_from_logits, one k": lambda x: both_of_logits(x, TOP_K),
        },
        "min_p": {
            "softmax, min_p_sampling_from_probs": lambda x: sampling.min_p_sampling_from_probs(probabilities(x), min_p),
        },
    }
    if with_cake:
        from flashinfer import cake_sampling

        ones = torch.ones(ROWS, dtype=torch.float32, device=DEVICE)

        def fused(logits: Tensor, p: Tensor) -> Tensor:
            return cake_sampling.top_k_top_p_sampling_from_probs(probabilities(logits), top_k, p, top_k_max=TOP_K)

        cases["top_k"]["softmax, cake_sampling"] = lambda x: fused(x, ones)
        cases["top_k_and_top_p"]["softmax, cake_sampling"] = lambda x: fused(x, top_p)
    return cases


# ---- timed


def timed(sample: Sample, logits: Tensor) -> tuple[float, bool]:
    """Milliseconds from the first kernel's start to the last one's end, and whether the host kept up."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    given = logits.clone()
    torch.cuda._sleep(BUSY_CYCLES)
    first.record()
    sample(given)
    last.record()
    is_hidden = not first.query()
    last.synchronize()
    return first.elapsed_time(last), is_hidden


def measure(ways: dict[str, Sample], logits: Tensor, repeats: int) -> dict[str, Any]:
    """Every way in turn, again and again."""
    results: dict[str, Any] = {}
    working = {}
    for name, sample in ways.items():
        try:
            for _ in range(WARM_UPS):
                timed(sample, logits)
            working[name] = sample
        except Exception as error:  # noqa: BLE001  one way that fails is a result, and no reason to lose the others
            results[name] = {"failed": reason(error)}
    times: dict[str, list[float]] = {name: [] for name in working}
    hidden: dict[str, bool] = dict.fromkeys(working, True)
    for _ in range(repeats):
        for name, sample in working.items():
            took, is_hidden = timed(sample, logits)
            times[name].append(took)
            hidden[name] &= is_hidden
    for name, raw in times.items():
        results[name] = {
            "median_ms": round(median(raw), 4),
            "min_ms": round(min(raw), 4),
            "host_bound": not hidden[name],
            "raw_ms": [round(value, 4) for value in raw],
        }
    return results


# ---- compared


def exact(row: Tensor, settings: dict[str, Any]) -> Tensor:
    """The probabilities [V] that a row is to be sampled with, in float64: min_p, then top_k, then top_p."""
    probs = torch.softmax(row.double(), -1)
    if "min_p" in settings:
        probs = torch.where(probs >= settings["min_p"] * probs.max(), probs, 0.0)
    order = torch.argsort(probs, descending=True, stable=True)
    if "top_k" in settings:
        probs[order[settings["top_k"] :]] = 0.0
    probs = probs / probs.sum()
    if "top_p" in settings:
        running = torch.cumsum(probs[order], 0) - probs[order]
        probs[order[running >= settings["top_p"]]] = 0.0
    return probs / probs.sum()


def compare(sample: Sample, row: Tensor, settings: dict[str, Any]) -> dict[str, Any]:
    logits = row.expand(ROWS, -1).contiguous()
    counts = torch.zeros(VOCABULARY, dtype=torch.float64, device=DEVICE)
    for _ in range(ROUNDS_OF_SAMPLES):
        tokens = sample(logits.clone()).long()
        counts += torch.bincount(tokens, minlength=VOCABULARY)
    probs = exact(row, settings)
    order = torch.argsort(probs, descending=True, stable=True)
    running = torch.cumsum(probs[order], 0)
    groups = torch.clamp((running * GROUPS).long(), max=GROUPS - 1)
    total = counts.sum()
    expected = torch.zeros(GROUPS, dtype=torch.float64, device=DEVICE).index_add_(0, groups, probs[order]) * total
    found = torch.zeros(GROUPS, dtype=torch.float64, device=DEVICE).index_add_(0, groups, counts[order])
    spread = torch.sqrt(expected * (1 - expected / total)).clamp(min=1.0)
    outside = counts[probs == 0]
    return {
        "samples": int(total),
        "kept_tokens": int((probs > 0).sum()),
        "outside_of_the_kept_set": int(outside.sum()),
        "kinds_outside": int((outside > 0).sum()),
        "largest_deviation_in_standard_deviations": round(float(((found - expected).abs() / spread).max()), 2),
    }


def compare_all(ways: dict[str, Sample], row: Tensor, settings: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, sample in ways.items():
        if "renorm" in name or ("joint" in name):
            continue  # gives no tokens; or means another distribution: top_p of all probabilities
        try:
            found[name] = compare(sample, row, settings)
        except Exception as error:  # noqa: BLE001  see above
            found[name] = {"failed": reason(error)}
    return found


def reason(error: Exception) -> str:
    return "".join(traceback.format_exception(error))[-1500:]


# ---- all of it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--cake", action="store_true", help="also its cake_sampling, which takes long to compile")
    parser.add_argument("--commit", help="that of the record; asked of git unless given")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    theirs: dict[str, dict[str, Sample]] = {}
    failure = None
    try:
        import flashinfer

        theirs = flashinfer_cases(with_cake=args.cake)
        print(f"FlashInfer {flashinfer.__version__} from {Path(flashinfer.__file__).parent.name}", flush=True)
    except Exception as error:  # noqa: BLE001  then only ours is measured
        failure = reason(error)
        print(f"FlashInfer cannot be used:\n{failure}", flush=True)
    tables = []
    for dtype in (torch.bfloat16, torch.float32):
        logits = (torch.randn(ROWS, VOCABULARY, device=DEVICE) * 3).to(dtype)
        table: dict[str, Any] = {}
        for case, settings in CASES.items():
            ways: dict[str, Sample] = {"headrace, Sampler": Ours(settings)}
            try:
                ways["headrace, kernels"] = our_kernels(settings)
            except ImportError as error:
                print(f"the kernels have moved: {error}")
            ways |= {f"flashinfer, {name}": sample for name, sample in theirs.get(case, {}).items()}
            table[case] = {
                "times": measure(ways, logits, args.repeats),
                "distribution": compare_all(ways, logits[0], settings),
            }
            show(str(dtype).removeprefix("torch."), case, table[case])
            write(args, [*tables, {"dtype": str(dtype).removeprefix("torch."), "cases": table}], failure)
        tables.append({"dtype": str(dtype).removeprefix("torch."), "cases": table})
    write(args, tables, failure)


def show(dtype: str, case: str, found: dict[str, Any]) -> None:
    print(f"{dtype}, {case}, milliseconds (median, least); samples outside of the kept set; largest deviation")
    for name, result in found["times"].items():
        if "failed" in result:
            print(f"    {name:<60} failed: {result['failed'].strip().splitlines()[-1]}", flush=True)
            continue
        compared = found["distribution"].get(name, {})
        outside = compared.get("outside_of_the_kept_set", "")
        deviation = compared.get("largest_deviation_in_standard_deviations", "")
        mark = "  host-bound" if result["host_bound"] else ""
        print(f"    {name:<60}{result['median_ms']:8.3f}{result['min_ms']:8.3f}  {outside!s:>8}{deviation!s:>8}{mark}")
    sys.stdout.flush()


def write(args: argparse.Namespace, tables: list[dict[str, Any]], failure: str | None) -> None:
    """After each case: what was measured is kept if a later case takes too long."""
    if args.output is None:
        return
    import triton

    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    if failure is None:
        import flashinfer

        versions["flashinfer"] = flashinfer.__version__
    record = {
        "command": "python benchmarks/sampling_flashinfer.py",
        "commit": args.commit or commit(),
        "versions": versions,
        "device": torch.cuda.get_device_name(),
        "rows": ROWS,
        "vocabulary": VOCABULARY,
        "settings": CASES,
        "flashinfer_failed": failure,
        "tables": tables,
    }
    args.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
