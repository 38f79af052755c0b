"""Builds the feed of a job: chooses whether lines are prepared in this process or in another one."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.engine.prompts import PromptReader
from headrace.engine.start import Engine
from headrace.jobs.formats.reader import InputLine
from headrace.jobs.input.feed import Feed, Preparer, Send
from headrace.jobs.input.job_checks import JobChecks
from headrace.jobs.input.lines import LineParser
from headrace.jobs.input.prepare import LinePreparer
from headrace.jobs.input.prepare_process import PreparingProcess, is_worth_a_process
from headrace.jobs.input.prepare_wire import SentTokenizer, Setup
from headrace.jobs.spec import JobSpec
from headrace.jobs.store.directory import JobDirectory


def open_feed(
    job: JobSpec,
    engine: Engine,
    directory: JobDirectory | None,
    lines: Iterable[list[InputLine]],
    send: Send,
    *,
    num_lines: int | None,
    min_lines_for_process: int,
) -> Feed:
    """The feed keeps no reference to the engine, which may die and be replaced before the input ends."""
    max_model_len = engine.settings.max_model_len
    prompts = PromptReader(engine.tokenizer, engine.spec.vocab_size, engine.grammars, max_model_len=max_model_len)
    checks = JobChecks(prompts, seen_ids=None if directory is None else directory.seen_ids)
    pooler = engine.spec.pooler
    local = LinePreparer(_parser(job, engine.model_name, directory), prompts, job.parser_names, pooler=pooler)
    preparer: Preparer = local
    # Only this process knows which lines are repeated with other parameters.
    if not job.overrides and is_worth_a_process(num_lines, min_lines=min_lines_for_process):
        preparer = _process(job, engine, local)
    return Feed(lines, preparer, send, checks=checks)


def _parser(job: JobSpec, model_name: str, directory: JobDirectory | None) -> LineParser:
    return LineParser(
        job.defaults,
        seed=job.config.seed,
        model_name=model_name,
        template=job.template,
        overrides=job.overrides,
        is_redone=directory.redone.__contains__ if directory is not None else lambda index: False,
        adapters=tuple(job.config.adapter_paths),
        model_names=job.model_names,
    )


def _process(job: JobSpec, engine: Engine, local: LinePreparer) -> PreparingProcess:
    model_name, vocab_size, tokenizer = engine.model_name, engine.spec.vocab_size, engine.tokenizer
    max_model_len, pooler = engine.settings.max_model_len, engine.spec.pooler

    def setup() -> Setup:
        return Setup(
            defaults=job.defaults,
            seed=job.config.seed,
            model_name=model_name,
            template=job.template,
            vocab_size=vocab_size,
            tokenizer=None if tokenizer is None else SentTokenizer.of(tokenizer),
            max_model_len=max_model_len,
            parser_names=job.parser_names,
            pooler=pooler,
            adapters=tuple(job.config.adapter_paths),
            model_names=job.model_names,
        )

    return PreparingProcess(setup, local)
