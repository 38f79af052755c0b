"""The parts of an engine that need no weights: enough to validate requests."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.config import EngineConfig
from headrace.engine.checks import RequestChecks
from headrace.engine.grammars import Grammars
from headrace.engine.opening import open_model
from headrace.engine.resolve import resolve
from headrace.engine.start import tokenizer_of
from headrace.hardware import read_facts, read_gpu
from headrace.models.spec import ModelSpec
from headrace.text import Tokenizer


@dataclass(frozen=True, slots=True)
class Front:
    model_name: str
    tokenizer: Tokenizer | None
    spec: ModelSpec
    checks: RequestChecks
    grammars: Grammars | None = None

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size


def open_front(config: EngineConfig) -> Front:
    checkpoint = open_model(config)
    facts = read_facts()
    if config.device != "cpu":
        facts = replace(facts, gpu=read_gpu())
    spec = checkpoint.spec
    limits = resolve(config, spec, facts).limits
    checks = RequestChecks(limits, spec.eos_token_ids, spec.vocab_size, spec.pooler is None)
    tokenizer = tokenizer_of(config, checkpoint)
    grammars = Grammars(tokenizer, vocab_size=spec.vocab_size, eos_token_ids=spec.eos_token_ids)
    return Front(config.model, tokenizer, spec, checks, grammars)
