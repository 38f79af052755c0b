"""Runs plans on a CPU. Steps execute one after the other on a thread of their own, like a GPU's stream.

`submit` returns at once, and the scheduler works while the model runs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.layout import LayerCache, StepLayout
from headrace.kernels.ranges import Ranges, wrap_methods
from headrace.models.decoder import Decoder
from headrace.models.weights.adapter_files import Adapter, read_adapter
from headrace.runner.cpu_graphs import StepGraphs
from headrace.runner.cpu_threads import device_thread
from headrace.runner.draft_model import DraftModel, Proposer
from headrace.runner.host_blocks import HostBlocks
from headrace.runner.prompt_logprobs import PromptLogprobsSlots
from headrace.runner.readouts import lay_out_readouts
from headrace.runner.results import step_logprobs
from headrace.runner.shape import RunnerShape
from headrace.runner.slots import DeviceSlots
from headrace.runner.step_outputs import StepOutputs, compute_with_prompt_outputs
from headrace.runner.verification import drafts_by_slot, kept_logprobs, kept_rows
from headrace.sampling import PlacedMasks, Sampled, Sampler
from headrace.startup import OnStage, ignore_stage
from headrace.steps import BlockTransfers, BoolArray, Drafts, IntArray, Masks, StepPlan, StepResult

Result = TypeVar("Result")

_RANGES = {  # names of a profile's ranges, by method
    "_execute": "execute",
    "_apply_changes": "inputs",
    "_copy_blocks": "copy_blocks",
    "_transfer_blocks": "transfer_blocks",
    "_layout": "inputs",
    "_sample": "sample",
    "_append": "append",
}


class Unfinished(NamedTuple):
    """The part of a plan that is computed."""

    slots: IntArray  # the plan's own array, if all are
    num_tokens: IntArray
    samples: BoolArray

    @property
    def only_decodes(self) -> bool:
        """Whether each slot has one token to compute and samples after it."""
        return bool(self.samples.all()) and int(self.num_tokens.max()) == 1


class CpuRunner:
    """Owns the tensors: weights, KV cache, recurrent states, slots. Only its own thread touches them."""

    def __init__(
        self,
        decoder: Decoder,
        shape: RunnerShape,
        on_stage: OnStage = ignore_stage,
        proposer: Proposer | None = None,
    ) -> None:
        """`proposer`: drafts tokens; None: the host drafts, if anything does."""
        device, dtype = decoder.device, decoder.dtype
        self._decoder = decoder
        self._device = device
        self._slots = DeviceSlots(
            num_slots=shape.max_num_seqs,
            max_model_len=shape.max_model_len,
            block_size=shape.block_size,
            device=device,
            max_loras=0 if shape.adapters is None else shape.adapters.max_loras,
        )
        self._adapters = shape.adapters
        self._sampler = Sampler(shape.max_num_seqs, decoder.spec.vocab_size, device, tokens=self._slots.tokens)
        self._prompt_logprobs = PromptLogprobsSlots(shape.max_num_seqs)
        self._caches = self._allocate_caches(decoder, shape)
        self._steps = StepGraphs(decoder, self._caches, padding_block=shape.num_blocks)
        self.host_blocks = HostBlocks(self._caches, shape.num_host_blocks) if shape.num_host_blocks else None
        self._draft = None if proposer is None else self._draft_model(proposer, shape)
        self._stream = device_thread(shape.num_threads)
        on_stage("compile")
        self._stream.submit(ops.warm_up, device, dtype, on_stage).result()  # no request waits for a compiler

    @staticmethod
    def _allocate_caches(decoder: Decoder, shape: RunnerShape) -> list[LayerCache]:
        num_blocks = shape.num_blocks + 1  # the last one is for padding
        return decoder.allocate_caches(num_blocks, shape.block_size, shape.kv_dtype, num_slots=shape.max_num_seqs)

    def _draft_model(self, proposer: Proposer, shape: RunnerShape) -> DraftModel:
        decoder, shares_cache = proposer.decoder, proposer.shares_cache
        shared = self._caches[: decoder.spec.num_layers]
        caches = shared if shares_cache else self._allocate_caches(decoder, shape)
        return DraftModel(
            decoder,
            caches,
            StepGraphs(decoder, caches, shape.num_blocks),
            shape.max_num_batched_tokens,
            None if shares_cache else torch.zeros(shape.max_num_seqs, dtype=torch.int64, device=self._device),
        )

    def submit(self, plan: StepPlan, masks: Masks | None = None) -> Future[StepResult]:
        return self._stream.submit(self._execute, plan, masks)

    def collect(self, ticket: Future[StepResult]) -> StepResult:
        return ticket.result()

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function on the device's thread, after the submitted steps."""
        return self._stream.submit(function).result()

    def read_adapter(self, path: str) -> Adapter:
        assert self._adapters is not None
        return read_adapter(path, self._decoder, max_rank=self._adapters.max_rank)

    def write_adapter(self, index: int, adapter: Adapter) -> None:
        self.call(lambda: adapter.write(index))

    def use_ranges(self, ranges: Ranges | None) -> None:
        """Put named ranges around steps, their parts and each operation; None: no more."""
        wrap_methods(self, _RANGES, ranges)
        ops.record_ranges(ranges)
        self._steps.use_graphs(ranges is None)

    def close(self) -> None:
        """End after the submitted steps and free the KV cache, even if something still refers to this runner."""
        if vars(self):
            self._stream.shutdown()
            if self._decoder.stages is not None:
                self._decoder.stages.flush()
            vars(self).clear()

    @torch.inference_mode()
    def _execute(self, plan: StepPlan, masks: Masks | None) -> StepResult:
        self._apply_changes(plan)
        part = self._unfinished(plan)
        if not len(part.slots):
            return StepResult(plan.step, *_NOTHING)
        if not self._decoder.is_last_stage:
            self._pass_on(torch.from_numpy(part.slots), torch.from_numpy(part.num_tokens))
            return StepResult(plan.step, *_NOTHING)
        if part.only_decodes or plan.drafts is not None:
            return self._decode(plan, part, masks)
        return self._prefill(plan, part, masks)

    def _decode(self, plan: StepPlan, part: Unfinished, masks: Masks | None) -> StepResult:
        """Compute the known token of each slot, and its drafts, and sample after each: see `verification.py`."""
        slots, num_rows, drafts = torch.from_numpy(part.slots), torch.from_numpy(part.num_tokens), plan.drafts
        if drafts is not None:
            self._propose(slots, torch.from_numpy(drafts.lens), drafts)
        row_slots = part.slots if drafts is None else np.repeat(part.slots, part.num_tokens)
        token_ids, layout = self._layout(slots, num_rows)
        logits = self._steps.logits(token_ids, layout)
        placed = None if masks is None else self._placed(masks, part.slots, drafts)
        sampled = self._sample(logits, row_slots, layout.positions + 1, placed)
        appended = self._append(slots, num_rows, sampled)
        self._slots.advance(slots, appended.num_tokens)
        if self._draft is not None and drafts is not None:
            self._draft.accepted(slots, self._slots.computed[slots])
        result = _result(plan.step, part.slots, sampled, appended)
        return result if drafts is None else _of_drafts(result, row_slots, part.num_tokens, appended.num_tokens.numpy())

    def _propose(self, slots: Tensor, lens: Tensor, drafts: Drafts) -> None:
        if drafts.tokens is not None:
            self._slots.put_drafts(slots, lens, torch.from_numpy(drafts.tokens))
        else:
            assert self._draft is not None, "drafts of a model without a model"
            self._draft.propose(slots, lens, self._slots, self._sampler)

    def _placed(self, masks: Masks, slots: IntArray, drafts: Drafts | None) -> PlacedMasks:
        if drafts is None:
            return PlacedMasks.of(masks, slots, self._device)
        tokens = self._slots.drafts(torch.from_numpy(slots), torch.from_numpy(drafts.lens))
        return PlacedMasks.of_drafts(masks, slots, drafts_by_slot(slots, tokens.numpy(), drafts.lens), self._device)

    def _prefill(self, plan: StepPlan, part: Unfinished, masks: Masks | None) -> StepResult:
        """Compute several tokens of some slots, perhaps beside others that decode."""
        slots, num_tokens, samples = (torch.from_numpy(each) for each in part)
        outputs = self._compute(plan, slots, num_tokens, samples)
        host_slots = part.slots[part.samples]
        if not len(host_slots):
            result = StepResult(plan.step, *_NOTHING)
        else:
            slots = torch.from_numpy(host_slots)
            placed = None if masks is None else PlacedMasks.of(masks, host_slots, self._device)
            logits = self._decoder.logits(outputs.last_hidden)
            sampled = self._sample(logits, host_slots, self._slots.lens[slots], placed)
            result = _result(plan.step, host_slots, sampled, self._append(slots, torch.ones_like(slots), sampled))
        return replace(result, prompt_logprobs=outputs.prompt_logprobs(), readout_results=outputs.readout_results())

    def _pass_on(self, slots: Tensor, num_tokens: Tensor) -> None:
        """Run this stage, and send its hidden states to the next one."""
        token_ids, layout = self._layout(slots, num_tokens)
        self._slots.advance(slots, num_tokens)
        self._decoder.hidden(token_ids, layout, self._caches)

    def _sample(self, logits: Tensor, row_slots: IntArray, lens: Tensor, masks: PlacedMasks | None) -> Sampled:
        return self._sampler.sample(logits, torch.from_numpy(row_slots), lens, host_slots=row_slots, masks=masks)

    def _append(self, slots: Tensor, num_rows: Tensor, sampled: Sampled) -> ops.Appended:
        columns = self._sampler.columns
        ends = {"end_len": columns["end_len"], "stop_token_ids": columns["stop_token_ids"]}
        return self._slots.append(slots, num_rows, sampled.tokens, sampled.flags, **ends)

    def _compute(self, plan: StepPlan, slots: Tensor, num_tokens: Tensor, samples: Tensor) -> StepOutputs:
        """Run the model: hidden states to sample from, prompt log-probabilities and readouts."""
        positions = self._slots.computed[slots].numpy()
        token_ids, layout = self._layout(slots, num_tokens)
        ends = (layout.query_starts[1:].long() - 1)[samples]
        spans = self._prompt_logprobs.spans(slots.numpy(), num_tokens.numpy(), positions)
        chunks = plan.readout_chunks
        readouts = lay_out_readouts(chunks, slots.numpy(), num_tokens.numpy()) if chunks else None
        self._slots.advance(slots, num_tokens)
        if not spans and readouts is None:
            kept = ends if len(ends) else None
            return StepOutputs(self._decoder.hidden(token_ids, layout, self._caches, kept=kept))
        return compute_with_prompt_outputs(
            self._decoder, token_ids, layout, self._caches, ends.numpy(), spans, readouts, self._slots.tokens
        )

    def _layout(self, slots: Tensor, num_tokens: Tensor) -> tuple[Tensor, StepLayout]:
        return self._slots.layout(slots, num_tokens)

    def _apply_changes(self, plan: StepPlan) -> None:
        if plan.transfers is not None:
            self._transfer_blocks(plan.step, plan.transfers)
        self._slots.write(plan)
        if plan.next_tokens is not None and not self._decoder.is_last_stage:
            slots = torch.from_numpy(plan.slots[: len(plan.next_tokens)])
            self._slots.put_next(slots, torch.from_numpy(plan.next_tokens))
        for entry in plan.slot_entries if self._decoder.is_last_stage else ():
            self._prompt_logprobs.enter(entry)
            if self._draft is not None:
                self._draft.enter(entry.slot)
            self._sampler.enter_slot(
                entry.slot,
                entry.params,
                seed=entry.seed,
                prompt_len=entry.prompt_len,
                end_len=entry.end_len,
                stop_token_ids=entry.stop_token_ids,
            )
        if plan.copies:
            self._copy_blocks(plan.copies)

    def _transfer_blocks(self, step: int, transfers: BlockTransfers) -> None:
        assert self.host_blocks is not None, "a plan with transfers for a runner without a host tier"
        self.host_blocks.transfer(step, transfers)

    def _copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        sources, targets = torch.tensor(copies, device=self._device).unbind(1)
        ops.copy_blocks(self._caches, sources, targets)  # a draft model computes its own again

    def _unfinished(self, plan: StepPlan) -> Unfinished:
        """The plan without slots that have ended in a step whose result the scheduler had not seen yet. In a pipeline
        it has seen all: a slot is planned again once its token is known."""
        if self._decoder.stages is not None:
            return Unfinished(plan.slots, plan.num_tokens, plan.samples)
        is_finished = self._slots.is_finished.numpy()[plan.slots]
        if not is_finished.any():
            return Unfinished(plan.slots, plan.num_tokens, plan.samples)
        return Unfinished(plan.slots[~is_finished], plan.num_tokens[~is_finished], plan.samples[~is_finished])


_NOTHING = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint8))


def _result(step: int, slots: IntArray, sampled: Sampled, appended: ops.Appended) -> StepResult:
    return StepResult(
        step=step,
        slots=slots,
        tokens=sampled.tokens.numpy(),
        finished=appended.states.numpy(),
        logprobs=None if sampled.logprobs is None else step_logprobs(sampled.logprobs),
    )


def _of_drafts(result: StepResult, row_slots: IntArray, num_rows: IntArray, num_sampled: IntArray) -> StepResult:
    """Leave out the rows of drafts after the first that was not accepted."""
    is_kept, logprobs = kept_rows(num_rows, num_sampled), result.logprobs
    return replace(
        result,
        tokens=result.tokens[is_kept],
        logprobs=None if logprobs is None else kept_logprobs(logprobs, row_slots, is_kept),
        num_sampled=num_sampled,
    )
