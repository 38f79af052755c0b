"""`headrace tune`: searches an engine's settings for a workload, and proves what it finds against the default."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.auto import TUNES
from headrace.cli.bench.flags import (
    add_checkpoint_flag,
    add_engine_choice,
    add_report_flags,
    add_workload_flags,
    api_key_of,
    engine_of,
    model_of,
    settings_of,
    workload_of,
)
from headrace.cli.bench.output import check_output, report_of, say, show, write_checkpoint_of
from headrace.cli.bench.sweep import engine_version, model_identity
from headrace.cli.fetching import fetch_if_missing
from headrace.cli.parser import CommandParser
from headrace.config import EMBEDDED_MODEL, EngineConfig
from headrace.errors import ConfigError, nearest

if TYPE_CHECKING:
    from headrace.bench.engines import Engine
    from headrace.tune.goal import Goal
    from headrace.tune.spec import Tune

BUDGET = "20m"
MIN_RUN_TIMEOUT_S = 120.0  # of one trial; the budget allows more
SERVER_SETTINGS = ("max_queue_delay_us", "preferred_batch_size")  # of `headrace serve`, that may be searched
SERVE_REQUESTS = 2048  # of a named workload with --goal serve: a load level takes as many as it needs
SLO_EXAMPLE = "headrace tune --goal serve --slo 'ttft:p95<500ms;tpot:p95<100ms'"

EPILOG = """\
examples:
  headrace tune                                          the default model and its CPU workload, 20 minutes
  headrace tune Qwen/Qwen3-0.6B --data prompts.jsonl     for a batch job of your own prompts
  headrace tune MODEL --goal serve --slo 'ttft:p95<500ms;tpot:p95<100ms' --budget 1h
  headrace tune --engine vllm --vllm-python /opt/vllm/bin/python MODEL --data prompts.jsonl
  headrace tune --search max_num_seqs=64,128,256 --search enable_prefix_caching=true,false

A setting that is given as a flag or with --set holds for all configs and is not searched. The same command continues a
search that was interrupted.

