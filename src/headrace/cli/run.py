"""`headrace run`: runs a batch job, from a file of prompts to a file of answers."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.cli.auto import (
    AutoSettings,
    add_auto_flags,
    check_auto_flags,
    directories,
    find_auto_settings,
    flags_of,
    names_checkpoint,
    shown,
)
from headrace.cli.engine_flags import add_engine_flags, engine_config
from headrace.cli.messages import print_line
from headrace.cli.node import host_node
from headrace.cli.parser import CommandParser
from headrace.cli.removed_flags import without_other_flags
from headrace.cli.run_flags import add_job_flags, add_table_flags
from headrace.cli.sampling_flags import add_sampling_flags, sampling_defaults
from headrace.cli.settings_file import read_settings
from headrace.config import EngineConfig
from headrace.errors import ConfigError, ResumableJobError
from headrace.other_settings import ALIASES

if TYPE_CHECKING:
    from headrace.jobs.spec import JobSpec
    from headrace.jobs.status.report import JobReport

EPILOG = """\
input lines:
  {"prompt": "...", "max_tokens": 64, "any": "field"}        other fields are copied to the output
  {"messages": [{"role": "user", "content": "..."}]}
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}    OpenAI's batch format

exit codes:
  0    every line was answered
  1    the job could not start or continue
  2    wrong usage, or a setting that the engine refuses
  3    the job is done, and some lines became error lines; with --check, some lines cannot be answered
  4    cancelled by 'headrace cancel'
  75   stopped by Ctrl-C, SIGTERM, a full disk or an engine that keeps dying: run the same command again to continue
  130  stopped by Ctrl-C, and cannot be continued: the input or the output is a stream"""

RESUMABLE = 75


def main(arguments: Sequence[str]) -> int:
    parser = build_parser()
    given = _parsed(parser, arguments)
    _check_flags(parser, given)
    defaults = sampling_defaults(parser, given)
    config = engine_config(parser, given)
    if config.node_rank > 0:
        return host_node(config)
    auto = _auto_settings(config, given) if given.auto else None
    if auto is not None:
        with names_checkpoint(auto):
            applied = {name: value for name, value in auto.settings.items() if not hasattr(given, name)}
            config = dataclasses.replace(config, **applied)

    from headrace.cli.fetching import fetch_if_missing
    from headrace.jobs.run.run_job import run_job

    job = _job_spec(given, config, defaults=defaults, auto=auto)
    job.check_paths()
    fetch_if_missing(config.model, quiet=given.quiet)
    if given.check:
        return _check(job, given)
    try:
        with names_checkpoint(auto):
            report = run_job(job, quiet=given.quiet)
    except ResumableJobError as error:
        print_line(f"error: {error}")
        return RESUMABLE
    _print_report(report, given)
    if given.checkpoint is not None:
        _write_checkpoint(report, job, given, arguments)
    return report.exit_code


def _check_flags(parser: CommandParser, given: argparse.Namespace) -> None:
    if given.output is None and not given.check:
        parser.error("the following arguments are required: -o/--output")
    if given.rate is not None and not given.check:
        parser.error("--rate is for --check")
    if given.checkpoint is not None and given.check:
        parser.error("--checkpoint is for a job that runs, and --check runs none")
    check_auto_flags(parser, given)


def _job_spec(
    given: argparse.Namespace, config: EngineConfig, *, defaults: Mapping[str, Any], auto: AutoSettings | None
) -> JobSpec:
    from headrace.jobs.formats.locations import STANDARD_STREAM
    from headrace.jobs.input.template import LineTemplate
    from headrace.jobs.spec import JobSpec
    from headrace.jobs.store.redo import Where, read_overrides
    from headrace.openai.parser_names import ParserNames

    template = LineTemplate.of(
        prompt=given.prompt, system=given.system, messages_column=given.messages_column, is_chat=given.chat
    )
    redo = "error" if given.retry_errors else given.redo
    if redo is not None:
        Where(redo)  # refuses a condition that cannot be parsed
    return JobSpec(
        input=given.input,
        output=given.output or STANDARD_STREAM,
        config=config,
        defaults=defaults,
        limit=given.limit,
        workers=given.workers,
        ray=given.ray,
        overwrite=given.overwrite,
        template=template,
        input_format=given.input_format,
        output_format=given.output_format,
        max_error_rate=given.max_error_rate,
        gpu_price=given.gpu_price,
        keep_order=given.keep_order,
        redo=redo,
        overrides=read_overrides(given.set),
        grace_s=given.grace,
        parser_names=ParserNames(given.tool_call_parser, given.reasoning_parser),
        metrics_port=given.metrics_port,
        deadline=given.deadline,
        disk_wait_s=given.disk_wait,
        auto_settings=None if auto is None else auto.as_json(),
    )


def _auto_settings(config: EngineConfig, given: argparse.Namespace) -> AutoSettings:
    """From a checkpoint, or for a job that is resumed, those that it was started with: all of its answers must come
    from the same settings, whatever checkpoints appeared since."""
    from headrace.jobs.spec import is_durable, job_directory
    from headrace.jobs.store.manifest import read_manifest

    fields = [field.name for field in dataclasses.fields(EngineConfig)]
    say = (lambda line: None) if given.quiet else print_line
    if given.output is not None and not given.overwrite and is_durable(given.output):
        earlier = read_manifest(job_directory(given.output))
        if earlier is not None and earlier.auto_settings is not None:
            kept = AutoSettings.from_json(earlier.auto_settings)
            source = kept.path or "no checkpoint"
            say(f"auto: the job keeps its settings from {source}: {shown(kept.settings) or 'none'}")
            return kept
    is_data = os.path.isfile(given.input) and given.input.endswith((".jsonl", ".json"))
    return find_auto_settings(
        config.model,
        "batch",
        revision=config.revision,
        given=[name for name in fields if hasattr(given, name)],
        known=fields,
        where=directories(given.checkpoints),
        print_line=say,
        tune_arguments=["--data", given.input] if is_data else [],
    )


def _parsed(parser: CommandParser, arguments: Sequence[str]) -> argparse.Namespace:
    try:
        given = parser.parse_args(without_other_flags(arguments, print_line, parser))
        if given.config is not None:
            for name, value in read_settings(given.config, (EngineConfig,), print_line).items():
                if not hasattr(given, name):  # the command line overrides the file
                    setattr(given, name, value)
        return given
    except ConfigError as error:
        parser.error(str(error))


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="headrace run",
        usage="headrace run INPUT -o OUTPUT [options]",
        description="Answer every line of a file of prompts. A job that was interrupted continues when the same "
        "command is run again.",
        epilog=EPILOG,
    )
    add_job_flags(parser)
    add_table_flags(parser)
    add_sampling_flags(
        parser,
        "for lines that do not set them",
        max_tokens="longest answer, in tokens (default: messages, to the end of the context; a prompt, 256; "
        "/v1/completions, 16)",
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML or YAML file with engine options as keys")
    add_auto_flags(parser)
    add_engine_flags(parser, ALIASES)
    return parser


def _check(job: JobSpec, given: argparse.Namespace) -> int:
    """Problems and the report are the output of this command, so they go to stdout."""
    from headrace.jobs.preflight.check import check_job
    from headrace.jobs.preflight.front import open_front
    from headrace.jobs.preflight.rate import Rate

    rate = None if given.rate is None else Rate.read(given.rate)
    report = check_job(job, open_front(job.config), report_problem=print, rate=rate)
    if not given.quiet:
        sys.stdout.write(report.text())
    if given.json_summary is not None:
        _write_json(report.as_json(), given.json_summary)
    return report.exit_code


def _print_report(report: JobReport, given: argparse.Namespace) -> None:
    from headrace.jobs.status.summary import headline, location, print_summary

    if not given.quiet:
        with contextlib.suppress(OSError, ValueError):  # stderr has gone; the answers are written
            print_summary(report, sys.stderr)
    elif report.exit_code:
        print_line(f"{headline(report)}; {location(report)}")
    if given.json_summary is not None:
        _write_json(report.as_json(), given.json_summary)


def _write_checkpoint(report: JobReport, job: JobSpec, given: argparse.Namespace, arguments: Sequence[str]) -> None:
    from headrace.checkpoint.create import from_job
    from headrace.checkpoint.document import write_checkpoint
    from headrace.checkpoint.jobs import arguments_to_run_again, workload_of_job

    can_run_again = os.path.isfile(given.input) and job.redo is None
    again = arguments_to_run_again(arguments, given.input)
    if job.auto_settings is not None:  # by name: another checkpoint may be found later
        settings = job.auto_settings["settings"]
        again += flags_of({name: value for name, value in settings.items() if not hasattr(given, name)})
    facts = from_job(
        report.as_json(),
        command=shlex.join(["headrace", "run", *arguments]),
        workload=workload_of_job(job, num_requests=report.num_before + report.tally.num_done),
        arguments=again if can_run_again else None,
    )
    write_checkpoint(facts, given.checkpoint)
    if not given.quiet:
        print_line(f"checkpoint: {given.checkpoint}")


def _write_json(summary: dict[str, Any], path: str) -> None:
    import msgspec

    from headrace.errors import JobError

    try:
        with open(path, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(summary)) + b"\n")
    except OSError as error:
        raise JobError(f"the summary cannot be written to {path}: {error.strerror}") from error
