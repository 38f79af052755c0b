"""Checks every line of a job: the same parser, tokenizer and limits as in a run, without the weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import closing

import numpy as np

from headrace.engine.prompts import PromptReader
from headrace.errors import JobError, RequestError
from headrace.jobs.formats.locations import STANDARD_STREAM
from headrace.jobs.formats.reader import InputLine
from headrace.jobs.input.job_checks import JobChecks
from headrace.jobs.input.line_output import LineAnswer, LineOutput
from headrace.jobs.input.lines import BadLine, LineParser
from headrace.jobs.input.part_requests import requests_of
from headrace.jobs.input.prepare import LinePreparer, Work
from headrace.jobs.input.reply import JobFacts
from headrace.jobs.preflight.front import Front
from headrace.jobs.preflight.rate import Rate
from headrace.jobs.preflight.report import CheckReport, Problem
from headrace.jobs.spec import JobSpec
from headrace.types import Request

MAX_SAMPLED_LINES = 1_000  # lines whose output size without text is measured
LONG_VALUE = -0.0123456  # of an embedding: about as many digits as any


def check_job(
    job: JobSpec,
    front: Front,
    *,
    report_problem: Callable[[Problem], None] = lambda problem: None,
    rate: Rate | None = None,
) -> CheckReport:
    """Read all lines. Calls `report_problem` for each problem as it is found; keeps only counts."""
    report = CheckReport(
        input=job.input, max_model_len=front.checks.limits.max_model_len, rate=rate, free_bytes=_free_bytes(job.output)
    )
    check = _Check(job, front, report, report_problem)
    with closing(job.open_input()) as source:
        try:
            for batch in source.read_batches(limit=job.limit):
                check.take(batch)
        except JobError as error:
            report.failure = str(error)
    return report


class _Check:
    def __init__(
        self, job: JobSpec, front: Front, report: CheckReport, report_problem: Callable[[Problem], None]
    ) -> None:
        parser = LineParser(
            job.defaults,
            seed=job.config.seed,
            model_name=front.model_name,
            template=job.template,
            adapters=tuple(job.config.adapter_paths),
            model_names=job.model_names,
        )
        max_model_len = front.checks.limits.max_model_len
        prompts = PromptReader(front.tokenizer, front.vocab_size, front.grammars, max_model_len=max_model_len)
        self._preparer = LinePreparer(parser, prompts, job.parser_names, pooler=front.spec.pooler)
        self._job_checks = JobChecks(prompts)
        self._checks = front.checks
        self._facts = JobFacts(front.model_name, front.tokenizer)
        self._spec = front.spec
        pooler = front.spec.pooler
        num_values = front.spec.hidden_size if pooler is None else pooler.size
        self._long_values = np.full(num_values, LONG_VALUE, np.float32)
        self._report = report
        self._report_problem = report_problem

    def take(self, lines: list[InputLine]) -> None:
        self._report.num_lines += len(lines)
        for line, item in zip(lines, self._job_checks.check(self._preparer.prepare(lines)), strict=True):
            if isinstance(item, BadLine):
                self._refuse(line, item.error)
            else:
                self._take_work(line, item)

    def _take_work(self, line: InputLine, work: Work) -> None:
        try:
            requests = [_request(line, work)] if work.parts is None else requests_of(work, self._spec)
            for request in requests:
                self._checks.check(request)
        except RequestError as error:
            self._refuse(line, error)
            return
        report = self._report
        prompt_lens = [len(request.prompt_token_ids) for request in requests]
        report.num_prompt_tokens += sum(prompt_lens)
        report.longest_prompt = max(report.longest_prompt, *prompt_lens)
        report.max_completion_tokens += sum(map(self._max_new_tokens, requests))
        report.notes.update(work.notes)
        if work.num_text_bytes:
            report.num_text_tokens += sum(prompt_lens)
            report.num_prompt_bytes += work.num_text_bytes
        if report.num_sampled < MAX_SAMPLED_LINES:
            report.num_sampled += 1
            report.num_sampled_bytes += self._len_without_text(work, requests)

    def _max_new_tokens(self, request: Request) -> int:
        if request.readout is not None:
            return 0
        return (self._checks.limits.end_len(request) - len(request.prompt_token_ids)) * request.params.num_sequences

    def _len_without_text(self, work: Work, requests: list[Request]) -> int:
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        if work.parts is not None and work.parts.is_pooled:
            output = LineOutput(num_prompt_tokens, (), 0, (self._long_values,) * len(requests))
        else:
            empty = tuple(LineAnswer(i, "", 0, "length") for i in range(work.params.n * len(requests)))
            output = LineOutput(num_prompt_tokens, empty)
        return len(work.reply.answer(output, self._facts)) + 1

    def _refuse(self, line: InputLine, error: RequestError) -> None:
        self._report.errors[error.code] += 1
        self._report_problem(Problem(line.number, line.offset, error.code, str(error)))


def _request(line: InputLine, work: Work) -> Request:
    return Request(str(line.index), work.token_ids, work.params, cache_salt=work.cache_salt, adapter=work.adapter)


def _free_bytes(output: str) -> int | None:
    if output == STANDARD_STREAM or "://" in output:
        return None
    try:
        return shutil.disk_usage(os.path.dirname(output) or ".").free
    except OSError:
        return None
