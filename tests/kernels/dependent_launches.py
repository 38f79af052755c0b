"""Tells from a kernel's PTX whether it keeps the rules of `kernels/gpu/dependent_launch.py`."""

from __future__ import annotations

import re

_LABEL = re.compile(r"(\$\w+):")
_PREDICATE = re.compile(r"@!?%\w+\s+")
_BRANCH = re.compile(r"bra(?:\.uni)?\s+(\$\w+)")
_WRITES = re.compile(r"(?:st|red|atom)\.(?!shared|local)")
_ENDS = re.compile(r"(?:ret|exit)\b")
_WAIT = "griddepcontrol.wait"


def broken_rules(ptx: str) -> list[str]:
    """The instructions that a program may reach before it waits and must not: its end, and what writes to memory that
    others read."""
    instructions, places = _parsed(ptx)
    found, seen, paths = [], set(), [0]
    while paths:
        place = paths.pop()
        if place in seen or _WAIT in instructions[place]:
            continue
        seen.add(place)
        is_conditional = _PREDICATE.match(instructions[place]) is not None
        instruction = _PREDICATE.sub("", instructions[place], count=1)
        if _WRITES.match(instruction) or _ENDS.match(instruction):
            found.append(instruction)
        branch, ends = _BRANCH.match(instruction), _ENDS.match(instruction) is not None
        if branch is not None:
            paths.append(places[branch[1]])
        if is_conditional or (branch is None and not ends):
            paths.append(place + 1)
    return found


def _parsed(ptx: str) -> tuple[list[str], dict[str, int]]:
    """The instructions of the kernel, and which of them follows each label."""
    instructions: list[str] = []
    places: dict[str, int] = {}
    for line in map(str.strip, ptx[ptx.index(".entry") :].splitlines()):
        if (label := _LABEL.match(line)) is not None:
            places[label[1]] = len(instructions)
        elif re.match(r"[a-z@]", line):
            instructions.append(line)
    return instructions, places
