"""`headrace serve` over a runner that computes nothing, in the server's own process: it starts without torch."""

from __future__ import annotations

import sys

from headrace.cli import main as cli
from headrace.config import EngineConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.engine.client import Client, EngineClient
from headrace.engine.core import EngineCore
from headrace.engine.opening import open_model
from headrace.engine.start import Engine, tokenizer_of
from headrace.runner.fake import FakeRunner
from headrace.sched import Scheduler
from headrace.server import serve
from headrace.server.options import ServerOptions
from headrace.startup import Report
from tests.engine.cores import settings_of


def engine_over(client: Client, config: EngineConfig) -> Engine:
    """An engine with the tokenizer of a model, whoever computes its tokens."""
    checkpoint = open_model(config)
    return Engine(
        client=client,
        settings=settings_of(config),
        spec=checkpoint.spec,
        tokenizer=tokenizer_of(config, checkpoint),
        eos_token_ids=checkpoint.spec.eos_token_ids,
        model_name=config.model,
        start_seconds=0.0,
    )


def start(config: EngineConfig, options: ServerOptions, report: Report) -> AsyncEngine:
    settings = settings_of(config)
    runner = FakeRunner(max_num_seqs=settings.max_num_seqs, vocab_size=256)
    core = EngineCore(Scheduler(settings.limits), runner, eos_token_ids=(0,), vocab_size=256, seed=config.seed)
    return AsyncEngine.over(lambda deliver: engine_over(EngineClient(core, deliver), config))


if __name__ == "__main__":
    serve._start = start
    sys.exit(cli.main(["serve", *sys.argv[1:]]))
