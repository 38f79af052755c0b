"""Flags for sampling: defaults that a request may override."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from headrace.cli.engine_flags import flag_of
from headrace.cli.parser import CommandParser
from headrace.errors import RequestError
from headrace.types import SamplingParams

# The names are those of SamplingParams. `tests/openai/test_sampling_fields.py` lists the fields that are no flags.
FLAGS: dict[str, dict[str, Any]] = {
    "max_tokens": {"type": int, "metavar": "N", "help": "longest answer, in tokens"},
    "min_tokens": {"type": int, "metavar": "N", "help": "shortest answer, in tokens (default: 0)"},
    "temperature": {"type": float, "metavar": "X", "help": "0 always takes the most likely token (default: 1)"},
    "top_p": {"type": float, "metavar": "X", "help": "sample from the most likely tokens of this joint probability"},
    "top_k": {"type": int, "metavar": "N", "help": "sample from this many of the most likely tokens"},
    "min_p": {"type": float, "metavar": "X", "help": "leave out tokens below this share of the largest probability"},
    "repetition_penalty": {
        "type": float,
        "metavar": "X",
        "help": "above 1, earlier tokens become less likely",
    },
    "presence_penalty": {
        "type": float,
        "metavar": "X",
        "help": "subtracted from the logits of the answer's tokens",
    },
    "frequency_penalty": {"type": float, "metavar": "X", "help": "the same, once for each occurrence"},
    "stop": {"action": "append", "metavar": "TEXT", "help": "end the answer before this text; may be repeated"},
    "ignore_eos": {"action": "store_true", "help": "continue after the end-of-sequence token"},
}


def add_sampling_flags(parser: CommandParser, description: str, **changed_help: str) -> None:
    group = parser.add_argument_group("sampling", description)
    for name, options in FLAGS.items():
        help = changed_help.get(name, options["help"])
        group.add_argument(flag_of(name), dest=name, default=argparse.SUPPRESS, **{**options, "help": help})


def sampling_defaults(parser: CommandParser, given: argparse.Namespace) -> Mapping[str, Any]:
    """The given flags, checked: a value that no request could use is a usage error."""
    defaults = {name: getattr(given, name) for name in FLAGS if hasattr(given, name)}
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        parser.error(str(error))
    return defaults
