"""What may be changed: the settings of each engine that matter for speed, with the values that are worth a try.

Values are ladders around the default that is in force. A value that means the same on this workload as another one is
left out: with 48 requests, max_num_seqs of 64 and 256 are both 48.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from headrace.bench.workloads import Workload

LADDER = (2.0, 0.5, 4.0, 0.25)  # times the default, in the order in which they are tried
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
QUEUE_DELAYS_US = (2_000, 10_000)
MAX_MEMORY_SHARE = 0.95
MIN_TOKENS_PER_STEP = 16
# Settings whose other values need less memory per GPU: a config that changes one of them is no larger than another.
SAVES_MEMORY = frozenset({"quantization", "kv_cache_dtype", "tensor_parallel_size"})
# Headrace changes these without loading the weights again; vLLM none.
LIVE = frozenset(
    {"max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching", "capacity_policy"}
    | {"speculative_config", "kv_offload_gib"}
)


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting that is searched. `values` are those besides `default`, which is the value in force."""

    name: str
    values: tuple[Any, ...]
    default: Any
    needs_restart: bool = True
    grows_memory: bool = False
    changes_quality: bool = False
    why: str = ""

    @property
    def is_ladder(self) -> bool:
        """Whether neighbouring values are alike: numbers in order."""
        return all(_is_number(value) for value in (*self.values, self.default))

    @property
    def ladder(self) -> list[Any]:
        """All values in order, the default among them."""
        return sorted({*self.values, self.default}) if self.is_ladder else [self.default, *self.values]

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "values": list(self.values),
            "default": self.default,
            "needs_restart": self.needs_restart,
            "grows_memory": self.grows_memory,
            "changes_quality": self.changes_quality,
            "why": self.why,
        }


@dataclass(frozen=True, slots=True)
class Demand:
    """What the workload asks of an engine, as far as values of knobs depend on it."""

    num_requests: int
    num_prompt_tokens: int | None  # None: only the engine knows

    @classmethod
    def of(cls, workload: Workload) -> Demand:
        lens = [request.num_prompt_tokens for request in workload.requests]
        known = [length for length in lens if length is not None]
        if len(known) < len(lens) or not known:
            return cls(len(lens), None)
        return cls(len(lens), sum(known))


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What the knobs are derived from."""

    engine: str
    serves: bool
    in_force: Mapping[str, Any]  # values of the default, as the engine reports them
    demand: Demand
    known: Collection[str]  # names of the engine's settings
    fixed: Collection[str] = ()  # settings that the user gave: they are not searched
    allows_quality_change: bool = False
    is_gpu: bool = False
    num_gpus: int = 0
    searched: Mapping[str, Sequence[Any]] | None = None  # --search: only these knobs, with these values


class Knobs:
    """The knobs of a search, and what a config of them means on this workload."""

    def __init__(self, knobs: Sequence[Knob], space: Space) -> None:
        self.all = list(knobs)
        self.by_name = {knob.name: knob for knob in knobs}
        self._space = space

    def value(self, settings: Mapping[str, Any], name: str) -> Any:
        """The value of a setting in a config, which may leave it to the default."""
        return settings.get(name, self.by_name[name].default)

    def effective(self, settings: Mapping[str, Any]) -> tuple[Any, ...]:
        """What the engine does with these settings on this workload: equal for configs that differ in name only."""
        values = {name: self.value(settings, name) for name in self.by_name}
        seqs, tokens = values.get("max_num_seqs"), values.get("max_num_batched_tokens")
        if _is_number(seqs):
            if _is_number(tokens) and "max_num_seqs" not in settings:
                seqs = min(seqs, tokens)  # the engine's own choice is never above the tokens of a step
            values["max_num_seqs"] = seqs if self._space.serves else min(seqs, self._space.demand.num_requests)
        if _is_number(tokens):
            if not values.get("enable_chunked_prefill", self._space.in_force.get("enable_chunked_prefill", True)):
                tokens = max(tokens, self._context)
            values["max_num_batched_tokens"] = min(tokens, self._most_tokens)
        return tuple(repr(values[name]) for name in sorted(values))

    def problem(self, settings: Mapping[str, Any]) -> str | None:
        """Why the engine would refuse this combination; None if nothing is known against it."""
        full = {**self._space.in_force, **settings}
        seqs, tokens = full.get("max_num_seqs"), settings.get("max_num_batched_tokens")
        if "max_num_seqs" in settings and tokens is None and _is_number(full.get("max_num_batched_tokens")):
            tokens = None if self._space.engine == "headrace" else full["max_num_batched_tokens"]
        if "max_num_seqs" in settings and _is_number(seqs) and _is_number(tokens) and seqs > tokens:
            return f"max_num_seqs={seqs} needs at least as many tokens a step, and max_num_batched_tokens is {tokens}"
        if full.get("enable_chunked_prefill") is False and _is_number(tokens) and tokens < self._context:
            return f"without chunked prefill, max_num_batched_tokens must be at least {self._context}"
        return None

    def restart_key(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Equal for configs between which a running engine can change."""
        return tuple(repr(self.value(settings, knob.name)) for knob in self.all if knob.needs_restart)

    @property
    def _context(self) -> int:
        found = self._space.in_force.get("max_model_len")
        return int(found) if _is_number(found) else 0

    @property
    def _most_tokens(self) -> float:
        """The most tokens that a step of this workload can have: all prompts at once."""
        total = self._space.demand.num_prompt_tokens
        return float("inf") if total is None or self._space.serves else total


