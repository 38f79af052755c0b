"""Starts an engine from a config: checkpoint, settings, then weights and tokenizer in parallel.

    Checkpoint ─▶ LoadedModel ─▶ LoadedCore ─▶ Engine
                  weights,       scheduler,    a thread and a front
                  tokenizer      runner, KV cache

A core with other settings can be started on the same loaded model (`reconfigure.py`).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from headrace.config import EngineConfig
from headrace.engine import compile_ahead
from headrace.engine.chat_template import with_chat_settings
from headrace.engine.client import Client, Deliver, EngineClient
from headrace.engine.core import EngineCore, EngineStats
from headrace.engine.drafts import check_tokenizer, load_draft, open_draft
from headrace.engine.early_start import EarlyStart, begin_early
from headrace.engine.grammars import Grammars
from headrace.engine.group import EngineGroup, OnLost, ProcessClient
from headrace.engine.kv_offloading import OpenedTiers, RunnerWithTiers, open_tiers
from headrace.engine.opening import open_model
from headrace.engine.process.engine_process import EngineProcess
from headrace.engine.process.supervisor import EngineSupervisor, Supervision
from headrace.engine.profiler import EngineProfiler
from headrace.engine.ranks.start import RankStart
from headrace.engine.resolve import resolve_here
from headrace.engine.runners import (
    depth_of,
    graph_bytes,
    load_library_kernels,
    load_model,
    measure_step,
    start_runner,
)
from headrace.engine.settings import Settings
from headrace.engine.shares import EngineShare, shares_here
from headrace.engine.threads import cpus_of
from headrace.errors import ConfigError, ModelError
from headrace.garbage import collecting_less_often
from headrace.hardware import (
    MachineFacts,
    has_gpu_driver,
    num_gpus,
    pinned_to,
    read_facts,
    read_gpu,
    release_unused,
    resident_bytes,
    return_large_buffers,
    shorten_openmp_waits,
)
from headrace.hardware.affinity import pin
from headrace.models import Checkpoint, ModelSpec
from headrace.sched import Scheduler
from headrace.startup import OnStage, Report, StartupStage, StartupStages, ignore_stage, mark
from headrace.steps import Runner
from headrace.text import TextSource, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from headrace.dist.collectives import Groups
    from headrace.models import Decoder  # imports torch, which a front without an engine of its own does not need
    from headrace.models.encoder import Encoder


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine and what its fronts need to know about it."""

    client: Client
    settings: Settings
    spec: ModelSpec
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    model_name: str
    start_seconds: float
    start_stages: tuple[StartupStage, ...] = ()  # that have ended, in order
    grammars: Grammars | None = None
    config: EngineConfig | None = None  # that the settings were resolved from
    model: LoadedModel | None = None  # None: it is in another process
    adapters: Mapping[str, str] = field(default_factory=dict)  # those loaded at the start: paths by name

    @property
    def stats(self) -> EngineStats:
        return self.client.stats

    def close(self) -> None:
        self.client.close()


