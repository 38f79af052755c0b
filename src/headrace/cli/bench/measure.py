"""`headrace bench [MODEL]`: measures a workload, in process or over HTTP."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.cli.bench.flags import (
    add_checkpoint_flag,
    add_engine_choice,
    add_load_flags,
    add_output_flags,
    add_workload_flags,
    api_key_of,
    engine_of,
    loads_of,
    model_of,
    settings_of,
    workload_of,
)
from headrace.cli.bench.output import ProgressLine, check_output, finish, say, write_checkpoint_of
from headrace.cli.fetching import fetch_if_missing
from headrace.cli.parser import CommandParser
from headrace.config import EMBEDDED_MODEL
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.bench.engines import RunningEngine
    from headrace.bench.load import Load, Progress
    from headrace.bench.slo import Slo
    from headrace.bench.workloads import Workload

EPILOG = """\
examples:
  headrace bench                                         the default model, offline
  headrace bench Qwen/Qwen3-0.6B --data prompts.jsonl    with your own prompts
  headrace bench --concurrency 1,4,16,64                 a throughput-latency curve of a server that this starts
  headrace bench --url http://host:8000 --rate 2,4,8 --seconds 60 --slo 'ttft:p99<300ms;success>=0.999'
  headrace bench --engine vllm --vllm-python /opt/vllm/bin/python MODEL
  headrace bench llama-3.1-8b --workload decode          a known shape with random weights

subcommands:
  batching     what batching gives: one at a time, static and continuous batches
  sweep        measure a list of settings and rank them
  compare      two records, with confidence intervals
  report       a record as a page, as Markdown or on the terminal
  workloads    the named workloads

exit codes:
  0    measured
  1    the engine did not start, or died: what was measured before is in the record
  2    wrong usage
  130  stopped by Ctrl-C: what was measured is in the record"""

FAILED, STOPPED = 1, 130


def main(arguments: Sequence[str]) -> int:
    parser = build_parser()
    given = parser.parse_args(arguments)
    try:
        check_output(given)
        model, settings, loads = model_of(given), settings_of(given), loads_of(given)
        slo = slo_of(given)
        engine = engine_of(given)
        if not given.url and (given.engine or "headrace") == "headrace":
            fetch_if_missing(model or EMBEDDED_MODEL, quiet=given.quiet)
        workload, notes = workload_of(given, model, num_requests_of_all(loads))
    except ConfigError as error:
        parser.error(str(error))
    for note in notes:
        say(note)
    if not given.quiet:
        say(f"starting {engine.name}: {len(workload.requests):,} requests of workload {workload.name!r}")
    with engine.start(settings, serves=bool(loads)) as running:
        if not given.quiet and not given.url:
            say(f"{engine.name} is ready after {running.start_s or 0.0:.1f} s")
        if loads:
            return _online(given, running, workload, loads, slo)
        return _offline(given, running, workload)


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="headrace bench",
        usage="headrace bench [MODEL] [options]\n       headrace bench SUBCOMMAND ...",
        description="Measure a workload: Headrace, vLLM, or any OpenAI-compatible server. Offline, all requests are "
        "given at once to an engine in a process of its own; with a load, they are streamed over HTTP.",
        epilog=EPILOG,
    )
    add_engine_choice(parser)
    add_workload_flags(parser)
    add_load_flags(parser)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="offline: timed rounds (%(default)s)")
    parser.add_argument("--no-warm-up", action="store_true", help="online: measure from the first request on")
    add_output_flags(parser)
    add_checkpoint_flag(parser)
    return parser


def slo_of(given: argparse.Namespace) -> Slo | None:
    from headrace.bench.slo import Slo

    return None if given.slo is None else Slo.parse(given.slo)


def num_requests_of_all(loads: Sequence[Load]) -> int | None:
    """What all levels need together, so that each has prompts of its own."""
    from headrace.bench.online import num_requests_of

    counts = [num_requests_of(load) for load in loads]
    return sum(count for count in counts if count is not None) or None


def _offline(given: argparse.Namespace, running: RunningEngine, workload: Workload) -> int:
    from headrace.bench.offline import measure_offline

    def on_round(number: int, figures: dict[str, Any]) -> None:
        if not given.quiet:
            rate = figures["output_tokens_per_s"]
            say(f"round {number} of {given.rounds}: {figures['seconds']:.2f} s, {rate:,.1f} output tokens/s")

    record = measure_offline(running, workload, num_rounds=given.rounds, commit=given.commit, on_round=on_round)
    finish(given, record)
    if given.checkpoint is not None:
        write_checkpoint_of(record, given.checkpoint)
    return FAILED if "failure" in record else 0


def _online(
    given: argparse.Namespace, running: RunningEngine, workload: Workload, loads: Sequence[Load], slo: Slo | None
) -> int:
    from headrace.bench.online import Client, measure_online

    line = ProgressLine(is_quiet=given.quiet)

    def on_progress(load: Load, progress: Progress) -> None:
        of = "" if progress.num_requests is None else f" of {progress.num_requests:,}"
        lost = progress.num_done - progress.counts.get("ok", 0)
        line.show(
            f"{load}: {progress.num_done:,}{of} requests, {progress.seconds:.0f} s"
            + (f", {lost:,} not answered" if lost else ""),
            progress.seconds,
        )

    def on_level(level: dict[str, Any]) -> None:
        line.clear()

    measured = measure_online(
        running,
        workload,
        loads,
        slo=slo,
        client=Client(
            headers={"Authorization": f"Bearer {key}"} if (key := api_key_of(given)) else None,
            timeout_s=given.timeout,
            num_processes=given.client_processes,
            compatibility="openai" if given.plain_openai else "vllm",
        ),
        warms_up=not given.no_warm_up,
        commit=given.commit,
        on_level=on_level,
        on_progress=on_progress,
    )
    finish(given, measured.record, measured.rows)
    if given.checkpoint is not None and not measured.was_interrupted:
        write_checkpoint_of(measured.record, given.checkpoint)
    if measured.was_interrupted:
        return STOPPED
    return FAILED if "failure" in measured.record else 0
