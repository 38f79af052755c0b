"""Engine cores for tests of engine processes: a fake runner that fails when the first token of a prompt says so.

Loaded by name in another process, without torch.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from headrace.config import EngineConfig
from headrace.engine.core import EngineCore
from headrace.engine.fake_settings import fake_settings
from headrace.engine.grammars import Grammar
from headrace.engine.settings import Choice, Settings
from headrace.engine.start import LoadedCore
from headrace.errors import ConfigError, RequestError
from headrace.runner.fake import FakeRunner
from headrace.sched import Scheduler
from headrace.startup import OnStage
from headrace.steps import Masks, StepPlan, StepResult
from headrace.types import Request

HANG, RAISE, EXIT, BREAK, SECRETLY_REFUSED = 1, 2, 3, 4, 5  # first tokens of prompts that trigger a fault
VOCAB_SIZE = 1000
EOS = 999
HANG_FILE, HANGS_AFTER = "HEADRACE_TEST_HANG_FILE", 60  # of `HangsOnce`: the variable with its path, and steps


class FaultyRunner(FakeRunner):
    def submit(self, plan: StepPlan, masks: Masks | None = None) -> StepResult:
        for entry in plan.slot_entries:
            match int(entry.token_ids[0]):
                case 1:
                    threading.Event().wait()
                case 2:
                    raise RuntimeError("the device is on fire")
                case 3:
                    os._exit(3)
        return super().submit(plan, masks)


class HangsOnce(FakeRunner):
    """Hangs after some steps if there is a file, which it removes: in the next process there is none."""

    def submit(self, plan: StepPlan, masks: Masks | None = None) -> StepResult:
        file = Path(os.environ[HANG_FILE])
        if self.num_steps >= HANGS_AFTER and file.exists():
            file.unlink()
            threading.Event().wait()
        return super().submit(plan, masks)


class FaultyCore(EngineCore):
    def add(self, request: Request, grammar: Grammar | None = None) -> None:
        if request.prompt_token_ids[0] == SECRETLY_REFUSED:
            raise RequestError("only the engine knows why not")
        if request.prompt_token_ids[0] == BREAK:
            raise KeyError("a bug")
        super().add(request, grammar)


def settings_of(config: EngineConfig) -> Settings:
    return fake_settings(
        max_model_len=config.max_model_len or 256,
        max_num_seqs=config.max_num_seqs or 8,
        max_num_batched_tokens=config.max_num_batched_tokens or 64,
        num_blocks=config.num_gpu_blocks_override or 64,
        seed=config.seed,
        choices=(Choice("num_threads", "1", "one is enough for nothing"),),
    )


def faulty(config: EngineConfig, on_stage: OnStage) -> LoadedCore:
    on_stage("load", 1, 2)
    settings = settings_of(config)
    runner = FaultyRunner(max_num_seqs=settings.max_num_seqs, vocab_size=VOCAB_SIZE)
    core = FaultyCore(Scheduler(settings.limits), runner, eos_token_ids=(EOS,), vocab_size=VOCAB_SIZE, seed=config.seed)
    return LoadedCore(core, settings)


def hangs_once(config: EngineConfig, on_stage: OnStage) -> LoadedCore:
    settings = settings_of(config)
    runner = HangsOnce(max_num_seqs=settings.max_num_seqs, vocab_size=256)
    core = EngineCore(Scheduler(settings.limits), runner, eos_token_ids=(0,), vocab_size=256, seed=config.seed)
    return LoadedCore(core, settings)


def refuses_config(config: EngineConfig, on_stage: OnStage) -> LoadedCore:
    raise ConfigError("max_num_seqs of 7 is an odd number; try 8")


def breaks(config: EngineConfig, on_stage: OnStage) -> LoadedCore:
    raise RuntimeError("no such device")


def never_ready(config: EngineConfig, on_stage: OnStage) -> LoadedCore:
    on_stage("compile")
    threading.Event().wait()
    raise AssertionError


def breaks_the_second_time(config: EngineConfig, on_stage: OnStage) -> LoadedCore:
    """Fail at every start but the first. `config.model` is a path that the first start creates."""
    try:
        with open(config.model, "x"):
            return faulty(config, on_stage)
    except FileExistsError:
        raise RuntimeError("the device is still on fire") from None
