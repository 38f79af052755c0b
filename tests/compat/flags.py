"""The flags of `vllm serve`, read from the source of a checkout, and what becomes of each here. Nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from headrace.cli import serve
from headrace.other_settings import find_other

SOURCES = ("vllm/engine/arg_utils.py", "vllm/entrypoints/cli/serve.py")
FIELDS = "vllm/entrypoints/openai/cli_args.py"  # here also the fields of classes are flags


@dataclass(frozen=True)
class Flags:
    """The long flags of a checkout."""

    names: Collection[str]

    @cached_property
    def outcomes(self) -> dict[str, str]:
        """By flag: same, ignored, refused or unknown."""
        own = set(serve.build_parser().flags)
        found = {name: find_other(name) for name in self.names}
        return {
            name: "same" if name in own else "unknown" if other is None else other.other.outcome
            for name, other in sorted(found.items())
        }

    @property
    def unknown(self) -> list[str]:
        return [name for name, outcome in self.outcomes.items() if outcome == "unknown"]

    @property
    def summary(self) -> str:
        outcomes = list(self.outcomes.values())
        counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("same", "ignored", "refused", "unknown"))
        unknown = f" ({', '.join(self.unknown)})" if self.unknown else ""
        return f"Its {len(outcomes)} long flags in the source of this commit: {counts}{unknown}."


def flags_of(checkout: Path) -> Flags | None:
    """None: the checkout has other files."""
    if not (checkout / FIELDS).exists():
        return None
    trees = [ast.parse((checkout / path).read_text(encoding="utf-8")) for path in (*SOURCES, FIELDS)]
    return Flags({*(name for tree in trees for name in _arguments(tree)), *_fields(trees[-1])})


def _arguments(tree: ast.Module) -> Iterator[str]:
    """The names in calls of `add_argument`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = [word.value for word in node.args if isinstance(word, ast.Constant)]
            yield from (name for name in names if isinstance(name, str) and name.startswith("--"))


def _fields(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
            yield from ("--" + field.id.replace("_", "-") for field in fields if isinstance(field, ast.Name))
