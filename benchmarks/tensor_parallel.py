"""Measures tensor and pipeline parallelism on the CPU: plan messages, sums over the ranks, and whole engines.

Usage: python benchmarks/tensor_parallel.py [--rounds 2] [--only PART ...] [--output results.json]

    messages   bytes of the plan of a decode step, and the time to encode it, send it through a socket pair and decode
               it, by the number of sequences; steady steps without and with table writes (one sequence in 16), a step
               whose slots have changed, and one that verifies four drafts of each sequence
    sums       an all-reduce of two processes with one thread each over Gloo, by the rows of a decode step
    engines    generated tokens per second of one process with two threads, of two tensor ranks and of two stages with
               one thread each, in turn: the embedded model, and random weights of a larger one

The ranks share two cores: what is measured is the cost of dividing a model, not a gain.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from about import commit, cpu_name

from headrace import LLM, SamplingParams
from headrace.dist.mesh import Mesh
from headrace.engine.process.channel import Channel
from headrace.engine.ranks import wire
from headrace.hardware.describe import package_versions
from headrace.steps import Drafts, StepPlan, TableWrites

LARGER: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 0,
}
SIZES, PROMPT_LEN, ANSWER_LEN = (1, 16), 32, 32  # prompts at once; tokens
MAX_DRAFTING_SEQS = 32  # of a GPU
ALL_REDUCE_ROWS = (1, 8, 32, 128)
HIDDEN_SIZE = 1024


def plan_of(num_seqs: int, *, is_steady: bool, num_writes: int) -> StepPlan:
    column = np.arange(num_writes, dtype=np.int64)
    return StepPlan(
        step=1000,
        slots=np.arange(num_seqs, dtype=np.int64),
        num_tokens=np.ones(num_seqs, np.int64),
        samples=np.ones(num_seqs, np.bool_),
        num_batched_tokens=num_seqs,
        table_writes=TableWrites(column, column, column) if num_writes else None,
        is_steady=is_steady,
    )


def with_drafts(plan: StepPlan, num_drafts: int = 4) -> StepPlan:
    lens = np.full(len(plan.slots), num_drafts, np.int64)
    return replace(plan, num_tokens=lens + 1, drafts=Drafts(lens, np.arange(lens.sum(), dtype=np.int64)))


def message_cost(plan: StepPlan, repeats: int = 2000) -> dict[str, float]:
    """Bytes, and medians in microseconds. The receiver is a thread of this process."""
    ours, theirs = (Channel(end) for end in socket.socketpair())
    received, taken = threading.Event(), []

    def receive() -> None:
        while (frames := theirs.receive()) is not None:
            for frame in frames:
                started = time.perf_counter()
                command = wire.decode_command(frame)
                wire.plan_of(command, plan)  # type: ignore[arg-type]
                taken.append(time.perf_counter() - started)
                received.set()

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    sent = []
    for _ in range(repeats):
        received.clear()
        started = time.perf_counter()
        ours.send(wire.encode(wire.plan_message(plan, None)))
        sent.append(time.perf_counter() - started)
        received.wait()
    size = len(wire.encode(wire.plan_message(plan, None)))
    ours.close()
    thread.join()
    theirs.close()
    return {"bytes": size, "send_us": round(1e6 * median(sent), 1), "receive_us": round(1e6 * median(taken), 1)}


def messages() -> list[dict[str, Any]]:
    found = []
    for num_seqs in (1, MAX_DRAFTING_SEQS, 128, 1024):
        kinds = {
            "steady": plan_of(num_seqs, is_steady=True, num_writes=0),
            "steady, with table writes": plan_of(num_seqs, is_steady=True, num_writes=-(-num_seqs // 16)),
            "changed slots": plan_of(num_seqs, is_steady=False, num_writes=0),
        }
        if num_seqs <= MAX_DRAFTING_SEQS:
            kinds["four drafts each"] = with_drafts(kinds["changed slots"])
        found += [{"num_seqs": num_seqs, "step": kind, **message_cost(plan)} for kind, plan in kinds.items()]
    return found


def reduce_rank(rank: int, store: str, results: Any) -> None:
    import torch

    from headrace.dist.collectives import connect
    from headrace.dist.rendezvous import Rendezvous

    torch.set_num_threads(1)
    group = connect(Mesh(rank, 2), Rendezvous.in_file(Path(store)), "gloo").tensor
    assert group is not None
    for rows in ALL_REDUCE_ROWS:
        x = torch.ones(rows, HIDDEN_SIZE)
        times = []
        for _ in range(300):
            started = time.perf_counter()
            group.all_reduce(x.fill_(1.0))
            times.append(time.perf_counter() - started)
        if rank == 0:
            results.put({"rows": rows, "bytes": x.nbytes, "median_us": round(1e6 * median(times[50:]), 1)})


def sums() -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        results = context.SimpleQueue()
        ranks = [
            context.Process(target=reduce_rank, args=(rank, f"{directory}/store", results), daemon=True)
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        found = [results.get() for _ in ALL_REDUCE_ROWS]
        for rank in ranks:
            rank.join()
    return found


def tokens_per_second(llm: LLM, vocab_size: int, num_prompts: int, seed: int) -> float:
    random = np.random.default_rng(seed)
    prompts = [random.integers(1, vocab_size, PROMPT_LEN).tolist() for _ in range(num_prompts)]
    started = time.perf_counter()
    outputs = llm.generate(
        prompts, SamplingParams(temperature=0.0, max_tokens=ANSWER_LEN, ignore_eos=True), use_tqdm=False
    )
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - started)


def engines(model: str, rounds: int, **settings: Any) -> dict[str, Any]:
    common = {"device": "cpu", "num_threads": 2, "max_num_seqs": max(SIZES), "max_model_len": 512, **settings}
    layouts = {"one process": {}, "two ranks": {"tensor_parallel_size": 2}, "two stages": {"pipeline_parallel_size": 2}}
    rates: dict[str, dict[str, list[float]]] = {f"{num} prompts": {name: [] for name in layouts} for num in SIZES}
    for number in range(rounds):
        for name, sizes in layouts.items():
            # One at a time: the number of threads is that of a whole process.
            with LLM(model, num_gpu_blocks_override=1024, **common | sizes) as llm:
                for num_prompts in SIZES:
                    vocab_size = llm.spec.vocab_size
                    tokens_per_second(llm, vocab_size, num_prompts, seed=0)  # warms up
                    rate = tokens_per_second(llm, vocab_size, num_prompts, seed=number + 1)
                    rates[f"{num_prompts} prompts"][name].append(round(rate, 1))
    return {
        size: {name: {"tokens_per_s": median(each), "rounds": each} for name, each in by_name.items()}
        for size, by_name in rates.items()
    }


def larger_model(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(LARGER))
        return engines(directory, rounds, load_format="random")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="names of parts: messages, sums, smollm2, random")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    record: dict[str, Any] = {
        "benchmark": "tensor_parallel",
        "command": " ".join(["python", *sys.argv]),
        "commit": commit(),
        "cpu": cpu_name(),
        "versions": package_versions(),
        "load_average": os.getloadavg(),  # of this machine before the run: other programs change all times
        "prompt_len": PROMPT_LEN,
        "answer_len": ANSWER_LEN,
    }
    parts: dict[str, Callable[[], Any]] = {
        "messages": messages,
        "sums": sums,
        "smollm2": lambda: engines("smollm2", given.rounds),
        "random": lambda: larger_model(given.rounds),
    }
    for name, measure in parts.items():
        if given.only and name not in given.only:
            continue
        record[name] = measure()
        print(json.dumps({name: record[name]}), flush=True)
        if given.output:  # after each part: a later one may take too long
            given.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
