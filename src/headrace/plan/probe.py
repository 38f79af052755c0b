"""Starts the engine with random weights and shows how far the plan is from it. Imports torch, inside functions only."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError
from headrace.models.hub_config import spec_from_config
from headrace.plan.catalogue import find_entry
from headrace.plan.gpus import GPUS, Gpu, match_gpu
from headrace.plan.hostprobe import this_cpu
from headrace.plan.prediction import Prediction, predict
from headrace.plan.settings import PlanSettings
from headrace.plan.source import find_shape
from headrace.plan.workload import Workload, uniform

if TYPE_CHECKING:
    from headrace.engine.llm import LLM

_TOKEN_IDS = 1000  # prompts are made of the ids below this: every vocabulary has them


def probe(
    model: str, settings: PlanSettings, *, num_requests: int = 32, input_len: int = 64, output_len: int = 32
) -> dict[str, Any]:
    """Plan for this machine, start the engine with the plan's settings, run a short workload, and compare."""
    device = this_device()
    workload = uniform(input_len, output_len, num_requests=num_requests)
    shape = find_shape(model)
    if shape.why_not_run is not None:
        raise ConfigError(f"--probe starts the engine, which does not run {shape.name}: {shape.why_not_run}")
    prediction = predict(shape, device, workload, replace(settings, num_gpus=1))
    if prediction.problem is not None:
        raise ConfigError(f"--probe would not fit on this machine: {prediction.problem}")
    return _run(model, prediction, workload, settings)


def this_device() -> Gpu:
    """The GPU of this machine, by name, or its CPU, measured."""
    from headrace.hardware import read_gpu

    facts = read_gpu()
    if facts is None:
        return this_cpu()
    gpu = match_gpu(facts.name)
    if gpu is not None:
        return replace(gpu, memory_bytes=facts.total_memory)
    names = ", ".join(gpu.name for gpu in GPUS)
    raise ConfigError(f"--probe knows no {facts.name!r} (known: {names}); set CUDA_VISIBLE_DEVICES= to probe the CPU")


def _run(model: str, prediction: Prediction, workload: Workload, settings: PlanSettings) -> dict[str, Any]:
    from headrace import LLM

    options: dict[str, Any] = {"load_format": "random", "kv_cache_dtype": settings.kv_cache_dtype}
    for name in ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "quantization", "max_model_len"):
        if getattr(settings, name) is not None:
            options[name] = getattr(settings, name)
    with tempfile.TemporaryDirectory() as directory:
        before, started = _memory_in_use(), perf_counter()
        llm = LLM(_engine_model(model, Path(directory)), **options)
        ready = perf_counter() - started
    try:
        held = _memory_in_use() - before
        seconds, cpu_seconds = _seconds(llm, workload)
        real = llm.settings
    finally:
        llm.close()
    speed, planned, memory = prediction.speed, prediction.settings, prediction.memory
    assert speed is not None and planned is not None
    beside = memory.weights
    if real.device == "cuda":  # a CPU takes the memory of its cache as it is used
        held -= int(real.num_blocks * real.block_size * memory.bytes_per_token)
        beside += memory.activations + memory.runtime + memory.states + memory.adapters
    mean = workload.mean_prompt_len + workload.mean_output_len
    tokens, real_tokens = (each.num_blocks * each.block_size for each in (planned, real))
    rows = [
        ("memory beside the cache, GiB", beside / 2**30, held / 2**30, 2),
        ("cache, tokens", tokens, real_tokens, 0),
        ("sequences of the workload in the cache", tokens // mean, real_tokens // mean, 0),
        ("max_num_seqs", planned.max_num_seqs, real.max_num_seqs, 0),
        ("workload, seconds", speed.seconds, seconds, 2),
        ("output tokens/s", speed.output_tokens_per_s, workload.num_output_tokens / seconds, 0),
    ]
    if real.device == "cpu":  # what it would take without other load on the machine
        rows.append(("workload, CPU seconds per thread", speed.seconds, cpu_seconds / real.num_threads, 2))
    return {
        "model": prediction.model.name,
        "device": prediction.gpu.title,
        "ready_s": ready,
        "requests": len(workload.requests),
        "rows": [{"name": n, "predicted": float(p), "real": float(r), "digits": d} for n, p, r, d in rows],
    }


def _seconds(llm: LLM, workload: Workload) -> tuple[float, float]:
    """Seconds of the workload by the clock, and of this process on all its cores."""
    from headrace import SamplingParams

    params = SamplingParams(max_tokens=workload.requests[0].output_len, ignore_eos=True, detokenize=False)
    prompts = [
        [(7 * index + place) % _TOKEN_IDS + 1 for place in range(request.prompt_len)]
        for index, request in enumerate(workload.requests)
    ]
    few = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
    llm.generate(prompts, few, use_tqdm=False)  # compiles kernels for steps of these sizes
    llm.forget_prefixes()
    started, cpu_started = perf_counter(), process_time()
    llm.generate(prompts, params, use_tqdm=False)
    return perf_counter() - started, process_time() - cpu_started


def _memory_in_use() -> int:
    """Bytes that torch holds on the GPU, or that this process holds."""
    import psutil
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.memory_allocated())
    return int(psutil.Process().memory_info().rss)


def _engine_model(model: str, directory: Path) -> str:
    """What `LLM` takes: a path as it is, or a directory with the config of a built-in shape."""
    path = Path(model).expanduser()
    if path.exists():
        return str(path.parent if path.suffix == ".json" else path)
    entry = find_entry(model)
    spec_from_config(entry.config)  # an unsupported config fails before torch is imported
    (directory / "config.json").write_text(json.dumps(entry.config), encoding="utf-8")
    return str(directory)
