"""LoRA adapters: output tokens per second with 0, 1 and 16 adapters in the batch, interleaved.

    python benchmarks/adapters.py --json benchmarks/results/adapters-cpu.json
    python benchmarks/adapters.py --shape llama-3.1-8b --device cuda --sizes 1,16,256 --json ...

`off` is an engine without adapters. `0`, `1` and `16` are one engine with room for 16, whose requests have no adapter,
all the same one, or one of 16 in turn. Adapters are random and have all seven matrices of each layer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from about import record_facts
from safetensors.torch import save_file

from headrace import LLM, LoRARequest, SamplingParams
from headrace.bench.engines.shapes import shape_directory
from headrace.models.adapter_spec import is_adapted
from headrace.models.spec import ModelSpec

KINDS = {"off": 0, "0": 0, "1": 1, "16": 16}


def save_adapter(directory: Path, spec: ModelSpec, rank: int, seed: int) -> None:
    random, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in spec.tensor_shapes().items():
        if is_adapted(name) and name.endswith(".weight"):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, shape[1], generator=random).bfloat16() * 0.02
            tensors[f"{stem}.lora_B.weight"] = torch.randn(shape[0], rank, generator=random).bfloat16() * 0.02
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def measure(llm: LLM, adapters: list[LoRARequest], num_seqs: int, given: argparse.Namespace) -> float:
    """Output tokens per second, prefill included."""
    random = np.random.default_rng(num_seqs)
    prompts = [random.integers(10, 5000, given.context).tolist() for _ in range(num_seqs)]
    chosen = [adapters[index % len(adapters)] if adapters else None for index in range(num_seqs)]
    params = SamplingParams(max_tokens=given.tokens, temperature=0, ignore_eos=True)
    llm.forget_prefixes()
    started = perf_counter()
    llm.generate(prompts, params, lora_request=chosen, use_tqdm=False)
    return num_seqs * given.tokens / (perf_counter() - started)


def compare(engines: dict[str, LLM], adapters: list[LoRARequest], given: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for num_seqs in map(int, given.sizes.split(",")):
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(given.rounds + 1):  # the first is a warm-up
            for kind, num_adapters in KINDS.items():
                llm = engines["off" if kind == "off" else "on"]
                rates[kind].append(measure(llm, adapters[:num_adapters], num_seqs, given))
        for kind in KINDS:
            ratios = [each / off for each, off in zip(rates[kind][1:], rates["off"][1:], strict=True)]
            rows.append(
                {"num_seqs": num_seqs, "adapters": kind, "tokens_per_s": [round(r, 1) for r in rates[kind][1:]]}
            )
            rows[-1]["times_off"] = round(median(ratios), 3)
            print(
                f"{num_seqs:5} {kind:>4} {median(rates[kind][1:]):10.1f} tokens/s  x {median(ratios):.3f}", flush=True
            )
    return rows


@contextlib.contextmanager
def started(given: argparse.Namespace) -> Iterator[tuple[dict[str, LLM], list[LoRARequest]]]:
    settings: dict[str, Any] = {"device": given.device, "max_model_len": 2048, "kv_cache_memory_bytes": given.cache}
    settings["max_num_seqs"] = max(map(int, given.sizes.split(",")))
    with contextlib.ExitStack() as stack:
        model = given.model
        if given.shape:
            model = str(stack.enter_context(shape_directory(given.shape)))
            settings |= {"load_format": "random"}
        off = stack.enter_context(LLM(model, **settings))
        room = {"enable_lora": True, "max_loras": max(KINDS.values()), "max_lora_rank": given.rank}
        engines = {"off": off, "on": stack.enter_context(LLM(model, **room, **settings))}
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        adapters = []
        for number in range(max(KINDS.values())):
            save_adapter(root / str(number), off.spec, given.rank, number)
            adapters.append(LoRARequest(str(number), number + 1, str(root / str(number))))
        yield engines, adapters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--shape", help="a shape of bench, with random weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sizes", default="1,16", help="numbers of sequences")
    parser.add_argument("--context", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=int, default=2 << 30)
    parser.add_argument("--json", help="write the record here")
    given = parser.parse_args()
    with started(given) as (engines, adapters):
        rows = compare(engines, adapters, given)
    if given.json:
        Path(given.json).write_text(json.dumps(record_facts() | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
