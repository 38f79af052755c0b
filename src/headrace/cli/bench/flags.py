"""The flags that benchmarks share: engine, workload, load, and where the record goes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.checkpoint import writable
from headrace.cli.engine_flags import add_engine_flags
from headrace.cli.parser import CommandParser
from headrace.config import EMBEDDED_MODEL, EngineConfig
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.bench.engines import Engine
    from headrace.bench.load import Load
    from headrace.bench.workloads import Workload, WorkloadSpec

ENGINES = ("headrace", "vllm", "openai")
RECORDS = "headrace-bench"  # directory of records whose place is not given
# Token ids below this are in the vocabulary of every model that people serve; used where the vocabulary is unknown.
SMALLEST_VOCABULARY = 30_000


def add_engine_choice(parser: CommandParser) -> None:
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    group = parser.add_argument_group("what is measured")
    group.add_argument("--engine", choices=ENGINES, help="default: headrace, or openai with --url")
    group.add_argument("--url", metavar="URL", help="the address of a server that is running: http://host:8000")
    group.add_argument(
        "--api-key-env", metavar="NAME", default="OPENAI_API_KEY", help="variable with the key for --url (%(default)s)"
    )
    group.add_argument("--vllm-python", metavar="PATH", help="the Python of the environment that vLLM is installed in")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the engine that has no flag here; VALUE is JSON or text; may be repeated",
    )
    group.add_argument(
        "--start-timeout", type=float, default=900.0, metavar="S", help="for an engine to start (%(default)g)"
    )
    add_engine_flags(parser)


def add_workload_flags(parser: CommandParser) -> None:
    group = parser.add_argument_group("workload", "'headrace bench workloads' lists the named ones")
    group.add_argument("--workload", metavar="NAME", help="default: uniform, or chat for a model with random weights")
    group.add_argument("--data", metavar="FILE", help="prompts, ShareGPT conversations or a trace, instead of a name")
    group.add_argument("--lengths-only", action="store_true", help="with --data: random tokens of the same lengths")
    group.add_argument("--skip-bad-lines", action="store_true", help="with --data: leave out what cannot be read")
    group.add_argument("--num-requests", type=int, metavar="N", help="of each load level, or of the workload offline")
    group.add_argument("--input-len", type=int, metavar="N", help="tokens of a prompt")
    group.add_argument("--output-len", type=int, metavar="N", help="tokens of an answer")
    group.add_argument("--spread", type=float, metavar="X", help="share by which these lengths vary (random)")
    group.add_argument("--prefix-len", type=int, metavar="N", help="tokens of a shared prefix (random, prefix)")
    group.add_argument("--num-prefixes", type=int, metavar="N", help="number of different shared prefixes")
    group.add_argument("--prefix-share", type=float, metavar="X", help="share of the requests that have one")
    group.add_argument(
        "--ends",
        choices=("exact", "eos", "random"),
        help="how an answer ends: after --output-len tokens (exact, default), when the model ends it (eos), or by "
        "chance (random, for random weights); with eos and random no engine knows a length in advance",
    )
    group.add_argument("--temperature", type=float, metavar="X", help="of sampling (default: 1)")
    group.add_argument("--workload-seed", type=int, metavar="N", help="of lengths and tokens")


def add_load_flags(parser: CommandParser) -> None:
    group = parser.add_argument_group("load", "any of these measures over HTTP; without them, all requests at once")
    group.add_argument("--concurrency", type=numbers(int), metavar="N,...", help="closed loop; several draw a curve")
    group.add_argument("--rate", type=numbers(float), metavar="X,...", help="open loop: requests/s; inf: all at once")
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="of --rate: 1 is Poisson, less is bursty, inf is constant",
    )
    group.add_argument("--trace", action="store_true", help="send requests at the times that --data gives")
    group.add_argument(
        "--trace-speed", type=float, default=1.0, metavar="X", help="times as fast as recorded (%(default)g)"
    )
    group.add_argument("--seconds", type=float, metavar="S", help="of each level, instead of --num-requests")
    group.add_argument("--max-concurrency", type=int, metavar="N", help="of an open loop or a trace")
    group.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of one request (%(default)g)")
    group.add_argument("--client-processes", type=int, metavar="N", help="default: by concurrency and cores")
    group.add_argument("--slo", metavar="TEXT", help="such as 'ttft:p99<300ms;tpot:p95<40ms;success>=0.999'")
    group.add_argument(
        "--plain-openai", action="store_true", help="leave out vLLM's own request fields, which other servers refuse"
    )


def add_output_flags(parser: CommandParser) -> None:
    group = add_report_flags(parser)
    group.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help=f"the record: .json, or .jsonl to append (default: in {RECORDS}/)",
    )
    group.add_argument("--quiet", action="store_true", help="no progress")
    group.add_argument("--commit", help=argparse.SUPPRESS)  # where the code lies outside of a checkout


def add_checkpoint_flag(parser: CommandParser, default: str = "none") -> None:
    parser.add_argument(
        "--checkpoint",
        type=writable,
        metavar="FILE",
        help=f"write the result as a checkpoint, for 'headrace checkpoint verify' (default: {default})",
    )


def add_report_flags(parser: CommandParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("output")
    group.add_argument("--html", type=Path, metavar="FILE", help="the report as one page (default: beside the record)")
    group.add_argument("--markdown", type=Path, metavar="FILE", help="the report as Markdown")
    return group


def model_of(given: argparse.Namespace) -> str | None:
    """The model's name, positional or as a flag."""
    flag = getattr(given, "model", None)
    if given.positional_model is not None and flag not in (None, given.positional_model):
        raise ConfigError(f"two models are given, {given.positional_model!r} and --model {flag!r}; give one")
    model = given.positional_model or flag
    return None if model is None else str(model)