GPU_SWITCH_SECONDS = 0.0005  # how long another thread may hold the GIL while the engine's thread waits for it


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights, tokenizer and grammars. Cores with different settings can use them, one after the other."""

    config: EngineConfig  # that it was loaded with
    settings: Settings  # the same, resolved: device, dtype and quantization of the weights
    spec: ModelSpec
    decoder: Decoder | Encoder
    tokenizer: Tokenizer | None
    grammars: Grammars
    rss_before: int  # bytes of memory that this process had before the weights were loaded
    draft: Decoder | None = None  # the draft model of speculative decoding
    source: Path | None = None  # its files


class LoadedCore(NamedTuple):
    """A core that is ready to run, with the settings that its runner was built with, its model and its profiler."""

    core: EngineCore
    settings: Settings
    model: LoadedModel | None = None
    profiler: EngineProfiler | None = None


class _StartedRunner(NamedTuple):
    runner: Runner
    settings: Settings


class _Draft(NamedTuple):
    """The draft model of speculative decoding, if there is one."""

    decoder: Decoder | None  # this rank's part
    spec: ModelSpec | None  # of the whole model


def start_engine(config: EngineConfig, deliver: Deliver, *, report: Report = lambda stage: None) -> Engine:
    """Load the model and start the engine's thread. `deliver` gets all events; see `EngineClient`. `report` gets the
    stages of the start."""
    started, stages = perf_counter(), StartupStages(report)
    return_large_buffers()
    loaded = _load(config, open_model(config, stages), stages)
    release_unused()  # the checkpoint's files are closed too
    stages.end()
    return engine_of(loaded, config, deliver, started=started, stages=stages.finished)


def engine_of(
    loaded: LoadedCore,
    config: EngineConfig,
    deliver: Deliver,
    *,
    started: float,
    stages: tuple[StartupStage, ...] = (),
) -> Engine:
    """Start the thread of a loaded core. `started` is when its start began, by `perf_counter`."""
    model = loaded.model
    assert model is not None
    with pinned_to(host_cpus(loaded.settings)):  # its thread inherits the mask
        client = EngineClient(loaded.core, deliver, loaded.profiler)
    return Engine(
        client=client,
        settings=loaded.settings,
        spec=model.spec,
        tokenizer=model.tokenizer,
        grammars=model.grammars,
        eos_token_ids=model.spec.eos_token_ids,
        model_name=config.model,
        start_seconds=perf_counter() - started,
        start_stages=stages,
        config=config,
        model=model,
        adapters=config.adapter_paths,
    )


def start_engine_process(
    config: EngineConfig,
    deliver: Deliver,
    *,
    supervision: Supervision | None = None,
    report: Report = lambda stage: None,
    environment: Mapping[str, str] | None = None,
) -> Engine:
    """Start the engine in a process of its own, which is restarted when it dies if `supervision` is given. This process
    only loads the tokenizer, and does not import torch. `report` gets the stages of every start, on any thread.
    `environment`: variables of the process beside those of this one, without `supervision`."""
    started, stages = perf_counter(), StartupStages(report)
    client = (
        EngineProcess(deliver, lambda: deliver([]), report=stages.add, environment=environment)
        if supervision is None
        else EngineSupervisor(deliver, supervision, report=stages.add)
    )
    begin, wait = partial(client.start, config), lambda: client.wait_until_ready().settings
    return _engine_over(client, config, begin=begin, wait=wait, started=started, stages=stages)


def start_engine_group(
    config: EngineConfig,
    deliver: Deliver,
    on_lost: OnLost,
    *,
    size: int,
    supervision: Supervision | None = None,
    report: Report = lambda stage: None,
) -> Engine:
    """Start several engines in processes of their own, each with its share of this machine. `on_lost` is called when
    one has died. `report` gets the stages of the first."""
    started, stages = perf_counter(), StartupStages(report)

    def start(number: int, share: EngineShare, deliver: Deliver) -> ProcessClient:
        on_stage = stages.add if number == 0 else _ignore
        if supervision is None:
            return EngineProcess(deliver, lambda: deliver([]), report=on_stage, environment=share.environment)
        return EngineSupervisor(
            deliver, supervision, report=on_stage, environment=share.environment, name=f"engine {number}"
        )

    group = EngineGroup(shares_here(config, size, noun="engine"), start, deliver, on_lost)
    return _engine_over(group, config, begin=group.start, wait=group.wait_until_ready, started=started, stages=stages)


def _ignore(stage: StartupStage) -> None:
    """All engines of a group go through the same stages; those of the first are shown."""


def _engine_over(
    client: Client,
    config: EngineConfig,
    *,
    begin: Callable[[], None],
    wait: Callable[[], Settings],
    started: float,
    stages: StartupStages,
) -> Engine:
    """Load what a front needs while the engine starts in its process. `begin` and `wait` are the start's two ends."""
    try:
        checkpoint = open_model(config, stages)  # downloads a model that is not cached, before the process opens it
        stages.end()
        begin()
        tokenizer = tokenizer_of(config, checkpoint)
        settings = wait()
    except BaseException:
        client.close()
        raise
    return Engine(
        client=client,
        settings=settings,
        spec=checkpoint.spec,
        tokenizer=tokenizer,
        grammars=_grammars(tokenizer, checkpoint.spec),
        eos_token_ids=checkpoint.spec.eos_token_ids,
        model_name=config.model,
        start_seconds=perf_counter() - started,
        start_stages=stages.finished,
        adapters=config.adapter_paths,
    )


def load_core(config: EngineConfig, on_stage: OnStage) -> LoadedCore:
    """Load an engine without a front, for a process of its own. `on_stage` is told how far it is."""
    return_large_buffers()
    loaded = _load(config, open_model(config, on_stage), on_stage)
    release_unused()
    pin(host_cpus(loaded.settings))  # the loop runs on this thread
    return loaded


