"""The facts that rules judge, whichever way they were read. A fact that is not known is None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from headrace.doctor.readers.command_line import CommandLine
    from headrace.plan.gpus import Gpu
    from headrace.plan.shape import ModelShape

Source = Literal["live", "offline", "online", "sweep", "job", "command"]

# What a fact is called where it is reported as missing.
NAMES = {
    "seconds": "the length of the interval",
    "num_steps": "the number of steps",
    "num_requests": "the number of finished requests",
    "prompt_tokens": "prompt tokens",
    "output_tokens": "generated tokens",
    "num_running": "running sequences",
    "num_waiting": "waiting requests",
    "kv_use": "KV cache use",
    "num_preemptions": "preemptions",
    "recomputed_tokens": "tokens computed again",
    "prefix_queried_tokens": "prefix cache queries",
    "prefix_hit_tokens": "prefix cache hits",
    "prefix_hit_share": "prefix cache hits and queries",
    "evicted_tokens": "evicted tokens of cached prefixes",
    "tokens_per_step": "tokens per step",
    "host_share": "host and wait time of a step",
    "prompt_share": "prompt and generated tokens",
    "mean_batch": "running sequences",
    "prompt_len": "prompt lengths",
    "longest_prompts": "prompt lengths (p95)",
    "token_gap_p50_s": "inter-token latency (p50)",
    "token_gap_p99_s": "inter-token latency (p99)",
    "event_loop_lag_p95_s": "the server's event loop lag",
    "gpu_utilization": "GPU utilisation",
    "client": "the load generator's own cost",
    "num_refused": "refused requests",
    "unanswered_share": "refused and failed requests",
    "acceptance": "draft tokens and accepted ones",
    "limited_by_seconds": "time under each bottleneck of the job",
    "model": "the model's shape (--model NAME, as for headrace plan)",
    "gpu": "the GPU (--gpu NAME, as for headrace plan)",
    "command": "a command line",
}


@dataclass(frozen=True, kw_only=True)
class ClientCost:
    """What a load generator needed, as `bench/load/cost.py` measures it."""

    cpu_share: float | None = None  # of one core, the busiest process
    loop_lag_p99_ms: float | None = None
    send_late_p99_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Facts of one interval. Counts are of the interval, shares are between 0 and 1, lengths are in tokens."""

    source: Source
    origin: str  # an address, a path or a command
    engine: str | None = None  # "headrace", "vllm" or another name
    seconds: float | None = None
    num_steps: float | None = None
    num_requests: float | None = None  # that ended
    prompt_tokens: float | None = None  # cached ones included
    output_tokens: float | None = None
    num_running: float | None = None
    num_waiting: float | None = None
    num_in_flight: float | None = None  # kept by the clients of a closed loop
    kv_use: float | None = None  # the highest seen
    num_preemptions: float | None = None
    recomputed_tokens: float | None = None
    prefix_queried_tokens: float | None = None
    prefix_hit_tokens: float | None = None
    evicted_tokens: float | None = None  # of cached prefixes
    tokens_per_step: float | None = None
    host_seconds: float | None = None  # of the engine loop
    wait_seconds: float | None = None  # of the engine loop, for the device
    prompt_len: float | None = None  # mean
    longest_prompts: float | None = None  # p95
    output_len: float | None = None  # mean
    ttft_p95_s: float | None = None
    queue_p95_s: float | None = None
    token_gap_p50_s: float | None = None
    token_gap_p99_s: float | None = None
    event_loop_lag_p75_s: float | None = None
    event_loop_lag_p95_s: float | None = None
    gpu_utilization: float | None = None
    client: ClientCost | None = None
    num_answered: float | None = None
    num_refused: float | None = None
    num_failed: float | None = None  # errors and timeouts
    draft_tokens: float | None = None
    accepted_tokens: float | None = None
    limited_by_seconds: Mapping[str, float] | None = None  # of a job, by the words of `jobs/status/bottleneck.py`
    settings: Mapping[str, Any] = field(default_factory=dict)  # in force; a name that is absent is not known
    given: frozenset[str] = frozenset()  # settings that the user gave
    is_on_cpu: bool | None = None
    model: ModelShape | None = None
    gpu: Gpu | None = None
    command: CommandLine | None = None
    remarks: tuple[str, ...] = ()  # what a reader of this evidence must know

    @property
    def is_measured(self) -> bool:
        return self.source != "command"

    @property
    def prompt_tokens_per_s(self) -> float | None:
        return _ratio(self.prompt_tokens, self.seconds)

    @property
    def output_tokens_per_s(self) -> float | None:
        return _ratio(self.output_tokens, self.seconds)

    @property
    def computed_prompt_tokens(self) -> float | None:
        """Prompt tokens without those found in the prefix cache."""
        if self.prompt_tokens is None:
            return None
        return max(0.0, self.prompt_tokens - (self.prefix_hit_tokens or 0.0))

    @property
    def prompt_share(self) -> float | None:
        """Share of computed tokens that were of prompts."""
        if self.computed_prompt_tokens is None or self.output_tokens is None:
            return None
        return _ratio(self.computed_prompt_tokens, self.computed_prompt_tokens + self.output_tokens)

    @property
    def mean_batch(self) -> float | None:
        """Sequences that decode in a step: tokens generated per step, or the running sequences that were seen."""
        if self.num_running is not None:
            return self.num_running
        return _ratio(self.output_tokens, self.num_steps)

    @property
    def prefix_hit_share(self) -> float | None:
        return _ratio(self.prefix_hit_tokens, self.prefix_queried_tokens)

    @property
    def host_share(self) -> float | None:
        """Of the time of steps. An engine without steps has host time too: it starts a profile, loads an adapter."""
        if self.host_seconds is None or self.wait_seconds is None or self.num_steps == 0:
            return None
        return _ratio(self.host_seconds, self.host_seconds + self.wait_seconds)

    @property
    def acceptance(self) -> float | None:
        return _ratio(self.accepted_tokens, self.draft_tokens)

    @property
    def unanswered_share(self) -> float | None:
        """Refused and failed requests, of all."""
        if self.num_answered is None or self.num_refused is None:
            return None
        unanswered = self.num_refused + (self.num_failed or 0.0)
        return _ratio(unanswered, unanswered + self.num_answered)

    @property
    def mean_context(self) -> float | None:
        """Tokens in the cache per decoding sequence, on average: the prompt and half of the answer."""
        if self.prompt_len is None or self.output_len is None:
            return None
        return self.prompt_len + self.output_len / 2

    @property
    def cache_tokens(self) -> float | None:
        """Tokens that the KV cache holds."""
        size = self.number("kv_cache_size_tokens")
        if size is not None:
            return size
        num_blocks = self.number("num_gpu_blocks") or self.number("num_blocks")
        block_size = self.number("block_size")
        return None if num_blocks is None or block_size is None else num_blocks * block_size

    @property
    def cache_dtype(self) -> str:
        return str(self.settings.get("kv_cache_dtype", self.settings.get("cache_dtype", "auto")))

    @property
    def has_fp8_cache(self) -> bool:
        return self.cache_dtype.startswith(("fp8", "float8"))

    def figures(self) -> dict[str, float]:
        """Every number that is known, derived ones included."""
        derived = ("prompt_tokens_per_s", "output_tokens_per_s", "prompt_share", "prefix_hit_share", "host_share")
        names = [*(each.name for each in fields(self)), *derived, "acceptance", "unanswered_share"]
        values = {name: getattr(self, name) for name in names}
        return {
            name: value
            for name, value in values.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }

    def number(self, setting: str) -> float | None:
        """A setting that is a number."""
        value = self.settings.get(setting)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def has(self, fact: str) -> bool:
        """Whether a fact is known. A name in brackets is a setting."""
        if fact.startswith("["):
            return fact.strip("[]") in self.settings
        return getattr(self, fact) is not None

    def missing(self, facts: tuple[str, ...]) -> list[str]:
        """Those that are not known, in words."""
        return [
            NAMES.get(fact, fact.replace("_", " ")) if not fact.startswith("[") else f"the setting {fact.strip('[]')}"
            for fact in facts
            if not self.has(fact)
        ]


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
