"""Turns the user's config, the model and the machine into settings: one function, and a reason for each value.

    resolver.py                       what every kind of model needs: device, threads, attention kernels
    resolve_decoder.py                models that generate: sequences, blocks, tokens of a step
    resolve_encoder.py                encoders, which have no KV cache
    precision.py                      number formats: compute type, quantization, KV cache
    memory_budget.py                  bytes of weights, states, steps and blocks, and what fits
    choices.py, setting_warnings.py   what the user is told

One choice each have rank_layout.py, threads.py, attention.py, speculating.py, adapter_limits.py, offloading.py and
kv_offloading.py.
"""

from __future__ import annotations

from headrace.config import EngineConfig
from headrace.engine.resolve_decoder import DecoderResolver
from headrace.engine.resolve_encoder import EncoderResolver
from headrace.engine.resolver import Resolver
from headrace.engine.settings import Settings
from headrace.hardware import MachineFacts
from headrace.models.spec import ModelSpec


def resolve(config: EngineConfig, spec: ModelSpec, facts: MachineFacts) -> Settings:
    return _resolver(config, spec, facts, None).settings(here=False)


def resolve_here(
    config: EngineConfig, spec: ModelSpec, facts: MachineFacts, draft: ModelSpec | None = None
) -> Settings:
    """The same for an engine that is about to start: a KV cache that this machine can never hold is refused. (`plan`
    resolves for several GPUs at once.) `draft`: the draft model of speculative decoding."""
    return _resolver(config, spec, facts, draft).settings(here=True)


def _resolver(config: EngineConfig, spec: ModelSpec, facts: MachineFacts, draft: ModelSpec | None) -> Resolver:
    return (EncoderResolver if spec.is_encoder else DecoderResolver)(config, spec, facts, draft)
