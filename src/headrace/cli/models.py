"""`headrace models`: lists, fetches and removes cached models, and lists the supported families."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.cli.parser import CommandParser
from headrace.config import EMBEDDED_MODEL
from headrace.errors import nearest

if TYPE_CHECKING:
    from headrace.models.cache import CachedModel

ACTIONS = ("list", "fetch", "remove", "families")


def main(arguments: Sequence[str]) -> int:
    parser = build_parser()
    given = parser.parse_args(arguments)
    _check(parser, given)
    if given.action == "fetch":
        _fetch(given.name, given.revision)
    elif given.action == "remove":
        _remove(given.name)
    elif given.action == "families":
        _print_families()
    else:
        _list()
    return 0


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="headrace models",
        usage="headrace models [list | fetch NAME [--revision R] | remove NAME | families]",
        description="Models on this machine: Headrace's own cache and the Hugging Face hub's.",
        epilog=f"examples:\n  headrace models\n  headrace models fetch {EMBEDDED_MODEL}\n"
        "  headrace models fetch Qwen/Qwen3-0.6B\n  headrace models remove Qwen/Qwen3-0.6B",
    )
    parser.add_argument(
        "action", nargs="?", default="list", metavar="ACTION", help="list (the default), fetch, remove, families"
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"'{EMBEDDED_MODEL}' or a hub id such as owner/name")
    parser.add_argument("--revision", metavar="R", help="fetch this branch, tag or commit of a hub model")
    return parser


def _check(parser: CommandParser, given: argparse.Namespace) -> None:
    if given.action not in ACTIONS:
        parser.error(
            f"unknown action {given.action!r}{nearest(given.action, ACTIONS)} (list, fetch, remove or families)"
        )
    takes_name = given.action in ("fetch", "remove")
    if not takes_name and given.name is not None:
        parser.error(f"{given.action} takes no name, got {given.name!r}")
    if takes_name and given.name is None:
        parser.error(f"{given.action} needs a NAME")
    if given.action != "fetch" and given.revision is not None:
        parser.error("--revision is only valid with fetch")


def _list() -> None:
    from headrace.models.cache import cached_models

    models = cached_models()
    if not models:
        print(f"No models in the cache. 'headrace models fetch {EMBEDDED_MODEL}' downloads the default model (98 MB).")
        return
    width = max(len("NAME"), *(len(model.name) for model in models))
    print(f"{'NAME':<{width}}  {'SIZE':>9}  PATH")
    for model in models:
        print(f"{model.name:<{width}}  {size_text(model.num_bytes):>9}  {model.path}")


def _fetch(name: str, revision: str | None) -> None:
    from headrace.cli.fetching import fetch_progress
    from headrace.models.sources import fetch

    with fetch_progress(name) as progress:
        path = fetch(name, revision=revision, progress=progress)
    print(f"{name} is at {path}")


def _remove(name: str) -> None:
    from headrace.models.cache import remove

    removed: CachedModel = remove(name)
    print(f"removed {removed.name} ({size_text(removed.num_bytes)}) from {removed.path}")


def _print_families() -> None:
    """Print the supported models as a Markdown table."""
    from headrace.models.families_table import table

    print(table(), end="")


def size_text(num_bytes: int) -> str:
    """Format bytes in decimal units, as disks and downloads do."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    amount, unit = num_bytes / 1000, "kB"
    for larger in ("MB", "GB", "TB"):
        if amount >= 1000:
            amount, unit = amount / 1000, larger
    return f"{amount:.1f} {unit}"
