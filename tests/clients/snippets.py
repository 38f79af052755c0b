"""Writes what docs/clients.md takes from the scripts, snippets and a table: `python -m tests.clients.snippets`.

In a script, a part stands between the lines `# docs: NAME` and `# docs: end`. On the page, the line
`<!-- SCRIPT: NAME, NAME -->` stands before a code block, which holds these parts and the imports that they use.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from itertools import pairwise
from pathlib import Path

from tests.clients.catalogue import CLIENTS

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/clients.md"
PLACE = re.compile(r"^<!-- (\w+\.py): ([\w, -]+) -->\n+```(\w+)\n.*?^```$", flags=re.MULTILINE | re.DOTALL)
PART = re.compile(r"^[ ]*# docs: (?!end)(\S+)\n(.*?)\n?^[ ]*# docs: end$", flags=re.MULTILINE | re.DOTALL)


def parts_of(script: Path) -> dict[str, str]:
    """The marked parts of a script, by name."""
    return {name: textwrap.dedent(text).strip("\n") for name, text in PART.findall(script.read_text(encoding="utf-8"))}


def imports_for(script: Path, code: str) -> list[str]:
    """The imports of the script whose names the code uses."""
    used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    groups: dict[bool, list[str]] = {True: [], False: []}  # the standard library first
    for node in ast.parse(script.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        module = node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
        node.names = [alias for alias in node.names if (alias.asname or alias.name).partition(".")[0] in used]
        if node.names and module.partition(".")[0] not in ("__future__", "tests"):
            groups[module.partition(".")[0] in sys.stdlib_module_names].append(ast.unparse(node))
    return ["\n".join(group) for group in groups.values() if group]


def block(script: Path, names: list[str], *, language: str, seen: set[str]) -> str:
    """The text of a code block. `seen`: the imports of earlier blocks for this script, to which its own are added."""
    found = parts_of(script)
    code = "\n\n".join(found[name] for name in names)
    if language != "python":
        return code
    groups = []
    for group in imports_for(script, code):
        new = [line for line in group.splitlines() if line not in seen]
        seen.update(new)
        groups += ["\n".join(new)] if new else []
    return _joined([*groups, *(found[name] for name in names)])


def _joined(pieces: list[str]) -> str:
    """Two empty lines around classes and functions, as the formatter wants them."""
    text = pieces[0]
    for before, after in pairwise(pieces):
        is_definition = any(piece.startswith(("class ", "def ", "@")) for piece in (before, after))
        text += ("\n\n\n" if is_definition else "\n\n") + after
    return text


def checks_of(script: Path) -> list[str]:
    """What a script exercises: the names of its checks."""
    functions = [node for node in ast.parse(script.read_text(encoding="utf-8")).body if isinstance(node, FUNCTIONS)]
    return [
        node.name.replace("_", " ")
        for node in functions
        if any(ast.unparse(one) == "check" for one in node.decorator_list)
    ]


def table() -> str:
    rows = ["| client | version | what the script exercises |", "| --- | --- | --- |"]
    for client in CLIENTS:
        checks = ", ".join(checks_of(client.script))
        rows.append(f"| [{client.name}](#{client.name}) | {client.version} | {checks} |")
    return "\n".join(rows)


def rewritten(page: str) -> str:
    """The page with its snippets and its table as the scripts have them."""
    page = re.sub(r"^\| client \|.*?\n(?=\n)", lambda _: table() + "\n", page, flags=re.MULTILINE | re.DOTALL)
    seen: dict[str, set[str]] = {}

    def replace(match: re.Match[str]) -> str:
        script, names, language = match.groups()
        text = block(HERE / script, names.split(", "), language=language, seen=seen.setdefault(script, set()))
        return f"<!-- {script}: {names} -->\n\n```{language}\n{text}\n```"

    return PLACE.sub(replace, page)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
