"""`headrace bench sweep`: measures a list of settings and ranks them."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.bench.flags import (
    RECORDS,
    add_checkpoint_flag,
    add_engine_choice,
    add_load_flags,
    add_output_flags,
    add_workload_flags,
    engine_of,
    loads_of,
    model_of,
    settings_of,
    workload_of,
)
from headrace.cli.bench.measure import num_requests_of_all, slo_of
from headrace.cli.bench.output import check_output, finish, say, write_checkpoint_of
from headrace.cli.fetching import fetch_if_missing
from headrace.cli.parser import CommandParser
from headrace.config import EMBEDDED_MODEL, EngineConfig
from headrace.errors import ConfigError
from headrace.other_settings import explanation

if TYPE_CHECKING:
    from headrace.bench.engines import Engine, RunningEngine
    from headrace.bench.load import Load
    from headrace.bench.slo import Slo
    from headrace.bench.sweep.run import Measure
    from headrace.bench.workloads import Workload

EPILOG = """\
configs.json is a list of settings, or an object of them by name:
  [{"name": "chunked 8k", "enable_chunked_prefill": true, "max_num_batched_tokens": 8192},
   {"enable_chunked_prefill": false, "max_num_seqs": 128}]

The same command continues a sweep that was interrupted, or that has new configs.

exit codes:
  0    all configs were tried; those that failed are rows of the table
  1    no config could be measured
  2    wrong usage, or a setting that does not exist
  75   stopped early (Ctrl-C, a full disk): run the same command again to continue"""

RESUMABLE, FAILED = 75, 1


def main(arguments: Sequence[str]) -> int:
    parser = build_parser()
    given = parser.parse_intermixed_args(arguments)  # MODEL may stand after options

    from headrace.bench.sweep import Sweep, read_configs, run_sweep
    from headrace.bench.sweep.journal import SUFFIX
    from headrace.checkpoint.document import SUFFIX as SUFFIX_OF_CHECKPOINT

    try:
        check_output(given)
        if given.url:
            raise ConfigError("a sweep starts its engine with each config; --url cannot be restarted")
        engine, model, loads, slo = engine_of(given), model_of(given), loads_of(given), slo_of(given)
        known = _known_settings(given, engine)
        configs = read_configs(given.configs, known=known, is_product=given.product, explain=explanation)
        if engine.name == "headrace":
            fetch_if_missing(model or EMBEDDED_MODEL, quiet=given.quiet)
        workload, notes = workload_of(given, model, num_requests_of_all(loads))
        sweep = Sweep(
            configs=configs,
            engine=engine,
            workload=workload,
            measure=measure_of(given, loads, slo),
            serves=bool(loads),
            num_rounds=given.rounds,
            is_interleaved=given.interleave,
            rank_by=given.rank_by or ("goodput_requests_per_s" if slo else "output_tokens_per_s"),
            common={"model": model or EMBEDDED_MODEL, **settings_of(given)},
            identity={
                "model": model_identity(model),
                "version": engine_version(engine),
                "loads": [load.as_json() for load in loads],
                "slo": given.slo,
            },
            retries_failed=given.retry_failed,
        )
    except ConfigError as error:
        parser.error(str(error))
    for note in notes:
        say(note)
    output = given.output or Path(RECORDS) / f"{given.configs.stem}.sweep.json"
    given.output, given.html = output, given.html or output.with_suffix(".html")
    result = run_sweep(sweep, output.with_suffix(SUFFIX), _quiet if given.quiet else say)
    finish(given, result.as_record())
    _write_settings(result.as_record(), output)
    if result.best is not None:
        write_checkpoint_of(result.as_record(), given.checkpoint or output.with_suffix(SUFFIX_OF_CHECKPOINT))
    if result.stopped is not None:
        say(f"stopped early: {result.stopped}. The same command continues")
        return RESUMABLE
    return 0 if result.best is not None else FAILED


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="headrace bench sweep",
        usage="headrace bench sweep CONFIGS [MODEL] [options]",
        description="Start, verify, measure and stop an engine with each of a list of settings, and rank them. A "
        "config that fails is a row of the table, with the reason.",
        epilog=EPILOG,
    )
    parser.add_argument("configs", type=Path, metavar="CONFIGS", help="a JSON file with a list of settings")
    add_engine_choice(parser)
    add_workload_flags(parser)
    add_load_flags(parser)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each config (%(default)s)")
    parser.add_argument(
        "--interleave", action="store_true", help="all configs once, then all again: a fairer comparison"
    )
    parser.add_argument(
        "--product", action="store_true", help="a list as a value means one config for each of its values"
    )
    parser.add_argument("--rank-by", metavar="FIGURE", help="default: output_tokens_per_s, or goodput with --slo")
    parser.add_argument("--retry-failed", action="store_true", help="try configs that failed before again")
    add_output_flags(parser)
    add_checkpoint_flag(parser, default="beside the record")
    return parser


def _known_settings(given: argparse.Namespace, engine: Engine) -> list[str]:
    if engine.name == "vllm":
        from headrace.bench.engines.vllm_engine import VllmEngine

        assert isinstance(engine, VllmEngine)
        return sorted(engine.setting_names(serves=bool(loads_of(given))))
    return [field.name for field in dataclasses.fields(EngineConfig) if field.name != "model"]


def measure_of(given: argparse.Namespace, loads: Sequence[Load], slo: Slo | None) -> Measure:
    """One round of a config."""
    from headrace.bench.offline import ONE_ROUND, measure_offline
    from headrace.bench.online import Client, measure_online

    def online(running: RunningEngine, workload: Workload) -> dict[str, Any]:
        client = Client(timeout_s=given.timeout, num_processes=given.client_processes)
        measured = measure_online(running, workload, loads, slo=slo, client=client, commit=given.commit)
        if measured.was_interrupted:
            raise KeyboardInterrupt
        return measured.record

    def offline(running: RunningEngine, workload: Workload) -> dict[str, Any]:
        record = measure_offline(running, workload, num_rounds=1, commit=given.commit)
        record["warnings"] = [warning for warning in record["warnings"] if warning != ONE_ROUND]  # the sweep has others
        return record

    return online if loads else offline


def engine_version(engine: Engine) -> str:
    """Rounds of another version are not used again; nor are those of another commit of Headrace."""
    from headrace.bench.engines.vllm_engine import VllmEngine
    from headrace.hardware.describe import current_commit
    from headrace.version import __version__

    if isinstance(engine, VllmEngine):
        return engine.installation.version
    return f"{__version__} {current_commit()}"


def model_identity(model: str | None) -> str:
    """The digest of a model's files: other weights under the same name are another sweep."""
    from headrace.bench.engines.shapes import SHAPES
    from headrace.models.digests import digest_of_local_model

    name = model or EMBEDDED_MODEL
    return name if name in SHAPES else digest_of_local_model(name) or name


def _write_settings(record: dict[str, Any], output: Path) -> None:
    from headrace.bench.report.sweep import best_settings

    found = best_settings(record)
    if found is not None:
        path = output.with_suffix(found[0])
        path.write_text(found[1], encoding="utf-8")
        say(f"settings of the best config: {path}")


def _quiet(line: str) -> None:
    pass
