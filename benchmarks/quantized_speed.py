"""Output tokens/s of a model shape with few sequences, for each format of its weights, on a GPU with random weights.

    python benchmarks/quantized_speed.py --json benchmarks/results/quantized-speed-h200.json

Each figure is the best of three rounds of 1, 4 or 16 sequences, 64 tokens in and 256 out, greedy, end of sequence
ignored.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from headrace import LLM, SamplingParams
from headrace.bench.engines.shapes import SHAPES, shape_directory

NUM_SEQS, PROMPT_LEN, OUTPUT_LEN, ROUNDS = (1, 4, 16), 64, 256, 3
FORMATS: dict[str, dict[str, Any]] = {"bf16": {}, "int4": {"quantization": "int4"}, "fp8": {"quantization": "fp8"}}
FORMATS["int8"] = {"quantization": "int8"}


def tokens_per_s(llm: LLM, num_seqs: int) -> float:
    generator = torch.Generator().manual_seed(num_seqs)
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    best = 0.0
    for _ in range(ROUNDS):
        ids = torch.randint(1000, 100_000, (num_seqs, PROMPT_LEN), generator=generator).tolist()
        started = time.perf_counter()
        llm.generate([{"prompt_token_ids": each} for each in ids], params)
        best = max(best, num_seqs * OUTPUT_LEN / (time.perf_counter() - started))
    return best


def measure(directory: str, name: str) -> dict[str, Any]:
    started = time.perf_counter()
    settings = {"load_format": "random", "max_model_len": 2048, "max_num_seqs": 16, **FORMATS[name]}
    with LLM(directory, **settings) as llm:
        found: dict[str, Any] = {"format": name, "ready_s": round(time.perf_counter() - started, 1)}
        found |= {f"{count} sequences": round(tokens_per_s(llm, count), 1) for count in NUM_SEQS}
    print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", choices=list(SHAPES))
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--commit", help="commit of the code, if git cannot tell")
    parser.add_argument("--json", type=Path, help="write the record here")
    given = parser.parse_args()
    record: dict[str, Any] = {"model": given.model, "commit": given.commit, "torch": torch.__version__}
    record |= {"gpu": torch.cuda.get_device_name(), "unit": "output tokens/s", "formats": []}
    with shape_directory(given.model) as directory:
        for name in given.formats:
            record["formats"].append(measure(str(directory), name))
            if given.json:
                given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