def host_cpus(settings: Settings) -> frozenset[int]:
    """CPUs of the thread that feeds a GPU; empty: it is not pinned. That of a CPU engine may use all CPUs, beside those
    that compute."""
    return cpus_of(settings.cpu_affinity) if settings.device == "cuda" else frozenset()


def _load(config: EngineConfig, checkpoint: Checkpoint, on_stage: OnStage) -> LoadedCore:
    mark("model opened")
    if "torch" not in sys.modules:
        on_stage("import")  # by what follows
    shorten_openmp_waits()
    early = begin_early(config, checkpoint.spec)
    try:
        with collecting_less_often():
            return _load_after(early, config, checkpoint, on_stage)
    except BaseException:
        early.close()
        raise


def _load_after(early: EarlyStart, config: EngineConfig, checkpoint: Checkpoint, on_stage: OnStage) -> LoadedCore:
    spec, rss_before, facts = checkpoint.spec, resident_bytes(), _read_facts(config, early, on_stage)
    draft_checkpoint = open_draft(config, spec, on_stage)
    draft_spec = None if draft_checkpoint is None else draft_checkpoint.spec
    estimate = resolve_here(config, spec, facts, draft_spec)
    mark("settings resolved")
    ranks = None if estimate.num_ranks == 1 else RankStart(config, estimate, facts)
    ahead = compile_ahead.begin(early.compiler, config, spec, estimate, facts)
    try:
        importlib.import_module("torch")
        with ThreadPoolExecutor(1, "headrace-tokenizer") as executor:
            loading = executor.submit(tokenizer_of, config, checkpoint)
            groups = None if ranks is None else _connect(ranks, on_stage)
            decoder = load_model(checkpoint, estimate, on_stage, groups)
            draft = (
                None if draft_checkpoint is None else load_draft(draft_checkpoint, estimate, on_stage, groups=groups)
            )
            mark("weights loaded")
            if ahead is not None:
                on_stage("compile")
                load_library_kernels(decoder, estimate)  # the GPU has nothing else to do
                mark("library kernels loaded")
                ahead.wait(on_stage)
                mark("kernels compiled")
            early.wait_for_triton()
            drafts = _Draft(draft, draft_spec)
            started = _measure_and_start(decoder, spec, config, estimate, facts, on_stage, ranks, draft=drafts)
            tokenizer = loading.result()
            mark("tokenizer loaded")
            if draft_checkpoint is not None:
                check_tokenizer(config, draft_checkpoint, tokenizer)
    except BaseException:
        if ahead is not None:
            ahead.close()
        if ranks is not None:
            ranks.end()
        raise
    grammars = _grammars(tokenizer, spec)
    model = LoadedModel(
        config, estimate, spec, decoder, tokenizer, grammars, rss_before, draft, source=checkpoint.source
    )
    return _core_of(model, config, started)


def _connect(ranks: RankStart, on_stage: OnStage) -> Groups:
    on_stage("ranks")
    return ranks.connect()


def facts_without(model: LoadedModel) -> MachineFacts:
    """The machine as a fresh start would find it: what this process has allocated since the load counts as free."""
    facts = _read_facts(model.config)
    free = facts.free_memory + max(0, resident_bytes() - model.rss_before)
    facts = replace(facts, free_memory=min(free, facts.total_memory))
    if facts.gpu is None:
        return facts
    import torch

    free = facts.gpu.free_memory + torch.cuda.memory_reserved()
    return replace(facts, gpu=replace(facts.gpu, free_memory=min(free, facts.gpu.total_memory)))


def start_core(model: LoadedModel, config: EngineConfig, facts: MachineFacts) -> LoadedCore:
    """Start a core on a loaded model. The one before must be closed: there is one KV cache at a time."""
    decoder = draft_of(model, config)
    draft = _Draft(decoder, None if decoder is None else decoder.spec)
    estimate = resolve_here(config, model.spec, facts, draft.spec)
    started = _measure_and_start(_decoder_of(model, estimate), model.spec, config, estimate, facts, draft=draft)
    return _core_of(model, config, started)


def draft_of(model: LoadedModel, config: EngineConfig) -> Decoder | None:
    """The loaded draft model, if this config uses it."""
    return model.draft if config.speculative == model.config.speculative else None


def restart_core(model: LoadedModel, config: EngineConfig, settings: Settings) -> LoadedCore:
    """Start a core with the settings of an earlier one, whatever memory is free now."""
    decoder = _decoder_of(model, settings)
    step_bytes = measure_step(decoder, settings)
    runner = start_runner(decoder, settings, step_bytes, draft=draft_of(model, config))
    return _core_of(model, config, _StartedRunner(runner, settings))


