"""Requests that keep an engine in one kind of step. Tokens are random, so that no prefix is shared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from headrace.errors import ConfigError
from headrace.types import Request, SamplingParams

WorkloadName = Literal["decode", "prefill", "chat"]
CHAT_SIGMAS = (1.1, 0.9)  # of the logarithms of prompt and answer lengths


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts of `input_len` tokens and answers of `output_len`; for chat these are medians of long-tailed lengths."""

    name: WorkloadName
    input_len: int
    output_len: int
    max_seqs: int | None = None  # that run at once, unless the user wants more

    def fitting(self, max_model_len: int) -> Workload:
        """The same with answers, then prompts, shortened to the engine's context."""
        input_len = min(self.input_len, max_model_len - 2)
        return replace(self, input_len=input_len, output_len=min(self.output_len, max_model_len - input_len))

    def requests(self, *, vocab_size: int, max_model_len: int) -> Iterator[Request]:
        """Requests without end."""
        random = np.random.default_rng(0)
        number = 0
        while True:
            input_len, output_len = self._lens(random, max_model_len)
            params = SamplingParams(max_tokens=output_len, ignore_eos=True, detokenize=False)
            prompt = random.integers(1, vocab_size, input_len).astype(np.int32)
            yield Request(f"profile-{number}", prompt, params)
            number += 1

    def _lens(self, random: np.random.Generator, max_model_len: int) -> tuple[int, int]:
        if self.name != "chat":
            return self.input_len, self.output_len
        means = (np.log(self.input_len), np.log(self.output_len))
        drawn = [int(random.lognormal(mean, sigma)) for mean, sigma in zip(means, CHAT_SIGMAS, strict=True)]
        input_len = min(max(4, drawn[0]), max_model_len // 2)
        return input_len, min(max(4, drawn[1]), max_model_len - input_len)


WORKLOADS: dict[str, Workload] = {
    "decode": Workload(name="decode", input_len=128, output_len=1024),
    "prefill": Workload(name="prefill", input_len=1024, output_len=8, max_seqs=64),
    "chat": Workload(name="chat", input_len=120, output_len=150),
}


def workload_of(name: str, input_len: int | None = None, output_len: int | None = None) -> Workload:
    if name not in WORKLOADS:
        raise ConfigError(f"the workload must be one of {', '.join(WORKLOADS)}, got {name!r}")
    chosen = WORKLOADS[name]
    for given, flag in ((input_len, "input_len"), (output_len, "output_len")):
        if given is not None and given < 1:
            raise ConfigError(f"{flag} must be at least 1, got {given}")
    return replace(chosen, input_len=input_len or chosen.input_len, output_len=output_len or chosen.output_len)
