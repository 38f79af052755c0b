"""The steps that a dry start runs after the runner's own warm-up: what a server's first requests would launch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from headrace.engine.settings import Settings
from headrace.models import ModelSpec
from headrace.steps import Bitmask, Drafts, DraftsBySlot, IntArray, Runner, SlotEntry, StepPlan, TableWrites
from headrace.types import SamplingParams, StructuredOutputs

_PROMPT_LEN = 24
_PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(top_p=0.9, top_k=50, min_p=0.05),
    SamplingParams(logprobs=5, repetition_penalty=1.1, presence_penalty=0.1, logit_bias={1: 1.0}, min_tokens=2),
    SamplingParams(allowed_token_ids=(1, 2, 3), bad_words_token_ids=((1, 2),)),
    SamplingParams(structured_outputs=StructuredOutputs(choice=("a", "b"))),
)
_ALONE = (*_PARAMS, SamplingParams(logprobs=5, top_p=0.9))  # of an engine with fewer slots, one by one


@dataclass(frozen=True, slots=True)
class _AllTokens:
    """The masks of a grammar that allows everything."""

    slots: IntArray
    vocab_size: int

    def bits(self, drafts: DraftsBySlot | None = None) -> Bitmask:
        num_rows = len(self.slots) + sum(len(found) for found in (drafts or {}).values())
        return np.full((num_rows, -(-self.vocab_size // 32)), -1, np.int32)


def run_steps(runner: Runner, settings: Settings, spec: ModelSpec) -> None:
    """Prefill a few prompts, continue them, and decode, with the features of sampling that have kernels."""
    num_seqs = min(len(_PARAMS), settings.max_num_seqs, settings.max_num_batched_tokens // _PROMPT_LEN)
    prompt_len = min(_PROMPT_LEN, settings.max_model_len - 4, settings.num_blocks * settings.block_size)
    if num_seqs < 1 or prompt_len < 2:
        return
    together = (_PARAMS[:1], _PARAMS[:2], _PARAMS[2:3], _PARAMS)
    for params in together if num_seqs == len(_PARAMS) else zip(_ALONE, strict=True):
        _prefill_and_decode(runner, settings, spec, params, prompt_len)
    if settings.adapters is not None:
        _prefill_with_adapters(runner, settings)


def _prefill_and_decode(
    runner: Runner, settings: Settings, spec: ModelSpec, params: tuple[SamplingParams, ...], prompt_len: int
) -> None:
    slots = np.arange(len(params))
    has_grammar = params[-1].structured_outputs is not None
    masks = _AllTokens(slots[-1:], spec.vocab_size) if has_grammar else None
    half = prompt_len // 2
    entries = tuple(_entry(slot, params[slot], prompt_len, settings) for slot in slots.tolist())
    num_blocks = -(-prompt_len // settings.block_size)
    writes = TableWrites(
        np.repeat(slots, num_blocks),
        np.tile(np.arange(num_blocks), len(slots)),
        np.zeros(len(slots) * num_blocks, np.int64),
    )
    first = _plan(slots, half, samples=False)
    runner.submit(replace(first, slot_entries=entries, table_writes=writes))
    runner.submit(_plan(slots, prompt_len - half, samples=True), masks)
    runner.submit(_plan(slots, 1, samples=True), masks)
    if settings.speculation is not None and settings.speculation.max_rows >= 2 * len(slots):
        lens = np.ones(len(slots), np.int64)
        own = settings.speculation.config.method == "ngram"
        drafts = Drafts(lens, np.zeros(len(slots), np.int64) if own else None)
        runner.submit(_plan(slots, 2, samples=True, drafts=drafts), masks)


def _prefill_with_adapters(runner: Runner, settings: Settings) -> None:
    """Prompts of all sizes: into how many sums the kernels of adapters divide the width depends on the tokens."""
    max_len = settings.max_model_len - 1
    most = min(settings.max_num_batched_tokens, settings.max_num_seqs * max_len)
    for num_tokens in (*(1 << bits for bits in range(1, most.bit_length())), most):
        slots = np.arange(-(-num_tokens // max_len))
        lens = np.diff(np.arange(len(slots) + 1) * num_tokens // len(slots))
        entries = tuple(
            replace(_entry(slot, _PARAMS[0], length, settings), adapter=1) for slot, length in enumerate(lens.tolist())
        )
        plan = _plan(slots, 0, samples=True)
        runner.submit(replace(plan, num_tokens=lens, num_batched_tokens=num_tokens, slot_entries=entries))


def _plan(slots: IntArray, num_tokens: int, *, samples: bool, drafts: Drafts | None = None) -> StepPlan:
    return StepPlan(
        step=0,
        slots=slots,
        num_tokens=np.full(len(slots), num_tokens),
        samples=np.full(len(slots), samples),
        num_batched_tokens=num_tokens * len(slots),
        drafts=drafts,
    )


def _entry(slot: int, params: SamplingParams, prompt_len: int, settings: Settings) -> SlotEntry:
    return SlotEntry(
        slot=slot,
        token_ids=np.zeros(prompt_len, np.int32),
        num_computed=0,
        prompt_len=prompt_len,
        end_len=settings.max_model_len,
        seed=0,
        params=params,
        stop_token_ids=(),
        adapter=int(settings.adapters is not None and slot % 2 == 1),
    )
