"""Speed surfaces over settings, each with another best. The default has 1.0."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from tests.tune.builders import DEFAULTS, Surface

GRID: dict[str, tuple[Any, ...]] = {
    "max_num_seqs": (32, 64, 128, 256, 512),
    "max_num_batched_tokens": (128, 256, 512, 1024, 2048),
    "enable_prefix_caching": (True, False),
    "enable_chunked_prefill": (True, False),
    "capacity_policy": ("max_utilization", "guaranteed_no_evict"),
    "block_size": (8, 16, 32),
}


def steps(settings: Mapping[str, Any], name: str) -> float:
    """How often a value is doubled from the default."""
    return math.log2(settings[name] / DEFAULTS[name])


def flat(settings: Mapping[str, Any]) -> float:
    return 1.0


def larger_batches(settings: Mapping[str, Any]) -> float:
    """Saturates: more sequences pay, and more still pay less."""
    return 1.0 + 0.25 * math.tanh(steps(settings, "max_num_seqs"))


def smaller_batches(settings: Mapping[str, Any]) -> float:
    """A tight cache: fewer sequences preempt less, down to a peak at half the default."""
    return max(0.3, 1.25 - 0.25 * (steps(settings, "max_num_seqs") + 1.0) ** 2)


def long_prompts(settings: Mapping[str, Any]) -> float:
    """A larger token budget pays, if there are sequences to fill it; chunks cost."""
    tokens = math.tanh(steps(settings, "max_num_batched_tokens") / 1.5)
    gain = 1.0 + 0.3 * tokens
    return gain * (1.06 if not settings["enable_chunked_prefill"] else 1.0)


def two_limits(settings: Mapping[str, Any]) -> float:
    """Both limits must grow together: either alone gives little."""
    seqs, tokens = (steps(settings, name) for name in ("max_num_seqs", "max_num_batched_tokens"))
    together = min(seqs, tokens)
    return 1.0 + 0.15 * together - 0.03 * abs(seqs - tokens) if together < 2 else 1.3 - 0.03 * abs(seqs - tokens)


def switches(settings: Mapping[str, Any]) -> float:
    """Several settings, each with a small gain of its own."""
    speed = 1.0
    speed *= 1.07 if not settings["enable_prefix_caching"] else 1.0
    speed *= 1.06 if settings["block_size"] == 32 else 0.97 if settings["block_size"] == 8 else 1.0
    speed *= 1.08 if settings["max_num_seqs"] == 256 else 1.02 if settings["max_num_seqs"] > 256 else 1.0
    return speed


def one_trap(settings: Mapping[str, Any]) -> float:
    """Two changes that pay alone do not pay together."""
    no_cache, large = not settings["enable_prefix_caching"], settings["max_num_batched_tokens"] >= 1024
    return 0.9 if no_cache and large else 1.15 if large else 1.10 if no_cache else 1.0


def default_is_best(settings: Mapping[str, Any]) -> float:
    """Every change costs."""
    far = abs(steps(settings, "max_num_seqs")) + abs(steps(settings, "max_num_batched_tokens"))
    others = sum(settings[name] != DEFAULTS[name] for name in ("enable_prefix_caching", "enable_chunked_prefill"))
    return max(0.2, 1.0 - 0.08 * far - 0.1 * others)


SURFACES: dict[str, Surface] = {
    "flat": flat,
    "larger_batches": larger_batches,
    "smaller_batches": smaller_batches,
    "long_prompts": long_prompts,
    "two_limits": two_limits,
    "switches": switches,
    "one_trap": one_trap,
    "default_is_best": default_is_best,
}


def best_of(surface: Surface) -> float:
    """The best of an exhaustive grid."""
    return max(surface(dict(zip(GRID, values, strict=True))) for values in itertools.product(*GRID.values()))
