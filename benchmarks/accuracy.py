"""How far a GPU's answers are from the CPU's, and FP8 from bfloat16, on a real model.

    python benchmarks/accuracy.py --write reference.json        # on a CPU, in float32
    python benchmarks/accuracy.py --reference reference.json --json benchmarks/results/accuracy.json     # on a GPU

Greedy answers of 64 tokens to 100 chat prompts: how many tokens agree until the two answers diverge, and how much less
likely the GPU's token is there, according to the CPU's logits. Perplexity on the texts of Python's own help topics,
read through the cache, in windows of 1,024 tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import pydoc_data.topics
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from about import commit

from headrace import LLM, SamplingParams
from headrace.bench.workloads import WorkloadSpec, build
from headrace.kernels import ops
from headrace.kernels.layout import StepLayout
from headrace.models import Decoder, load_decoder, open_checkpoint
from headrace.runner.gpu.tiles import tiles_of
from headrace.text import load_tokenizer

NUM_PROMPTS, NUM_TOKENS, NUM_TOP = 100, 64, 20
WINDOW, NUM_WINDOWS, BLOCK_SIZE = 1024, 8, 16
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=NUM_TOP)
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16, cache in fp8": {"kv_cache_dtype": "fp8"},
    "fp8, cache in bf16": {"quantization": "fp8"},
    "fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}


def answers(model: str, **settings: Any) -> list[dict[str, Any]]:
    with LLM(model, max_model_len=2048, **settings) as llm:
        outputs = llm.chat(
            [request.messages for request in build(WorkloadSpec(name="uniform", num_requests=NUM_PROMPTS)).requests],
            GREEDY,
            use_tqdm=False,
        )
    return [
        {
            "tokens": [int(token) for token in output.outputs[0].token_ids],
            "top": [
                {
                    str(t): round(float(value), 4)
                    for t, value in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
                }
                for entry in output.outputs[0].logprobs or []
            ],
        }
        for output in outputs
    ]


def agreement(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the tokens until two answers diverge, and by how much the log-probabilities of `theirs` differ there."""
    same, gaps, num_outside = [], [], 0
    for mine, other in zip(ours, theirs, strict=True):
        pairs = zip(mine["tokens"], other["tokens"], strict=True)
        parted = next((index for index, (one, two) in enumerate(pairs) if one != two), None)
        same.append(NUM_TOKENS if parted is None else parted)
        if parted is not None:
            top = other["top"][parted]
            chosen = top.get(str(mine["tokens"][parted]))
            if chosen is None:
                num_outside += 1
            else:
                gaps.append(max(top.values()) - chosen)
    return {
        "identical_answers": sum(count == NUM_TOKENS for count in same),
        "tokens_until_they_part": round(float(np.mean(same)), 1),
        "largest_gap_where_they_part": round(max(gaps, default=0.0), 3),
        "median_gap_where_they_part": round(float(np.median(gaps)) if gaps else 0.0, 3),
        "parted_outside_the_top_20": num_outside,
    }


def perplexity(decoder: Decoder, token_ids: np.ndarray, kv_dtype: torch.dtype) -> float:
    """Computes the perplexity with keys and values read back from the cache, whatever its type."""
    total = 0.0
    for window in token_ids[: NUM_WINDOWS * WINDOW].reshape(NUM_WINDOWS, WINDOW):
        ids = torch.from_numpy(window.astype(np.int32)).to(decoder.device)
        layout, caches = whole_prompt(decoder, kv_dtype)
        with torch.inference_mode():
            logits = decoder.logits(decoder.hidden(ids, layout, caches)[:-1]).float()
            chosen = torch.log_softmax(logits, -1).gather(1, ids[1:].long()[:, None])
        total -= float(chosen.mean())
    return math.exp(total / NUM_WINDOWS)


def whole_prompt(decoder: Decoder, kv_dtype: torch.dtype) -> tuple[StepLayout, list[ops.LayerCache]]:
    device, num_blocks = decoder.device, WINDOW // BLOCK_SIZE
    positions = torch.arange(WINDOW, device=device)
    layout = StepLayout(
        positions=positions,
        slot_mapping=positions.clone(),
        query_starts=torch.tensor([0, WINDOW], dtype=torch.int32, device=device),
        context_lens=torch.tensor([WINDOW], dtype=torch.int32, device=device),
        slots=torch.zeros(1, dtype=torch.int32, device=device),
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
        max_query_len=WINDOW,
        max_context_len=WINDOW,
        tiles=torch.from_numpy(tiles_of(np.array([WINDOW]), 0)[0].copy()).to(device, torch.int32),
    )
    return layout, decoder.allocate_caches(num_blocks, BLOCK_SIZE, kv_dtype, num_slots=1)


def text() -> str:
    """The texts of Python's help topics."""
    return "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))


def measure_perplexity(model: str, device: str, **settings: Any) -> float:
    checkpoint = open_checkpoint(model)
    token_ids = np.asarray(load_tokenizer(checkpoint.text).encode(text()[:80_000]))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    decoder = load_decoder(checkpoint, dtype=dtype, device=device, quantization=settings.get("quantization"))
    return perplexity(decoder, token_ids, torch.float8_e4m3fn if "kv_cache_dtype" in settings else dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--write", type=Path, help="write the CPU's answers here, and exit")
    parser.add_argument("--reference", type=Path, help="answers written by --write; default: compute them now")
    parser.add_argument("--perplexity-only", action="store_true", help="compare no answers")
    parser.add_argument("--commit", help="commit of the code, if git cannot tell")
    parser.add_argument("--json", type=Path, help="write the record here")
    arguments = parser.parse_args()
    if arguments.write:
        arguments.write.write_text(json.dumps(answers(arguments.model, device="cpu")))
        return
    read, skips = arguments.reference, arguments.perplexity_only
    reference = json.loads(read.read_text()) if read else [] if skips else answers(arguments.model, device="cpu")
    on_cpu = round(measure_perplexity(arguments.model, "cpu"), 4)
    record: dict[str, Any] = {"model": arguments.model, "perplexity": {"cpu, float32": on_cpu}}
    print(record, flush=True)
    in_bf16: list[dict[str, Any]] = []
    for name, settings in VARIANTS.items():
        record["perplexity"][name] = round(measure_perplexity(arguments.model, "cuda", **settings), 4)
        if skips:
            print(name, record["perplexity"][name], flush=True)
            continue
        ours = answers(arguments.model, device="cuda", dtype="bfloat16", **settings)
        in_bf16 = in_bf16 or ours
        record[name] = {"against the CPU": agreement(ours, reference), "against bf16": agreement(ours, in_bf16)}
        print(name, record["perplexity"][name], record[name], flush=True)
    record |= {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": "python benchmarks/accuracy.py " + " ".join(sys.argv[1:]),
        "commit": arguments.commit or commit(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
