"""The rules, one family per file. Their order is that in which a bottleneck is looked for: what feeds the engine and
takes its results comes before the engine itself."""

from __future__ import annotations

from headrace.doctor.findings import Rule
from headrace.doctor.rules import batch, cache, command, features, load, memory, steps

RULES: tuple[Rule, ...] = (
    *command.RULES,
    *load.RULES,
    *cache.RULES,
    *batch.RULES,
    *steps.RULES,
    *features.RULES,
    *memory.RULES,
)
