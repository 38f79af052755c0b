"""From logits to the next token of each row: one file a feature, listed in `features.py`, put together by `Sampler`."""

from __future__ import annotations

from headrace.sampling.grammar import PlacedMasks
from headrace.sampling.logprobs import SampledLogprobs
from headrace.sampling.sampler import Sampled, Sampler

__all__ = ["PlacedMasks", "Sampled", "SampledLogprobs", "Sampler"]
