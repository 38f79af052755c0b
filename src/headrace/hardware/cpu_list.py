"""Lists of CPUs as Linux writes them: `0-3,8,10-11`."""

from __future__ import annotations

from collections.abc import Iterable

MAX_CPUS = 1 << 16  # a larger number is no CPU


def parse_cpu_list(text: str | None) -> frozenset[int]:
    """Empty if the text is missing, empty or no such list."""
    cpus: set[int] = set()
    for part in (text or "").strip().split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) >= MAX_CPUS:
            return frozenset()
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def cpu_list(cpus: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1][1:] = [cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs)
