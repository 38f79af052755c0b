"""`headrace quantize`: writes a checkpoint with weights of eight or four bits, with its measured loss."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.models import size_text
from headrace.cli.parser import CommandParser
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.quantize.quantize import OnStage, Report

KINDS = ("fp8", "int8", "int4")


def main(arguments: Sequence[str]) -> int:
    given = build_parser().parse_args(arguments)
    from headrace.quantize.quantize import Request, quantize_checkpoint, read_texts

    data = None if given.data is None else read_texts(_existing(given.data))
    request = Request(
        model=given.model,
        kind=given.to,
        output=given.output,
        data=data,
        device=_device(given.device),
        evaluates=not given.no_evaluate,
        revision=given.revision,
    )
    with _progress() as on_stage:
        report = quantize_checkpoint(request, on_stage)
    _print(report, given)
    return 0


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="headrace quantize",
        usage="headrace quantize MODEL --to fp8|int8|int4 -o DIR [--data FILE]",
        description="Writes a checkpoint with quantized weights, which Headrace, transformers and vLLM read, and "
        "measures its perplexity and the agreement of its most likely tokens with the original's.",
        epilog="examples:\n  headrace quantize Qwen/Qwen3-0.6B --to int4 -o qwen3-int4 --data prompts.jsonl\n"
        "  headrace quantize ./model --to fp8 -o model-fp8",
    )
    parser.add_argument("model", metavar="MODEL", help="a model directory, or a hub id such as owner/name")
    parser.add_argument("--to", required=True, choices=KINDS, help="fp8, int8 (both with activations), or int4 weights")
    parser.add_argument(
        "-o", "--output", required=True, type=Path, metavar="DIR", help="a directory that does not exist"
    )
    parser.add_argument(
        "--data", type=Path, metavar="FILE", help="texts to calibrate with: int8 by SmoothQuant, fp8 and int4 by GPTQ"
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where to compute")
    parser.add_argument("--no-evaluate", action="store_true", help="do not measure the loss")
    parser.add_argument("--revision", metavar="R", help="branch, tag or commit of a hub model")
    return parser


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ConfigError(f"--data: there is no file {path}")
    return path


def _device(given: str) -> str:
    import torch

    if given == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA GPU; use --device cpu")
    return given if given != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def _progress() -> Iterator[OnStage]:
    """Shows a bar for each stage on a terminal, one line elsewhere, both on stderr."""
    if not sys.stderr.isatty():
        seen: set[str] = set()

        def tell(name: str, done: int, total: int) -> None:
            if name not in seen:
                seen.add(name)
                print(f"headrace: {name} ...", file=sys.stderr, flush=True)

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("headrace: {task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def show(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done, total=total)

        yield show


def _print(report: Report, given: argparse.Namespace) -> None:
    print(f"{given.output}: {size_text(report.num_bytes)}, {report.kind}, {report.method}")
    if report.perplexity is None or report.perplexity_before is None or report.agreement is None:
        return
    loss = report.perplexity / report.perplexity_before - 1.0
    print(f"perplexity    {report.perplexity_before:.4f} before, {report.perplexity:.4f} after ({loss:+.2%})")
    print(f"agreement     {report.agreement:.1%} of the most likely tokens are the original's")
    print(f"measured with {report.evaluated_with}")