def settings_of(given: argparse.Namespace) -> dict[str, Any]:
    """The engine settings that were given, under vLLM's names."""
    names = [field.name for field in dataclasses.fields(EngineConfig) if field.name != "model"]
    settings = {name: getattr(given, name) for name in names if hasattr(given, name)}
    for item in given.set:
        name, has_value, text = item.partition("=")
        if not has_value or not name:
            raise ConfigError(f"--set needs NAME=VALUE, got {item!r}")
        try:
            settings[name.replace("-", "_")] = json.loads(text)
        except ValueError:
            settings[name.replace("-", "_")] = text
    if not given.url and given.engine in (None, "headrace"):
        EngineConfig(**{name: value for name, value in settings.items() if name in names})  # refuses impossible values
    return settings


def engine_of(given: argparse.Namespace, *, run_timeout_s: float | None = None) -> Engine:
    """The engine of a command line, not started. `run_timeout_s` limits one run of a workload in process."""
    from headrace.bench.engines.headrace_engine import HeadraceEngine
    from headrace.bench.engines.openai_engine import OpenAIEngine

    name = given.engine or ("openai" if given.url else "headrace")
    model = model_of(given)
    if name == "openai":
        if not given.url:
            raise ConfigError("--engine openai needs --url, the address of a server that is running")
        return OpenAIEngine(given.url, model=model, api_key=api_key_of(given))
    if given.url:
        raise ConfigError(f"--url is for a server that is running; --engine {name} starts one. Leave out --engine")
    if name == "vllm":
        if model is None:
            raise ConfigError("--engine vllm needs a model: a directory or a hub id")
        from headrace.bench.engines.vllm_engine import VllmEngine

        return VllmEngine(
            model, python=given.vllm_python, start_timeout_s=given.start_timeout, run_timeout_s=run_timeout_s
        )
    return HeadraceEngine(model or EMBEDDED_MODEL, start_timeout_s=given.start_timeout, run_timeout_s=run_timeout_s)


def api_key_of(given: argparse.Namespace) -> str | None:
    """The key for --url. Servers that are started here have none."""
    return os.environ.get(given.api_key_env) if given.url else None


