"""Starts a few lines of each large prefix group early, so that a group of long answers is not discovered last."""

from __future__ import annotations

from collections import Counter

from headrace.jobs.planning.answer_lengths import NUM_PROBES
from headrace.jobs.planning.pending import Kind, Pending, kind_of

MIN_PROBED = 4 * NUM_PROBES  # lines of a group; for smaller ones an early start does not pay off


def choose_probes(items: list[Pending], unstarted: set[Kind]) -> list[Pending]:
    """The first items of each large unstarted kind, which should start before all others."""
    if not unstarted:
        return []
    sizes = Counter(kind for item in items if (kind := kind_of(item)) in unstarted and not item.is_exact)
    wanted = {kind: NUM_PROBES for kind, size in sizes.items() if size >= MIN_PROBED}
    probes: list[Pending] = []
    for item in items if wanted else ():
        kind = kind_of(item)
        if not item.is_exact and wanted.get(kind, 0) > 0:
            wanted[kind] -= 1
            probes.append(item)
    return probes