def find_knobs(space: Space) -> Knobs:
    """The knobs of a space. One without another value than the default is left out."""
    found = [knob for knob in _all(space) if knob.name in space.known and knob.name not in space.fixed]
    if space.searched is not None:
        by_name = {knob.name: knob for knob in found}
        found = [_searched(name, values, by_name.get(name), space) for name, values in space.searched.items()]
    knobs = Knobs(found, space)
    kept = [_distinct(knob, knobs, keeps_all=space.searched is not None) for knob in found]
    return Knobs([knob for knob in kept if knob.values], space)


def _all(space: Space) -> Iterable[Knob]:
    default = space.in_force.get

    def knob(name: str, values: Iterable[Any], why: str, **more: Any) -> Knob:
        needs_restart = space.engine != "headrace" or name not in LIVE
        own = tuple(value for value in dict.fromkeys(map(_hashable, values)) if value != default(name))
        return Knob(name, own, default(name), needs_restart=needs_restart, why=why, **more)

    if _is_number(seqs := default("max_num_seqs")):
        base = seqs if space.serves else min(seqs, space.demand.num_requests)
        yield knob("max_num_seqs", _ladder(base, 1), "sequences in one step", grows_memory=True)
    if _is_number(tokens := default("max_num_batched_tokens")):
        values = _ladder(tokens, MIN_TOKENS_PER_STEP)
        yield knob("max_num_batched_tokens", values, "tokens in one step", grows_memory=True)
    for name, why in (
        ("enable_prefix_caching", "reuses the KV cache of shared prefixes"),
        ("enable_chunked_prefill", "splits prompts over steps"),
    ):
        if isinstance(default(name), bool):
            yield knob(name, [not default(name)], why)
    if default("capacity_policy") is not None:
        policies = ("max_utilization", "guaranteed_no_evict")
        yield knob("capacity_policy", policies, "preempts, or starts only what can finish")
    if space.engine == "vllm":
        modes = ("throughput", "interactivity") if space.serves else ("throughput",)
        yield knob("performance_mode", modes, "vLLM's own choice of limits and graphs", grows_memory=True)
    if _is_number(size := default("block_size")):
        yield knob("block_size", [2 * size, size // 2], "tokens in a block of the cache")
    if not space.is_gpu and _is_number(threads := default("num_threads")):
        yield knob("num_threads", [n for n in (threads // 2, threads - 1) if n >= 1], "CPU threads of the model")
    if space.is_gpu:
        yield from _gpu_knobs(space, knob)
    elif space.allows_quality_change and space.engine == "headrace":
        yield knob("kv_cache_dtype", ["fp8"], "fewer bytes of keys and values", changes_quality=True)
        yield knob("quantization", ["int8", "int4"], "weights of eight or four bits", changes_quality=True)
    if space.serves and space.engine == "headrace":
        yield knob("max_queue_delay_us", QUEUE_DELAYS_US, "batching delay of the server")
    yield knob("speculative_config", [NGRAM], "speculates with n-grams of the prompt", grows_memory=True)


def _gpu_knobs(space: Space, knob: Callable[..., Knob]) -> Iterable[Knob]:
    share = space.in_force.get("gpu_memory_utilization")
    if not _is_number(share) or share < MAX_MEMORY_SHARE:
        yield knob("gpu_memory_utilization", [MAX_MEMORY_SHARE], "memory of the KV cache", grows_memory=True)
    if space.num_gpus > 1:
        sizes = [1 << power for power in range(space.num_gpus.bit_length()) if 1 << power <= space.num_gpus]
        yield knob("tensor_parallel_size", sizes, "GPUs that share one copy of the model")
    if space.allows_quality_change:
        yield knob("kv_cache_dtype", ["fp8"], "twice the tokens in the cache", changes_quality=True)
        yield knob("quantization", ["fp8", "int4"], "weights of eight or four bits", changes_quality=True)


def _searched(name: str, values: Sequence[Any], knob: Knob | None, space: Space) -> Knob:
    """A knob with the user's values."""
    default = space.in_force.get(name)
    own = tuple(value for value in dict.fromkeys(map(_hashable, values)) if value != default)
    if knob is None:
        needs_restart = space.engine != "headrace" or name not in LIVE
        changes_quality = name in ("kv_cache_dtype", "quantization", "dtype")
        return Knob(name, own, default, needs_restart, changes_quality=changes_quality, why="as given")
    return Knob(
        name, own, default, knob.needs_restart, knob.grows_memory, knob.changes_quality, f"{knob.why}; values as given"
    )


def _distinct(knob: Knob, knobs: Knobs, *, keeps_all: bool) -> Knob:
    """Without the values that mean the same as the default or as another value."""
    seen, kept = {knobs.effective({})}, []
    for value in knob.values:
        key = knobs.effective({knob.name: value})
        if key not in seen and (keeps_all or knobs.problem({knob.name: value}) is None):
            seen.add(key)
            kept.append(value)
    return Knob(
        knob.name, tuple(kept), knob.default, knob.needs_restart, knob.grows_memory, knob.changes_quality, knob.why
    )


def _ladder(default: float, minimum: int) -> list[int]:
    return [max(minimum, int(default * times)) for times in LADDER]


def _hashable(value: Any) -> Any:
    return _Dict(value) if isinstance(value, dict) else value


class _Dict(dict[str, Any]):
    """A mapping as a value of a knob."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))


def _is_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