def workload_spec_of(given: argparse.Namespace, model: str | None) -> WorkloadSpec:
    from headrace.bench.engines.shapes import SHAPES
    from headrace.bench.workloads import WorkloadSpec

    if given.data is not None and given.workload is not None:
        raise ConfigError("--data and --workload are both given; give one")
    if given.lengths_only and given.data is None:
        raise ConfigError("--lengths-only is for --data")
    name = "data" if given.data else given.workload or ("chat" if model in SHAPES else "uniform")
    optional = {
        "num_requests": given.num_requests,
        "seed": given.workload_seed,
        "input_len": given.input_len,
        "output_len": given.output_len,
        "prefix_len": given.prefix_len,
        "num_prefixes": given.num_prefixes,
        "spread": given.spread,
        "prefix_share": given.prefix_share,
        "ends": given.ends,
        "temperature": given.temperature,
    }
    values = {key: value for key, value in optional.items() if value is not None}
    return WorkloadSpec(name=name, uses_lengths_only=given.lengths_only, **values)


def workload_of(
    given: argparse.Namespace, model: str | None, num_requests: int | None = None
) -> tuple[Workload, list[str]]:
    """The workload of a command line, and notes. `num_requests` is how many its load levels need together."""
    from headrace.bench.workloads import build, read_workload

    spec = workload_spec_of(given, model)
    checkpoint = _checkpoint_of(given, model)
    spec = spec.for_vocabulary(checkpoint.spec.vocab_size if checkpoint else _vocabulary_of(model))
    if given.data is None:
        return build(dataclasses.replace(spec, num_requests=num_requests or spec.num_requests)), []
    counts = None
    if checkpoint is not None:
        from headrace.text import load_tokenizer

        tokenizer = load_tokenizer(checkpoint.text)

        def counts(text: str) -> int:
            return len(tokenizer.encode(text))

    if num_requests is not None:
        spec = dataclasses.replace(spec, num_requests=None)
    return read_workload(given.data, spec, count_tokens=counts, skips_bad_lines=given.skip_bad_lines)


def loads_of(given: argparse.Namespace) -> list[Load]:
    """The load levels of a command line; none: offline."""
    from headrace.bench.load import Trace
    from headrace.bench.online import loads_of

    if given.trace:
        if given.concurrency or given.rate or given.seconds:
            raise ConfigError(
                "--trace sends requests at the times of its file; leave out --concurrency, --rate, --seconds"
            )
        if not given.data:
            raise ConfigError("--trace needs --data, a file with arrival times")
        return [Trace(speed=given.trace_speed, num_requests=given.num_requests, max_concurrency=given.max_concurrency)]
    concurrency = given.concurrency or ([] if given.rate or not (given.url or given.slo) else [1, 4, 16, 64])
    return loads_of(
        concurrency=concurrency,
        rates=given.rate or [],
        burstiness=given.burstiness,
        num_requests=given.num_requests,
        seconds=given.seconds,
        max_concurrency=given.max_concurrency,
        seed=given.workload_seed or 0,
    )


def _checkpoint_of(given: argparse.Namespace, model: str | None) -> Any:
    """The model's config and tokenizer if this machine has them; None for shapes and addresses."""
    from headrace.bench.engines.shapes import SHAPES
    from headrace.models import open_checkpoint

    if given.url or model in SHAPES:
        return None
    if getattr(given, "engine", None) == "vllm" and not Path(model or "").exists():
        return None
    return open_checkpoint(model or EMBEDDED_MODEL, load_format=getattr(given, "load_format", "auto"))


def _vocabulary_of(model: str | None) -> int:
    from headrace.bench.engines.shapes import SHAPES

    return int(SHAPES[model]["vocab_size"]) if model in SHAPES else SMALLEST_VOCABULARY


def numbers(kind: type) -> Any:
    def parse(text: str) -> Sequence[Any]:
        try:
            return [kind(part) for part in text.split(",") if part.strip()]
        except ValueError:
            raise argparse.ArgumentTypeError(f"numbers separated by commas are needed, got {text!r}") from None

    return parse
