"""`--auto` of `run` and `serve`: settings from the checkpoint for this model, machine and kind of workload.

    --checkpoints DIR, or  ./headrace-tune  ->  ./headrace-bench  ->  the user's data directory

The first directory that has one decides. Flags and --config win over the checkpoint. Imports no torch.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.bench.flags import RECORDS
from headrace.cli.engine_flags import flag_of
from headrace.cli.parser import CommandParser
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.checkpoint.find import FoundCheckpoint, WorkloadKind

TUNES = "headrace-tune"  # directory of records and checkpoints of `headrace tune` whose place is not given
# Which model it is, and which answers it gives: never taken from a checkpoint.
OF_THE_USER = frozenset({"model", "tokenizer", "revision", "load_format", "seed"})
CHANGES_NUMBERS = ("dtype", "quantization", "kv_cache_dtype")

PrintLine = Callable[[str], None]


@dataclass(frozen=True)
class AutoSettings:
    """What a checkpoint sets, without what the user sets. `path` is None if there is none."""

    path: Path | None
    settings: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {"checkpoint": None if self.path is None else str(self.path), "settings": dict(self.settings)}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> AutoSettings:
        path = facts.get("checkpoint")
        return cls(None if path is None else Path(path), dict(facts.get("settings") or {}))


def add_auto_flags(parser: CommandParser) -> None:
    group = parser.add_argument_group("settings that were found", "by 'headrace tune' or 'headrace bench sweep'")
    group.add_argument(
        "--auto",
        action="store_true",
        help="use the checkpoint for this model, machine and kind of workload; flags given here win",
    )
    group.add_argument(
        "--checkpoints",
        type=_directory,
        metavar="DIR",
        help=f"where --auto looks (default: {TUNES}/, {RECORDS}/, then the user's data directory)",
    )


def check_auto_flags(parser: CommandParser, given: argparse.Namespace) -> None:
    if given.checkpoints is not None and not given.auto:
        parser.error("--checkpoints says where --auto looks: add --auto")


def user_directory() -> Path:
    """For checkpoints that hold for all directories of this user: `headrace/checkpoints` in the data directory."""
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "headrace" / "checkpoints"


def directories(given: Path | None) -> list[Path]:
    return [given] if given is not None else [Path(TUNES), Path(RECORDS), user_directory()]


def find_auto_settings(
    model: str,
    workload_kind: WorkloadKind,
    *,
    revision: str | None,
    given: Collection[str],
    known: Collection[str],
    where: Sequence[Path],
    print_line: PrintLine,
    tune_arguments: Sequence[str] = (),
) -> AutoSettings:
    """Look a checkpoint up and say what is found. `given` are names that the user sets, `known` those that can be set;
    `tune_arguments` complete the command that would make a checkpoint."""
    found = _find(model, revision, workload_kind, where)
    if found is None:
        places = ", ".join(map(str, where))
        command = shlex.join(["headrace", "tune", model, "--goal", workload_kind, *tune_arguments])
        print_line(
            f"auto: no checkpoint for {model}, this machine and a workload of kind {workload_kind} in {places}; "
            f"continuing with automatic settings. To find better ones: {command}"
        )
        return AutoSettings(None, {})
    settings = _settings_of(found, known)
    applied = {name: value for name, value in settings.items() if name not in given}
    _say_found(found, settings, applied, print_line)
    return AutoSettings(found.path, applied)


@contextmanager
def names_checkpoint(auto: AutoSettings | None) -> Iterator[None]:
    """An error about settings names the checkpoint that they come from."""
    try:
        yield
    except ConfigError as error:
        if auto is None or auto.path is None or not auto.settings:
            raise
        raise ConfigError(
            f"{error}. With --auto, settings come from {auto.path} ({shown(auto.settings)}): leave out --auto, set "
            "what is refused by flag, or tune again"
        ) from error


def _find(model: str, revision: str | None, kind: WorkloadKind, where: Sequence[Path]) -> FoundCheckpoint | None:
    from headrace.checkpoint.create import hub_digest
    from headrace.checkpoint.find import find_checkpoint
    from headrace.hardware.describe import machine_facts
    from headrace.models.digests import digest_of_local_model

    present = [directory for directory in where if directory.is_dir()]
    digest = (digest_of_local_model(model) or hub_digest(model, revision)) if present else None
    if digest is None:
        return None
    machine = machine_facts()
    for directory in present:
        found = find_checkpoint(directory, model_digest=digest, machine=machine, workload_kind=kind)
        if found is not None:
            return found
    return None


def _settings_of(found: FoundCheckpoint, known: Collection[str]) -> dict[str, Any]:
    """The settings that were given when it was measured. What this version does not know is an error."""
    from headrace.checkpoint.rerun import settings_given

    settings = {name: value for name, value in settings_given(found.checkpoint).items() if name not in OF_THE_USER}
    if unknown := [name for name in settings if name not in known]:
        raise ConfigError(
            f"the checkpoint {found.path} sets {', '.join(unknown)}, which this command does not have; it is of "
            f"headrace {found.checkpoint.at('versions', 'headrace')}: tune again, or leave out --auto"
        )
    return settings


def _say_found(
    found: FoundCheckpoint, settings: Mapping[str, Any], applied: Mapping[str, Any], print_line: PrintLine
) -> None:
    from headrace.checkpoint.document import EDITED

    checkpoint = found.checkpoint
    print_line(f"auto: {found.path}: {checkpoint.at('decision', 'text')}")
    if checkpoint.was_edited:
        print_line(f"auto: warning: {EDITED}")
    if checkpoint.at("decision", "verdict") == "not confirmed":
        print_line("auto: warning: the search was stopped before its choice was confirmed")
    print_line(f"auto: settings from it: {shown(applied) or 'none, the automatic ones were kept'}")
    if overridden := [name for name in settings if name not in applied]:
        print_line(f"auto: given here, and not taken from it: {', '.join(overridden)}")
    if numbers := [name for name in CHANGES_NUMBERS if name in applied]:
        print_line(f"auto: {', '.join(numbers)} changes the numbers that are computed, so answers may differ")
    if differing := _differences(found):
        print_line(f"auto: since then these changed: {'; '.join(differing)}")


def _differences(found: FoundCheckpoint) -> list[str]:
    """Versions, driver and commit that are not those of the checkpoint."""
    from headrace.checkpoint.facts import differences, sentence
    from headrace.hardware.describe import current_commit, machine_facts, package_versions

    before = {key: found.checkpoint.facts.get(key) for key in ("machine", "versions", "commit")}
    now = {"machine": machine_facts(), "versions": package_versions(), "commit": current_commit()}
    kept = [each for each in differences(before, now) if each.group in ("driver", "package", "commit")]
    return [sentence(each) for each in kept]


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """The same settings as flags of a command line."""
    words: list[str] = []
    for name, value in settings.items():
        if isinstance(value, bool):
            words.append(flag_of(name) if value else flag_of(f"no_{name}"))
        elif value is not None:
            words += [flag_of(name), str(value)]
    return words


def shown(settings: Mapping[str, Any]) -> str:
    from headrace.bench.values import plain

    return ", ".join(f"{name}={plain(value)}" for name, value in settings.items())


def _directory(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a directory")
    return Path(text)