def _read_facts(
    config: EngineConfig, early: EarlyStart | None = None, on_stage: OnStage = ignore_stage
) -> MachineFacts:
    facts = read_facts()
    if config.device == "cpu":
        return facts
    importlib.import_module("torch")
    mark("torch imported")
    if has_gpu_driver():
        on_stage("device")
    if early is not None:
        early.wait_for_context()
    gpu = read_gpu()
    mark("GPU facts read")
    if gpu is None:
        return facts
    from headrace.kernels.gpu import flash  # imports triton

    mark("kernels imported")
    gpu = replace(gpu, has_flash_attention=flash.is_available())
    mark("FlashAttention loaded")
    return replace(facts, gpu=gpu, num_gpus=num_gpus())


def _decoder_of(model: LoadedModel, settings: Settings) -> Decoder | Encoder:
    """The model's decoder for a context of this length. The weights are shared."""
    from headrace.models.encoder import Encoder
    from headrace.models.weights.load import with_max_len
    from headrace.runner.cpu_threads import use_threads

    use_threads(settings.threads_per_rank)
    if isinstance(model.decoder, Encoder):
        return replace(model.decoder, max_len=settings.max_model_len)
    return with_max_len(model.decoder, settings.max_model_len)


def _measure_and_start(
    decoder: Decoder | Encoder,
    spec: ModelSpec,
    config: EngineConfig,
    estimate: Settings,
    facts: MachineFacts,
    on_stage: OnStage = ignore_stage,
    ranks: RankStart | None = None,
    *,
    draft: _Draft,
) -> _StartedRunner:
    """Start a runner. On a GPU the largest step is measured first, which decides the size of the KV cache: by the rank
    with the least memory, if there are several."""
    settings, step_bytes = estimate, 0
    if facts.gpu is not None and settings.device == "cuda":
        on_stage("profile")
        step_bytes = measure_step(decoder, settings)
        mark("largest step measured")
        step_memory = step_bytes + graph_bytes(step_bytes, decoder.spec, settings)
        facts = replace(facts, gpu=replace(facts.gpu, step_memory=step_memory))
        facts = facts if ranks is None else ranks.narrowest(facts)
        settings = resolve_here(config, spec, facts, draft.spec)
    if ranks is None:
        return _StartedRunner(start_runner(decoder, settings, step_bytes, on_stage, draft=draft.decoder), settings)
    ranks.build(settings)
    own = start_runner(decoder, settings, step_bytes, on_stage, draft=draft.decoder)
    return _StartedRunner(ranks.runner_of(own), settings)


def _core_of(model: LoadedModel, config: EngineConfig, started: _StartedRunner) -> LoadedCore:
    spec, settings = model.spec, started.settings
    if settings.device == "cuda":
        sys.setswitchinterval(min(sys.getswitchinterval(), GPU_SWITCH_SECONDS))
    tiers = OpenedTiers()
    if model.source is not None and isinstance(started.runner, RunnerWithTiers):
        tiers = open_tiers(settings, model.config, spec, model.source, started.runner.host_blocks)
    core = EngineCore(
        Scheduler(settings.limits, chain=tiers.chain, store=tiers.store),
        started.runner,
        eos_token_ids=spec.eos_token_ids,
        vocab_size=spec.vocab_size,
        generates=spec.pooler is None,
        seed=config.seed,
        depth=depth_of(settings),
        grammars=model.grammars,
        disk=tiers.store,
        max_loras=0 if settings.adapters is None else settings.adapters.max_loras,
    )
    for name, path in config.adapter_paths.items():
        core.load_adapter(name, core.read_adapter(path))
    return LoadedCore(core, settings, model, EngineProfiler(core, model.decoder.spec, settings, config.model))


def _grammars(tokenizer: Tokenizer | None, spec: ModelSpec) -> Grammars:
    return Grammars(
        tokenizer,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        num_threads=read_facts().num_cores,
    )


def tokenizer_of(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    """The model's tokenizer; None for a model with random weights that has none and takes token ids only."""
    if config.tokenizer and not Path(config.tokenizer).exists():
        raise ConfigError(f"tokenizer={config.tokenizer!r}: there is no such directory or file")
    try:
        source = TextSource(directory=Path(config.tokenizer)) if config.tokenizer else checkpoint.text
        return with_chat_settings(load_tokenizer(source), config)
    except ModelError:
        if config.load_format == "random" and config.tokenizer is None:
            return None
        raise
