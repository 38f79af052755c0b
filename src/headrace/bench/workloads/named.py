"""The named workloads. Lengths and tokens are fixed by seed, the same for every engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from headrace.bench.workloads.requests import BenchRequest, Workload
from headrace.bench.workloads.spec import Ends, WorkloadSpec
from headrace.errors import ConfigError, nearest

TOPICS = (
    "rivers",
    "the French revolution",
    "black holes",
    "bread",
    "chess",
    "the moon",
    "cats",
    "Rome",
    "steel",
    "music",
)
# With ends="random": how many token ids end an answer (engines take few), and how many times its mean length an answer
# may have before it is cut.
NUM_STOPS = 4
MAX_OVER_MEAN = 8


@dataclass(frozen=True, slots=True)
class Named:
    """A workload's maker, its defaults, and one sentence for `bench --list`."""

    make: Callable[[WorkloadSpec, random.Random], list[BenchRequest]]
    num_requests: int
    seed: int
    about: str
    ends: Ends = "exact"  # of a spec that says nothing else


def build(spec: WorkloadSpec) -> Workload:
    """Make the requests of a named workload."""
    if spec.name not in NAMED:
        raise ConfigError(f"unknown workload {spec.name!r}{nearest(spec.name, NAMED)} (known: {', '.join(NAMED)})")
    named = NAMED[spec.name]
    full = replace(
        spec,
        num_requests=named.num_requests if spec.num_requests is None else spec.num_requests,
        seed=named.seed if spec.seed is None else spec.seed,
        ends=named.ends if spec.ends == "exact" else spec.ends,
    )
    requests = named.make(full, random.Random(full.seed))
    return Workload(full, with_ends(full, requests))


def with_ends(spec: WorkloadSpec, requests: list[BenchRequest]) -> list[BenchRequest]:
    """With ends="random", let each answer use some token ids only, a few of which end it."""
    if spec.ends != "random":
        return requests
    rng = random.Random(spec.seed)
    mean = max(2, sum(request.output_len for request in requests) // len(requests))
    num_ids = min(NUM_STOPS * mean, spec.last_token_id - spec.first_token_id)
    allowed = rng.sample(range(spec.first_token_id, spec.last_token_id), num_ids)
    stops = sorted(allowed[: max(1, num_ids // mean)])
    return [
        msgspec.structs.replace(
            request, output_len=mean * MAX_OVER_MEAN, stop_token_ids=stops, allowed_token_ids=sorted(allowed)
        )
        for request in requests
    ]


def _count(spec: WorkloadSpec) -> int:
    assert spec.num_requests is not None
    return spec.num_requests


def _tokens(spec: WorkloadSpec, rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(spec.first_token_id, spec.last_token_id) for _ in range(count)]


def _of(prompt: list[int], output_len: int) -> BenchRequest:
    return BenchRequest(prompt=prompt, output_len=output_len, num_prompt_tokens=len(prompt))


def _long_tailed(rng: random.Random, log_mean: float, sigma: float, min_len: int, max_len: int) -> int:
    return max(min_len, min(max_len, int(rng.lognormvariate(log_mean, sigma))))


def _chat(spec: WorkloadSpec, rng: random.Random) -> list[BenchRequest]:
    requests = []
    for _ in range(_count(spec)):
        prompt = _tokens(spec, rng, _long_tailed(rng, 4.8, 1.1, 4, 2048))
        requests.append(_of(prompt, _long_tailed(rng, 5.0, 0.9, 4, 1024)))
    return requests


def _open(spec: WorkloadSpec, rng: random.Random) -> list[BenchRequest]:
    prompts = [_tokens(spec, rng, _long_tailed(rng, 4.8, 1.1, 4, 2048)) for _ in range(_count(spec))]
    return [_of(prompt, spec.output_len or 256) for prompt in prompts]


def _fixed(input_len: int, output_len: int) -> Callable[[WorkloadSpec, random.Random], list[BenchRequest]]:
    def make(spec: WorkloadSpec, rng: random.Random) -> list[BenchRequest]:
        lens = (spec.input_len or input_len, spec.output_len or output_len)
        return [_of(_tokens(spec, rng, lens[0]), lens[1]) for _ in range(_count(spec))]

    return make


def _prefix(spec: WorkloadSpec, rng: random.Random) -> list[BenchRequest]:
    heads = [_tokens(spec, rng, spec.prefix_len or 1536) for _ in range(spec.num_prefixes or 32)]
    own, out = spec.input_len or 128, spec.output_len or 128
    return [_of(rng.choice(heads) + _tokens(spec, rng, own), out) for _ in range(_count(spec))]


def _random(spec: WorkloadSpec, rng: random.Random) -> list[BenchRequest]:
    """Lengths vary by `spread`; a share of the requests begins with one of some shared prefixes."""

    def varied(mean: int) -> int:
        return max(1, round(mean * (1 + spec.spread * (2 * rng.random() - 1))))

    heads = [_tokens(spec, rng, spec.prefix_len or 0) for _ in range(spec.num_prefixes or 1)]
    requests = []
    for _ in range(_count(spec)):
        has_prefix = spec.prefix_len and rng.random() < spec.prefix_share
        head = rng.choice(heads) if has_prefix else []
        own = varied(max(1, (spec.input_len or 512) - len(head)))
        requests.append(_of(head + _tokens(spec, rng, own), varied(spec.output_len or 128)))
    return requests


def _questions(spec: WorkloadSpec, lengths: list[int]) -> list[BenchRequest]:
    return [
        BenchRequest(
            messages=[
                {
                    "role": "user",
                    "content": f"Write {2 + i % 5} sentences about {TOPICS[i % 10]} for reader number {i}.",
                }
            ],
            output_len=length,
        )
        for i, length in enumerate(lengths)
    ]


def _uniform(spec: WorkloadSpec, _: random.Random) -> list[BenchRequest]:
    return _questions(spec, [spec.output_len or 64] * _count(spec))


def _mixed(spec: WorkloadSpec, rng: random.Random) -> list[BenchRequest]:
    return _questions(spec, [_long_tailed(rng, 3.6, 0.9, 4, 256) for _ in range(_count(spec))])


NAMED = {
    "chat": Named(_chat, 2000, 0, "long-tailed prompts (mean about 210 tokens) and answers (about 220)"),
    "open": Named(
        _open, 2000, 6, "the same prompts; answers end by themselves: 256 tokens on average, 2,048 at most", "random"
    ),
    "prefill": Named(_fixed(2048, 64), 1000, 1, "documents of 2,048 tokens, 64 out: classification, extraction"),
    "decode": Named(_fixed(128, 1024), 1000, 2, "128 tokens in, 1,024 out: synthetic data"),
    "prefix": Named(_prefix, 2000, 3, "32 shared system prompts of 1,536 tokens, 128 of their own, 128 out"),
    "few": Named(_fixed(512, 512), 16, 4, "16 sequences of 512 tokens in, 512 out"),
    "alone": Named(_fixed(512, 512), 1, 5, "one sequence of 512 tokens in, 512 out"),
    "random": Named(_random, 256, 0, "--input-len and --output-len, with --spread and shared prefixes"),
    "uniform": Named(_uniform, 128, 0, "chat messages: short questions, 64 tokens out; the CPU's benchmark"),
    "mixed": Named(_mixed, 256, 7, "the same questions with long-tailed answers of 4 to 256 tokens"),
}
