"""`headrace bench batching`: what batching gives, static and continuous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.cli.bench.flags import (
    add_engine_choice,
    add_output_flags,
    add_workload_flags,
    engine_of,
    model_of,
    numbers,
    settings_of,
    workload_of,
)
from headrace.cli.bench.output import check_output, finish, say
from headrace.cli.fetching import fetch_if_missing
from headrace.cli.parser import CommandParser
from headrace.config import EMBEDDED_MODEL
from headrace.errors import ConfigError


def main(arguments: Sequence[str]) -> int:
    parser = build_parser()
    given = parser.parse_args(arguments)
    given.workload = given.workload or (None if given.data else "mixed")

    from headrace.bench.batching import BATCH_SIZES, BATCHES, measure_batching

    try:
        check_output(given)
        sizes = given.batch_sizes or BATCH_SIZES
        if given.url:
            raise ConfigError("batching starts its engine with several batch sizes; --url cannot be restarted")
        model, settings, engine = model_of(given), settings_of(given), engine_of(given)
        if engine.name == "headrace":
            fetch_if_missing(model or EMBEDDED_MODEL, quiet=given.quiet)
        workload, notes = workload_of(given, model, given.num_requests or BATCHES * max(sizes))
    except ConfigError as error:
        parser.error(str(error))
    for note in notes:
        say(note)

    def on_row(row: dict[str, Any]) -> None:
        if given.quiet:
            return
        found = row["failure"]["message"] if "failure" in row else f"{row['output_tokens_per_s']:,.1f} output tokens/s"
        say(f"batch size {row['batch_size']}, {row.get('batching', 'failed')}: {found}")

    record = measure_batching(
        engine,
        workload,
        settings,
        batch_sizes=sizes,
        num_rounds=given.rounds,
        commit=given.commit,
        on_row=on_row,
    )
    finish(given, record)
    return 0


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="headrace bench batching",
        usage="headrace bench batching [MODEL] [options]",
        description="One table: one sequence at a time, then static and continuous batches of each size. Answers have "
        "different lengths (workload 'mixed'), as in real use: a static batch waits for its longest.",
    )
    add_engine_choice(parser)
    add_workload_flags(parser)
    parser.add_argument("--batch-sizes", type=numbers(int), metavar="N,...", help="default: 1,16,64")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="timed rounds of each (%(default)s)")
    add_output_flags(parser)
    return parser
