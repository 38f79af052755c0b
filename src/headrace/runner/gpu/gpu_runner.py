"""Runs plans on a GPU. Only `collect` waits for the device, and `submit` if it is given masks.

- A decode step is two CUDA graph replays: the model, then sampling and appending, which leave in the slots all that the
  next step needs. The host sends only what changed. A step of few sequences is one graph, if sampling is plain.
- A small step with prompts runs the model as a graph (`prefill_graphs`), then the head and sampling eagerly.
- Any other step runs eagerly, as do steps with prompts and adapters, and all steps of weights from a disk.
- A stage of a pipeline gets and sends the hidden states of a step around it; the last one samples.

Tokens come back in pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from headrace.dist.device_stage_link import DeviceStageLink
from headrace.kernels import ops
from headrace.kernels.gpu import slots as slot_kernels
from headrace.kernels.gpu.few_decodes import MAX_FEW_DECODES
from headrace.kernels.layout import LayerCache, Splits, StepLayout
from headrace.kernels.ranges import Ranges, wrap_methods
from headrace.models.decoder import Decoder
from headrace.models.spec import ModelSpec
from headrace.models.weights.adapter_files import Adapter, read_adapter
from headrace.runner.draft_model import Proposer
from headrace.runner.gpu.capture import Capture
from headrace.runner.gpu.context_splits import programs_per_decode, splits_of
from headrace.runner.gpu.decode_graphs import DecodeGraphs, SamplingGraph
from headrace.runner.gpu.decode_inputs import DecodeInputs, RowInputs, SharedPrefixInputs
from headrace.runner.gpu.draft_graphs import DraftCache, DraftGraphs
from headrace.runner.gpu.draft_steps import DraftSteps
from headrace.runner.gpu.gemm_warmup import load_gemm_kernels
from headrace.runner.gpu.gpu_host_blocks import GpuHostBlocks
from headrace.runner.gpu.gpu_slots import GpuSlots
from headrace.runner.gpu.memory import reserve
from headrace.runner.gpu.prefill_graphs import PrefillGraph, PrefillGraphs, PrefillShape
from headrace.runner.gpu.prefix_groups import MIN_SEQS, BlockTableMirror, PrefixGroups
from headrace.runner.gpu.prefix_sharing import can_share_prefixes, seqs_per_tile
from headrace.runner.gpu.step_layouts import StepLayouts, StepOrder, ordered
from headrace.runner.gpu.step_sampling import StepSampling
from headrace.runner.gpu.ticket import ResultRing, Ticket, TicketRing
from headrace.runner.gpu.upload import Upload, UploadRing
from headrace.runner.prompt_logprobs import PromptLogprobsSlots, PromptSpan
from headrace.runner.readouts import lay_out_readouts
from headrace.runner.shape import RunnerShape
from headrace.runner.step_outputs import StepOutputs, compute_with_prompt_outputs
from headrace.sampling import Sampler
from headrace.startup import OnStage, ignore_stage, mark
from headrace.steps import Drafts, IntArray, Masks, SlotEntry, StepPlan, StepResult

Result = TypeVar("Result")

_RANGES = {  # names of a profile's ranges, by method
    "submit": "step",
    "_apply_changes": "changes",
    "_decode": "decode",
    "_verify": "decode",
    "_mixed": "prefill",
    "_replay_sampling": "sample",
}
_SMALL_CONTEXT_BYTES = (
    1 << 30
)  # of one layer's KV cache: read in 0.25 ms on an H200; the host launches a layer in 0.7 ms
_GRAPH_VALUES = 1 << 14  # int32 values that describe a step for the largest prefill graph, with some to spare


class GpuRunner:
    """Owns weights, KV cache and slots on one GPU. The last slot and the last block are padding for graphs."""

    def __init__(
        self,
        decoder: Decoder,
        shape: RunnerShape,
        on_stage: OnStage = ignore_stage,
        proposer: Proposer | None = None,
    ) -> None:
        """`proposer`: drafts tokens; None: the host drafts, if anything does."""
        spec, device = decoder.spec, decoder.device
        self._decoder, self._device, self._shape = decoder, device, shape
        self._uses_graphs = decoder.stream is None or not decoder.stream.queue.needs_host
        assert decoder.stages is None or isinstance(decoder.stages, DeviceStageLink)
        self._stages: DeviceStageLink | None = decoder.stages
        self._slots = GpuSlots(shape, device)
        num_slots = self._slots.num_slots
        self._sampler = Sampler(num_slots, spec.vocab_size, device, tokens=self._slots.tokens)
        self._prompt_logprobs = PromptLogprobsSlots(num_slots)
        self._caches = self._allocate_caches(decoder)
        self.host_blocks = GpuHostBlocks(self._caches, shape.num_host_blocks, device) if shape.num_host_blocks else None
        self._upload = UploadRing(device)
        self._shares_prefixes = can_share_prefixes(spec, decoder.max_len)
        self._decode_graphs = DecodeGraphs(
            shape.max_num_seqs,
            enable_sharing=self._shares_prefixes,
            max_draft_rows=shape.max_draft_rows,
            are_timed=decoder.stream is None,  # else all take as long as their copies
            enable_adapters=shape.adapters is not None,
        )
        self._slot_adapters = np.zeros(num_slots, np.int64)  # see `SlotEntry.adapter`
        self._has_adapters = False  # a sequence of the last decode step has one
        max_size = self._decode_graphs.max_size
        has_drafts = shape.max_draft_rows > 0
        self._rows = RowInputs(max_size, self._slots.padding_slot, device, has_drafts=has_drafts)
        self._inputs = DecodeInputs(max_size, device)
        specs = [spec] if proposer is None else [spec, proposer.decoder.spec]
        max_programs = max(map(programs_per_decode, specs))
        self._arrivals = torch.zeros(max_size * max_programs, dtype=torch.int32, device=device)
        self._mirror = BlockTableMirror(num_slots, self._slots.max_blocks)
        self._next_positions = np.zeros(num_slots, np.int64)
        self._sorted_slots = np.empty(0, np.int64)  # of the last decode step, longest context first
        self._seqs_per_tile = seqs_per_tile(spec, self._caches[0].keys.dtype)
        self._shared = SharedPrefixInputs(max_size, self._seqs_per_tile, device)
        self._is_sharing = False
        self._tickets = TicketRing(3 * max_size, device)
        self._ring = ResultRing(MAX_FEW_DECODES, device)
        self._sampling = StepSampling(self._slots, self._sampler, self._next_positions, device)
        self._layouts = StepLayouts(
            decoder,
            shape,
            self._caches,
            self._slots.tokens,
            self._slots.computed,
            self._slots.block_tables,
            self._splits,
        )
        self._prefill_graphs = PrefillGraphs(
            self._forward_prefill,
            spec,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            max_num_seqs=shape.max_num_seqs,
            max_model_len=shape.max_model_len,
            dtype=decoder.dtype,
            device=device,
        )
        self._draft = None if proposer is None else self._draft_graphs(proposer)
        self._draft_steps = self._steps_with_drafts() if has_drafts else None
        self._unread: Ticket | None = None  # a step with drafts, until its accepted ones are known
        mark("slots and caches allocated")
        on_stage("compile")
        load_gemm_kernels(decoder, shape.max_num_batched_tokens)
        mark("GEMM kernels loaded")
        if self._uses_graphs:
            self._capture_graphs(on_stage)
        reserve(shape.step_bytes, device)
        mark("runner ready")

    def _allocate_caches(self, decoder: Decoder) -> list[LayerCache]:
        shape = self._shape
        dtype = shape.kv_dtype or decoder.dtype
        return decoder.allocate_caches(shape.num_blocks + 1, shape.block_size, dtype, num_slots=self._slots.num_slots)

    def _draft_graphs(self, proposer: Proposer) -> DraftGraphs:
        draft, is_shared = proposer.decoder, proposer.shares_cache
        layers = self._caches[: draft.spec.num_layers] if is_shared else self._allocate_caches(draft)
        splits = partial(self._splits, spec=draft.spec)
        cache = DraftCache(layers, is_shared=is_shared)
        return DraftGraphs(draft, cache, self._slots, self._sampler, self._shape, splits)

    def _steps_with_drafts(self) -> DraftSteps:
        return DraftSteps(self._slots, self._sampler, self._inputs, self._rows, self._next_positions, self._draft)

    # ---- the runner's protocol

    @torch.inference_mode()
    def submit(self, plan: StepPlan, masks: Masks | None = None) -> Ticket:
        if self.host_blocks is not None:
            self.host_blocks.begin(plan.step, plan.transfers)
            if not len(plan.slots):  # it only copies
                return self._tickets.passed_on(plan)
        upload = self._upload.begin(self._num_values(plan))
        self._apply_changes(plan, upload)
        if self._stages is not None:
            self._stages.pull(plan.num_batched_tokens)
        if plan.drafts is not None:
            ticket = self._verify(plan, plan.drafts, upload, masks)
        elif self._uses_graphs and plan.num_batched_tokens == len(plan.slots) and plan.samples.all():
            ticket = self._decode(plan, upload, masks)
        else:
            ticket = self._mixed(plan, upload, masks)
        if self._stages is not None:
            self._stages.push(plan.num_batched_tokens)
        self._upload.end()
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        result = ticket.result()
        if ticket is self._unread and self._draft_steps is not None:
            self._unread = None
            assert result.num_sampled is not None and ticket.num_rows is not None
            self._draft_steps.take_accepted(result.slots, ticket.num_rows, result.num_sampled)
        return result

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function after the submitted steps have ended on the device."""
        torch.cuda.synchronize(self._device)
        return function()

    def read_adapter(self, path: str) -> Adapter:
        assert self._shape.adapters is not None
        return read_adapter(path, self._decoder, max_rank=self._shape.adapters.max_rank)

    def write_adapter(self, index: int, adapter: Adapter) -> None:
        adapter.write(index)  # on the stream of the submitted steps

    def use_ranges(self, ranges: Ranges | None) -> None:
        """Put named ranges around what a step launches; None: no more. Operations have none, since kernels are told
        apart by their names."""
        wrap_methods(self, _RANGES, ranges)
        self._sampling.use_ranges(ranges)

    def close(self) -> None:
        """End after the submitted steps and free graphs, KV cache and slots, even if something still refers to this
        runner."""
        if vars(self):
            if self._stages is not None:
                self._stages.flush()
            torch.cuda.synchronize(self._device)
            if self.host_blocks is not None:
                self.host_blocks.close()
            vars(self).clear()

    # ---- changes before a step

    def _num_values(self, plan: StepPlan) -> int:
        num_prompt = sum(len(entry.token_ids) + 16 for entry in plan.slot_entries)
        num_writes = 0 if plan.table_writes is None else len(plan.table_writes.slots)
        num_values = num_prompt + 3 * num_writes + 2 * plan.num_batched_tokens + 64 * len(plan.slots) + _GRAPH_VALUES
        if plan.drafts is None or self._draft_steps is None:
            return num_values
        return num_values + self._draft_steps.num_values(plan)

    def _apply_changes(self, plan: StepPlan, upload: Upload) -> None:
        writes = plan.table_writes
        places = [] if writes is None else [upload.put(a) for a in (writes.slots, writes.indexes, writes.blocks)]
        entered = self._slots.put(plan.slot_entries, upload)
        next_tokens = self._put_next_tokens(plan, upload)
        if places or entered or next_tokens:
            upload.send()
        if places:
            assert writes is not None
            self._mirror.write(writes)
            slot_kernels.write_tables(self._slots.block_tables, *(upload.get(place) for place in places))
        if entered:
            self._slots.enter(plan.slot_entries, entered, upload)
            self._enter(plan.slot_entries)
        if next_tokens:
            self._slots.put_next(*(upload.get(place) for place in next_tokens))
        if plan.copies:
            copies = torch.tensor(plan.copies).pin_memory().to(self._device, non_blocking=True)
            sources, targets = copies.unbind(1)
            ops.copy_blocks(self._caches, sources, targets)

    def _put_next_tokens(self, plan: StepPlan, upload: Upload) -> list[slice]:
        """Add the tokens that the last stage has sampled: it has them itself."""
        if plan.next_tokens is None or self._decoder.is_last_stage or not len(plan.next_tokens):
            return []
        return [upload.put(plan.slots[: len(plan.next_tokens)]), upload.put(plan.next_tokens)]

    def _enter(self, slot_entries: tuple[SlotEntry, ...]) -> None:
        for entry in slot_entries:
            self._next_positions[entry.slot] = entry.num_computed
            self._slot_adapters[entry.slot] = entry.adapter
        if not self._decoder.is_last_stage:
            return
        for entry in slot_entries:
            if self._draft is not None:
                self._draft.enter(entry.slot)
            self._prompt_logprobs.enter(entry)
            self._sampler.enter_slot(
                entry.slot,
                entry.params,
                seed=entry.seed,
                prompt_len=entry.prompt_len,
                end_len=entry.end_len,
                stop_token_ids=entry.stop_token_ids,
            )
        self._sampler.send()

    # ---- steps

    def _decode(self, plan: StepPlan, upload: Upload, masks: Masks | None) -> Ticket:
        """Run one token of each slot: a graph of their number or more, filled up with the padding slot."""
        num_seqs = len(plan.slots)
        if not plan.is_steady:
            self._sorted_slots = self._longest_first(plan.slots)
        plan = replace(plan, slots=self._sorted_slots)
        self._next_positions[plan.slots] += 1
        if not plan.is_steady:
            self._has_adapters = bool(self._slot_adapters[plan.slots].any())
            self._is_sharing = not self._has_adapters and self._share_prefixes(plan, num_seqs, upload)
        graph = self._decode_graphs.fitting(num_seqs, is_sharing=self._is_sharing, has_adapters=self._has_adapters)
        if not plan.is_steady:
            self._rows.put(plan.slots, graph.size)
        if graph.whole is not None and self._is_plain(plan.slots):
            graph.whole.replay()
            return self._tickets.in_place(plan, self._ring.next())
        graph.model.replay()
        if graph.sampling is None or graph.sampling_filtered is None:
            self._slots.advance(self._rows.slots(num_seqs), 1)
            return self._tickets.passed_on(plan)
        if self._sampler.is_plain(plan.slots):
            sampling = graph.sampling_filtered if self._sampler.has_filters(plan.slots) else graph.sampling
            return self._tickets.of(plan, self._replay_sampling(sampling))
        slots = self._rows.slots(num_seqs)
        logits = graph.logits[:num_seqs]
        results, logprobs = self._sampling.with_all_features(plan, logits, slots, masks, advances=True)
        return self._tickets.of(plan, results, logprobs)

    def _is_plain(self, slots: IntArray) -> bool:
        """Whether sampling needs no more than temperature and seed."""
        return self._sampler.is_plain(slots) and not self._sampler.has_filters(slots)

    def _verify(self, plan: StepPlan, drafts: Drafts, upload: Upload, masks: Masks | None) -> Ticket:
        """Run a step that verifies drafts."""
        assert self._draft_steps is not None
        has_adapters = bool(self._slot_adapters[plan.slots].any())
        graph = self._decode_graphs.fitting(plan.num_batched_tokens, is_sharing=False, has_adapters=has_adapters)
        results, logprobs = self._draft_steps.run(plan, drafts, graph, upload, masks)
        self._is_sharing = False
        self._unread = replace(self._tickets.of(plan, results, logprobs), num_rows=plan.num_tokens)
        return self._unread

    def _replay_sampling(self, sampling: SamplingGraph) -> Tensor:
        sampling.graph.replay()
        return sampling.results

    def _longest_first(self, slots: IntArray) -> IntArray:
        """Put long contexts first, so that none is left running alone at the end of a kernel."""
        return slots[np.argsort(-self._next_positions[slots], kind="stable")]

    def _share_prefixes(self, plan: StepPlan, num_decodes: int, upload: Upload) -> bool:
        """Find the prefix groups of a plan's decode slots and copy them to where the graphs read them."""
        groups = self._groups(plan, num_decodes)
        if groups is None:
            return False
        places = [upload.put(groups.lens), upload.put(groups.tile_seqs), upload.put(groups.tile_lens)]
        upload.send()
        self._shared.fill(*(upload.get(place) for place in places))
        return True

    def _groups(self, plan: StepPlan, num_decodes: int) -> PrefixGroups | None:
        if not self._shares_prefixes or num_decodes < MIN_SEQS:
            return None
        return self._mirror.groups(
            plan.slots[:num_decodes], block_size=self._shape.block_size, seqs_per_tile=self._seqs_per_tile
        )

    def _forward_decode(self, size: int, *, is_sharing: bool, has_adapters: bool = False) -> Tensor:
        slots, inputs = self._rows.slots(size), self._inputs.first(size)
        slot_kernels.prepare_decode(
            slots,
            self._slots.tokens,
            self._slots.computed,
            self._slots.block_tables,
            self._shape.block_size,
            inputs.token_ids,
            inputs.positions,
            inputs.slot_mapping,
            inputs.context_lens,
            self._rows.offsets(size),
            self._rows.drafts(size),
        )
        layout = StepLayout(
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            query_starts=inputs.query_starts,
            context_lens=inputs.context_lens,
            slots=slots,
            block_tables=self._slots.block_tables,
            max_query_len=1,
            max_context_len=self._shape.max_model_len,
            num_decodes=size,
            splits=self._splits(size),
            has_few_decodes=size <= MAX_FEW_DECODES,
            offsets=self._rows.offsets(size),
            shared=self._shared.first(size) if is_sharing else None,
            adapters=self._slots.adapter_rows(slots) if has_adapters else None,
        )
        compute = self._decoder.step_logits if self._decoder.is_last_stage else self._decoder.hidden
        return compute(inputs.token_ids, layout, self._caches)

    @torch.inference_mode()
    def _capture_graphs(self, on_stage: OnStage) -> None:
        decodes = self._decoder.spec.pooler is None
        num_decode_graphs = self._decode_graphs.num_graphs if decodes else 0
        numbers, total = count(1), self._prefill_graphs.num_graphs + num_decode_graphs

        def captured() -> None:
            on_stage("capture", next(numbers), total)

        padding_slot = self._slots.padding_slot
        pool, is_stage = torch.cuda.graph_pool_handle(), self._stages is not None
        capture = Capture(pool, self._device, self._decoder.group, is_stage=is_stage)
        sample = self._sample_decoded if self._decoder.is_last_stage else None
        verify = None if self._draft_steps is None else self._draft_steps.verify
        self._prefill_graphs.warm_up(padding_slot)
        mark("prefill run")
        if not decodes:
            self._prefill_graphs.capture(capture, padding_slot, captured)
            return
        self._decode_graphs.warm_up(self._forward_decode, sample, self._device, verify)
        adapted = None if self._shape.adapters is None else partial(self._forward_decode, has_adapters=True)
        if adapted is not None:
            self._decode_graphs.warm_up(adapted, None, self._device, has_adapters=True)
        mark("decodes run")
        on_stage("capture", 0, total)
        self._prefill_graphs.capture(capture, padding_slot, captured)
        mark("prefill graphs captured")
        whole = self._whole_step if sample is not None and self._decoder.group is None and not is_stage else None
        if whole is not None:
            whole(1)  # compiles kernels
        self._decode_graphs.capture(self._forward_decode, sample, capture, captured, adapted, verify, whole)
        self._ring.begin()
        if self._draft is not None:
            self._draft.capture(capture)

    def _sample_decoded(self, logits: Tensor, has_filters: bool) -> Tensor:
        slots = self._rows.slots(logits.shape[0])
        return self._sampling.plain(logits, slots, has_filters=has_filters, advances=True)

    def _whole_step(self, size: int) -> Tensor:
        logits, slots = self._forward_decode(size, is_sharing=False), self._rows.slots(size)
        return self._sampling.plain(logits, slots, has_filters=False, advances=True, ring=self._ring)

    def _mixed(self, plan: StepPlan, upload: Upload, masks: Masks | None) -> Ticket:
        """Run any step, in this order: decode, prefill continuations, fresh prefills."""
        plan, num_decodes, num_fresh = ordered(plan, self._next_positions[plan.slots])
        self._next_positions[plan.slots] += plan.num_tokens
        self._is_sharing = False
        spans = self._prompt_logprobs.spans(
            plan.slots, plan.num_tokens, self._next_positions[plan.slots] - plan.num_tokens
        )
        sampling = np.flatnonzero(plan.samples)
        ends = np.cumsum(plan.num_tokens)[sampling] - 1
        places = [upload.put(array) for array in (plan.slots, plan.num_tokens, ends, plan.slots[sampling])]
        has_adapters = bool(self._slot_adapters[plan.slots].any())
        is_eager = bool(spans or plan.readout_chunks) or has_adapters
        graph = None if is_eager else self._prefill_graph(plan, num_decodes)
        groups = None
        if graph is None or not self._has_small_contexts(plan.slots[:num_decodes]):
            groups = self._groups(plan, num_decodes)
            graph = graph if groups is None else None
        if graph is not None:
            inputs = upload.put(graph.shape.packed(plan.slots, plan.num_tokens, num_decodes, self._slots.padding_slot))
            upload.send()
            outputs = StepOutputs(graph.run(upload.get(inputs))[upload.get(places[2]).long()])
        else:
            order = StepOrder(num_decodes, num_fresh, self._next_positions[plan.slots], groups)
            adapter_rows = self._slots.adapter_rows if has_adapters else None
            layout, token_ids = self._layouts.of_step(plan, order, upload, adapter_rows)
            outputs = self._compute(plan, token_ids, layout, upload.get(places[2]).long(), ends, spans)
        slots, num_tokens, _, sampling_slots = (upload.get(place) for place in places)
        self._slots.advance(slots, num_tokens)
        if not self._decoder.is_last_stage:
            return self._tickets.passed_on(plan)
        if not len(sampling):
            return self._tickets.without_samples(plan, outputs)
        logits = self._decoder.logits(outputs.last_hidden)
        if self._sampler.is_plain(plan.slots[sampling]):
            has_filters = self._sampler.has_filters(plan.slots[sampling])
            results = self._sampling.plain(logits, sampling_slots, has_filters=has_filters, advances=False)
            return self._tickets.of(plan, results, None, outputs)
        sampled = self._sampling.with_all_features(plan, logits, sampling_slots, masks, advances=False)
        return self._tickets.of(plan, *sampled, outputs)

    def _prefill_graph(self, plan: StepPlan, num_decodes: int) -> PrefillGraph | None:
        if not self._uses_graphs:
            return None
        num_prompts = len(plan.slots) - num_decodes
        longest = int(self._next_positions[plan.slots[num_decodes:]].max(initial=0))
        return self._prefill_graphs.fitting(plan.num_batched_tokens, num_prompts, longest)

    def _has_small_contexts(self, slots: IntArray) -> bool:
        """Whether the GPU reads the contexts of these slots sooner than the host launches a step: then sharing their
        prefixes gains less than a graph."""
        spec, cache = self._decoder.spec, self._caches[0].keys
        token_bytes = spec.kv_elements_per_token // spec.num_cache_layers * cache.element_size()
        return int(self._next_positions[slots].sum()) * token_bytes < _SMALL_CONTEXT_BYTES

    def _forward_prefill(self, shape: PrefillShape, arrays: list[Tensor]) -> Tensor:
        layout, token_ids = self._layouts.of_arrays(arrays, shape.num_decodes, shape.num_tokens)
        return self._decoder.hidden(token_ids, layout, self._caches)

    def _compute(
        self,
        plan: StepPlan,
        token_ids: Tensor,
        layout: StepLayout,
        ends: Tensor,
        host_ends: IntArray,
        spans: tuple[PromptSpan, ...],
    ) -> StepOutputs:
        """Run the model: hidden states of the tokens at `ends`, prompt log-probabilities and readouts. A stage before
        the last one passes on those of all tokens."""
        if not self._decoder.is_last_stage:
            return StepOutputs(self._decoder.hidden(token_ids, layout, self._caches))
        chunks = plan.readout_chunks
        readouts = lay_out_readouts(chunks, plan.slots, plan.num_tokens) if chunks else None
        if not spans and readouts is None:
            return StepOutputs(self._decoder.hidden(token_ids, layout, self._caches, kept=ends))
        return compute_with_prompt_outputs(
            self._decoder, token_ids, layout, self._caches, host_ends, spans, readouts, self._slots.tokens
        )

    def _splits(self, num_seqs: int, spec: ModelSpec | None = None) -> Splits:
        spec = self._decoder.spec if spec is None else spec
        splits = splits_of(num_seqs, programs_per_decode(spec), spec.head_dim, self._shape.max_model_len)
        return replace(splits, arrivals=self._arrivals)
