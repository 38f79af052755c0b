"""From a config to a running engine: checkpoint, settings, weights and tokenizer, the latter two side by side."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from headrace.config import EngineConfig
from headrace.engine.client import Deliver, EngineClient
from headrace.engine.core import EngineCore, EngineStats
from headrace.engine.grammars import Grammars
from headrace.engine.resolve import GIB, resolve
from headrace.engine.settings import Settings
from headrace.errors import ConfigError, ModelError
from headrace.hardware import MachineFacts, read_facts, read_gpu, release_unused, return_large_buffers
from headrace.models import Checkpoint, Decoder, ModelSpec, open_checkpoint
from headrace.runner.shape import RunnerShape
from headrace.sched import Scheduler
from headrace.steps import Runner
from headrace.text import TextSource, Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine and what its fronts need to know of it."""

    client: EngineClient
    settings: Settings
    spec: ModelSpec
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    model_name: str
    start_seconds: float
    grammars: Grammars | None = None

    @property
    def stats(self) -> EngineStats:
        return self.client.stats

    def close(self) -> None:
        self.client.close()


GPU_DEPTH = 2  # steps queued on a GPU beyond the one it works on, so that a slow turn of the host costs nothing


class _Loaded(NamedTuple):
    """What stays of a checkpoint once it is closed."""

    settings: Settings
    spec: ModelSpec
    tokenizer: Tokenizer | None
    runner: Runner


def start_engine(config: EngineConfig, deliver: Deliver) -> Engine:
    """Load the model and start its thread. `deliver` gets all events; see `EngineClient`."""
    started = perf_counter()
    return_large_buffers()
    settings, spec, tokenizer, runner = _load(config)
    release_unused()
    grammars = Grammars(tokenizer, vocab_size=spec.vocab_size, eos_token_ids=spec.eos_token_ids)
    core = EngineCore(
        Scheduler(settings.limits),
        runner,
        eos_token_ids=spec.eos_token_ids,
        vocab_size=spec.vocab_size,
        seed=config.seed,
        depth=GPU_DEPTH if settings.device == "cuda" else 1,
        grammars=grammars,
    )
    return Engine(
        client=EngineClient(core, deliver),
        settings=settings,
        spec=spec,
        tokenizer=tokenizer,
        grammars=grammars,
        eos_token_ids=spec.eos_token_ids,
        model_name=config.model,
        start_seconds=perf_counter() - started,
    )


def _load(config: EngineConfig) -> _Loaded:
    checkpoint = open_checkpoint(config.model, revision=config.revision, load_format=config.load_format)
    facts = read_facts()
    if config.device != "cpu":
        facts = replace(facts, gpu=read_gpu())
    settings = resolve(config, checkpoint.spec, facts)
    with ThreadPoolExecutor(1, "headrace-tokenizer") as beside:
        tokenizer = beside.submit(_tokenizer, config, checkpoint)
        decoder = _load_decoder(checkpoint, settings)
        if facts.gpu is not None and settings.device == "cuda":
            settings = resolve(config, checkpoint.spec, _with_measured_step(facts, decoder, settings))
        runner = _start_runner(decoder, settings)
        return _Loaded(settings, checkpoint.spec, tokenizer.result(), runner)


def _with_measured_step(facts: MachineFacts, decoder: Decoder, settings: Settings) -> MachineFacts:
    """The facts, with what the largest step needs as it was seen, not estimated."""
    from headrace.runner.gpu_memory import measure_step

    assert facts.gpu is not None
    measured = measure_step(decoder, num_tokens=settings.max_num_batched_tokens, num_seqs=settings.max_num_seqs)
    return replace(facts, gpu=replace(facts.gpu, step_memory=measured))


def _load_decoder(checkpoint: Checkpoint, settings: Settings) -> Decoder:
    import torch

    from headrace.models import load_decoder
    from headrace.runner.threads import use_threads

    use_threads(settings.num_threads)
    return load_decoder(
        checkpoint,
        dtype=getattr(torch, settings.dtype),
        device=torch.device(settings.device),
        quantization=settings.quantization,
        load_format=settings.load_format,
        seed=settings.seed,
        max_len=settings.max_model_len,
    )


def _start_runner(decoder: Decoder, settings: Settings) -> Runner:
    import torch

    shape = RunnerShape(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        num_blocks=settings.num_blocks,
        block_size=settings.block_size,
        num_threads=settings.num_threads,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        kv_dtype=getattr(torch, settings.kv_dtype),
    )
    if settings.device == "cuda":
        return _start_gpu_runner(decoder, shape)
    from headrace.runner.torch_runner import TorchRunner

    return TorchRunner(decoder, shape)


def _start_gpu_runner(decoder: Decoder, shape: RunnerShape) -> Runner:
    import torch

    from headrace.runner.gpu_runner import GpuRunner

    try:
        return GpuRunner(decoder, shape)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        raise ConfigError(
            f"the GPU has no room for {shape.num_blocks:,} cache blocks and the graphs of {shape.max_num_seqs:,} "
            f"sequences: {free / GIB:.1f} of {total / GIB:.1f} GiB are free; lower gpu_memory_utilization, "
            "max_num_seqs or max_num_batched_tokens, or stop what else uses the GPU"
        ) from error


def _tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    """The model's tokenizer; a random-weight model may do without and take token ids only."""
    try:
        return load_tokenizer(TextSource(directory=Path(config.tokenizer)) if config.tokenizer else checkpoint.text)
    except ModelError:
        if config.load_format == "random" and config.tokenizer is None:
            return None
        raise