exit codes:
  0    a decision was made: a tuned config, or the default
  1    the default could not be measured
  2    wrong usage, or a setting that does not exist
  75   stopped early (Ctrl-C, a full disk): run the same command again to continue"""

RESUMABLE, FAILED = 75, 1


def main(arguments: Sequence[str]) -> int:
    parser = build_parser()
    given = parser.parse_intermixed_args(arguments)  # MODEL may stand after options

    from headrace.tune.run import run_tune

    try:
        check_output(given)
        tune, notes = _tune_of(given)
    except ConfigError as error:
        parser.error(str(error))
    for note in notes:
        say(note)
    output = given.output or Path(TUNES) / f"{_file_name(given)}.tune.json"
    result = run_tune(tune, output.with_suffix(".journal"), _quiet if given.quiet else say)
    record = result.as_record()
    _finish(given, record, output)
    if result.stopped is not None:
        say(f"stopped early: {result.stopped}")
    if result.is_resumable:
        return RESUMABLE
    return FAILED if result.decision is None or result.configs[0].failure is not None else 0


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="headrace tune",
        usage="headrace tune [MODEL] [options]",
        description="Find the settings with which an engine is fastest for a workload. A shortlist of configs races in "
        "rounds of growing size; the best are measured against the default, interleaved. The answer is a ratio with "
        "its 95 % interval, and may be that no difference is shown.",
        epilog=EPILOG,
    )
    add_engine_choice(parser)
    add_workload_flags(parser)
    group = parser.add_argument_group("search")
    group.add_argument(
        "--goal",
        choices=("batch", "serve"),
        default="batch",
        help="batch: output tokens/s of all requests at once; serve: requests/s that meet --slo (default: %(default)s)",
    )
    group.add_argument("--slo", metavar="TEXT", help="with --goal serve: such as 'ttft:p95<500ms;tpot:p95<100ms'")
    group.add_argument("--budget", metavar="TIME", default=BUDGET, help="such as 90s, 20m, 1h (default: %(default)s)")
    group.add_argument(
        "--search",
        action="append",
        default=[],
        metavar="NAME=V1,V2,...",
        help="search these values of a setting, and no setting that is not named this way; may be repeated",
    )
    group.add_argument(
        "--allow-quality-change",
        action="store_true",
        help="also search precisions that change answers (FP8), and show how many tokens agree with the default's",
    )
    group.add_argument("--retry-failed", action="store_true", help="try configs that failed before again")
    group.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of one request (%(default)g)")
    output = add_report_flags(parser)
    output.add_argument("-o", "--output", type=Path, metavar="FILE", help=f"the record, .json (default: in {TUNES}/)")
    output.add_argument("--quiet", action="store_true", help="no progress")
    add_checkpoint_flag(parser, default="beside the record")
    return parser


def _tune_of(given: argparse.Namespace) -> tuple[Tune, list[str]]:
    from headrace.tune.budget import parse_budget
    from headrace.tune.spec import Tune

    goal, budget_s = _goal_of(given), parse_budget(given.budget)
    if given.url and not goal.serves:
        raise ConfigError(
            f"--url is for --goal serve: only the load of a running server can be searched. {SLO_EXAMPLE}"
        )
    engine = engine_of(given, run_timeout_s=max(MIN_RUN_TIMEOUT_S, budget_s / 4))
    model, settings = model_of(given), settings_of(given)
    known = _known_settings(engine, serves=goal.serves)
    searched = _searched(given.search, known, settings)
    if engine.name == "headrace":
        fetch_if_missing(model or EMBEDDED_MODEL, quiet=given.quiet)
    num_requests = SERVE_REQUESTS if goal.serves and given.num_requests is None and not given.data else None
    workload, notes = workload_of(given, model, num_requests)
    name = model or EMBEDDED_MODEL
    common = settings if given.url else {"model": name, **settings}
    tune = Tune(
        engine=engine,
        workload=workload,
        goal=goal,
        budget_s=budget_s,
        known=known,
        common=common,
        searched=searched,
        allows_quality_change=given.allow_quality_change,
        can_change_settings=not given.url,
        identity={"model": model_identity(model), "version": engine_version(engine), "url": given.url},
        retries_failed=given.retry_failed,
        forecast=_forecast_of(name, workload, settings, goal),
    )
    return tune, notes


def _goal_of(given: argparse.Namespace) -> Goal:
    from headrace.bench.online import Client
    from headrace.bench.slo import Slo
    from headrace.tune.goal import BatchGoal, ServeGoal

    if given.goal == "batch":
        if given.slo is not None:
            raise ConfigError(f"--slo is for --goal serve; a batch has no latency. {SLO_EXAMPLE}")
        return BatchGoal()
    if given.slo is None:
        raise ConfigError(f"--goal serve needs --slo, the latencies that must be kept, for example: {SLO_EXAMPLE}")
    key = api_key_of(given)
    headers = {"Authorization": f"Bearer {key}"} if key else None
    return ServeGoal(Slo.parse(given.slo), Client(headers=headers, timeout_s=given.timeout))


def _known_settings(engine: Engine, *, serves: bool) -> list[str]:
    from headrace.bench.engines.vllm_engine import VllmEngine

    if isinstance(engine, VllmEngine):
        return sorted(engine.setting_names(serves=serves))
    names = [field.name for field in dataclasses.fields(EngineConfig) if field.name != "model"]
    return [*names, *(SERVER_SETTINGS if serves else ())]


def _searched(items: Sequence[str], known: Sequence[str], fixed: dict[str, Any]) -> dict[str, list[Any]] | None:
    """`--search` as values by name; None without any."""
    found: dict[str, list[Any]] = {}
    for item in items:
        name, has_values, text = item.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not has_values or not name or not text.strip():
            raise ConfigError(f"--search needs NAME=V1,V2,..., got {item!r}")
        if name not in known:
            raise ConfigError(f"--search: unknown setting {name!r}{nearest(name, known)}")
        if name in fixed:
            raise ConfigError(f"--search {name}: it is also given as a flag or with --set, which fixes it")
        found.setdefault(name, []).extend(_values(text))
    return found or None


def _values(text: str) -> list[Any]:
    """Values separated by commas, each JSON or text. One JSON list or object is one too."""
    text = text.strip()
    if text.startswith("["):
        try:
            return list(json.loads(text))
        except ValueError as error:
            raise ConfigError(f"--search: {text!r} is not a JSON list ({error})") from None
    return [_value(part.strip()) for part in text.split(",") if part.strip()]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _forecast_of(model: str, workload: Any, settings: dict[str, Any], goal: Goal) -> Any:
    """plan predicts the batch goal only: it knows no arrivals."""

    def forecast(machine: dict[str, Any]) -> Any:
        from headrace.tune.forecast import forecaster

        if goal.serves:
            return None
        gpus = [] if settings.get("device") == "cpu" else machine.get("gpus") or []
        return forecaster(
            model, workload, settings, gpu_title=str(gpus[0]["name"]) if gpus else None, num_gpus=len(gpus)
        )

    return forecast


def _finish(given: argparse.Namespace, record: dict[str, Any], output: Path) -> None:
    """Write the record, the settings file and the checkpoint, and show the report."""
    from headrace.bench.record import write_record
    from headrace.checkpoint.document import SUFFIX as SUFFIX_OF_CHECKPOINT

    output.parent.mkdir(parents=True, exist_ok=True)
    write_record(record, output)
    show(given, report_of(record), page=output.with_suffix(".html"))
    say(f"record: {output}")
    found = record["settings_file"]
    if found is not None:
        path = output.with_suffix(found["suffix"])
        path.write_text(found["text"], encoding="utf-8")
        say(f"settings: {path}")
    write_checkpoint_of(record, given.checkpoint or output.with_suffix(SUFFIX_OF_CHECKPOINT))


def _file_name(given: argparse.Namespace) -> str:
    model = model_of(given) or (EMBEDDED_MODEL if not given.url else "server")
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", Path(model).name if "/" in model else model).strip("-.")
    return f"{plain or 'model'}-{given.goal}"


def _quiet(line: str) -> None:
    pass
