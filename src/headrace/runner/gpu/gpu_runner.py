"""Runs plans on a GPU. Nothing here waits for the device but `collect`, and `submit` for masks.

A step of one token each is two graph replays, the model and then the draw and the append, which leave in the rows all
that the next step needs; the host sends only what changed. Of small steps with prompts the model is a graph too; others
run it eagerly. Tokens come back in pinned memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.gpu import slots as slot_kernels
from headrace.kernels.gpu.sample import sample
from headrace.kernels.gpu.threshold_types import Filters
from headrace.kernels.layout import Splits, StepLayout
from headrace.models.decoder import Decoder
from headrace.runner.computed import Computed, compute_with_prompts
from headrace.runner.gpu.decode_inputs import (
    DecodeInputs,
    SharedBuffers,
    enable_sharing,
    fastest_sizes,
    graph_size,
    milliseconds,
    seqs_per_tile,
    sharing_size,
    splits_of,
)
from headrace.runner.gpu.gemm_warmup import load_products
from headrace.runner.gpu.memory import reserve
from headrace.runner.gpu.prefill_graphs import PromptGraph, PromptGraphs, PromptShape
from headrace.runner.gpu.prefix_groups import MIN_SEQS, BlockTableMirror, PrefixGroups
from headrace.runner.gpu.step_layouts import StepLayouts, StepParts
from headrace.runner.gpu.upload import Upload, UploadRing
from headrace.runner.prompt_logprobs import PromptLogprobsSlots, Span
from headrace.runner.reads import lay_out
from headrace.runner.results import on_its_way, step_logprobs
from headrace.runner.shape import RunnerShape
from headrace.sampling import PlacedMasks, SampledLogprobs, Sampler
from headrace.steps import BROKEN, IntArray, Masks, SlotEntry, StepPlan, StepResult

_RESULTS_IN_FLIGHT = 8
_LITTLE_BYTES = 1 << 30  # of one layer's cache: 0.25 ms on an H200, where a layer takes the host 0.7
_GRAPH_VALUES = 1 << 14  # that describe a step for the largest graph, with some to spare


@dataclass(frozen=True, slots=True)
class Ticket:
    """A submitted step: its tokens are in `results` once `done` has happened."""

    step: int
    slots: IntArray
    results: Tensor  # [2, B or more] int32, pinned: tokens, and how the rows stand
    logprobs: SampledLogprobs | None  # pinned too
    computed: Computed | None  # what was asked of prompts, pinned too
    done: torch.cuda.Event


@dataclass(frozen=True, slots=True)
class FinishGraph:
    """The draw and the append."""

    graph: torch.cuda.CUDAGraph
    results: Tensor  # [2, B] int32


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """The model for one number of rows, and the plain draw after it: one launch each."""

    model: torch.cuda.CUDAGraph
    logits: Tensor  # [B, V]
    finish: FinishGraph
    finish_filtered: FinishGraph  # with min_p, top_k and top_p


class GpuRunner:
    """Owns weights, cache and rows on one GPU. The last row and the last block are nobody's: padding goes there."""

    def __init__(self, decoder: Decoder, shape: RunnerShape) -> None:
        spec, device, dtype = decoder.spec, decoder.device, shape.kv_dtype or decoder.dtype
        self._decoder, self._device, self._shape = decoder, device, shape
        num_rows, max_blocks = shape.max_num_seqs + 1, -(-shape.max_model_len // shape.block_size)
        self._padding_slot = shape.max_num_seqs
        self._tokens = torch.zeros(num_rows, shape.max_model_len + 1, dtype=torch.int32, device=device)
        self._lens = torch.ones(num_rows, dtype=torch.int64, device=device)
        self._computed = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._block_tables = torch.full((num_rows, max_blocks), shape.num_blocks, dtype=torch.int32, device=device)
        self._is_finished = torch.ones(num_rows, dtype=torch.bool, device=device)
        self._sampler = Sampler(num_rows, spec.vocab_size, device, tokens=self._tokens)
        self._prompt_logprobs = PromptLogprobsSlots(num_rows)
        self._caches = [
            ops.allocate_cache(shape.num_blocks + 1, shape.block_size, spec.num_kv_heads, spec.head_dim, dtype, device)
            for _ in range(spec.num_layers)
        ]
        self._upload = UploadRing(device)
        self._most = most = graph_size(shape.max_num_seqs)
        self._decode_slots = torch.full((most,), self._padding_slot, dtype=torch.int32, device=device)
        self._inputs = DecodeInputs(most, device)
        self._arrivals = torch.zeros(most * spec.num_kv_heads, dtype=torch.int32, device=device)
        self._graphs: dict[tuple[int, bool], DecodeGraph] = {}  # by size and whether beginnings are shared
        self._fast_sizes: dict[int, int] = {}  # for each size, that of the fastest graph that has room for it
        self._mirror = BlockTableMirror(num_rows, max_blocks)
        self._next_positions = np.zeros(num_rows, np.int64)
        self._sorted_slots = np.empty(0, np.int64)  # of the last decode step
        self._seqs_per_tile = seqs_per_tile(spec, dtype)
        self._shares = enable_sharing(spec, decoder.max_len)
        self._shared = SharedBuffers(most, self._seqs_per_tile, device)
        self._is_sharing = False
        self._graph_pool = torch.cuda.graph_pool_handle()
        self._results = torch.empty(_RESULTS_IN_FLIGHT, 2 * most, dtype=torch.int32, pin_memory=True)
        self._slot_numbers = torch.empty(_RESULTS_IN_FLIGHT, most, dtype=torch.int32, pin_memory=True)
        self._layouts = StepLayouts(
            decoder, shape, self._caches, self._tokens, self._computed, self._block_tables, self._splits
        )
        self._prompt_graphs = PromptGraphs(
            self._forward_prompts,
            spec,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            max_num_seqs=shape.max_num_seqs,
            max_model_len=shape.max_model_len,
            dtype=decoder.dtype,
            device=device,
        )
        load_products(decoder, shape.max_num_batched_tokens)
        self._capture_all()
        reserve(shape.step_bytes, device)

    # ---- the runner's protocol

    @torch.inference_mode()
    def submit(self, plan: StepPlan, masks: Masks | None = None) -> Ticket:
        upload = self._upload.begin(self._num_values(plan))
        self._take_in(plan, upload)
        if plan.num_batched_tokens == len(plan.slots) and plan.samples.all():
            ticket = self._decode(plan, upload, masks)
        else:
            ticket = self._mixed(plan, upload, masks)
        self._upload.end()
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        ticket.done.synchronize()
        tokens, finished = ticket.results.numpy()[:, : len(ticket.slots)].copy()
        logprobs = None if ticket.logprobs is None else step_logprobs(ticket.logprobs)
        return StepResult(
            ticket.step,
            ticket.slots,
            tokens.astype(np.int64),
            finished.astype(np.uint8),
            logprobs,
            ticket.computed.prompt_logprobs() if ticket.computed is not None else (),
            ticket.computed.readings() if ticket.computed is not None else (),
        )

    def close(self) -> None:
        torch.cuda.synchronize(self._device)

    # ---- taking in changes

    def _num_values(self, plan: StepPlan) -> int:
        num_prompt = sum(len(entry.token_ids) + 16 for entry in plan.slot_entries)
        num_writes = 0 if plan.table_writes is None else len(plan.table_writes.slots)
        return num_prompt + 3 * num_writes + 2 * plan.num_batched_tokens + 64 * len(plan.slots) + _GRAPH_VALUES

    def _take_in(self, plan: StepPlan, upload: Upload) -> None:
        writes = plan.table_writes
        places = [] if writes is None else [upload.put(a) for a in (writes.slots, writes.indexes, writes.blocks)]
        admitted = self._put_slot_entries(plan.slot_entries, upload)
        if places or admitted:
            upload.send()
        if places:
            assert writes is not None
            self._mirror.write(writes)
            slot_kernels.write_tables(self._block_tables, *(upload.get(place) for place in places))
        if admitted:
            self._write_slot_entries(plan.slot_entries, admitted, upload)
        if plan.copies:
            copies = torch.tensor(plan.copies).pin_memory().to(self._device, non_blocking=True)
            sources, targets = copies.unbind(1)
            ops.copy_blocks(self._caches, sources, targets)

    def _put_slot_entries(self, slot_entries: tuple[SlotEntry, ...], upload: Upload) -> list[slice]:
        if not slot_entries:
            return []
        lens = np.array([len(a.token_ids) for a in slot_entries])
        columns = np.array(
            [[a.slot for a in slot_entries], lens, [a.num_computed for a in slot_entries], np.cumsum(lens) - lens]
        )
        return [upload.put(columns), upload.put(np.concatenate([a.token_ids for a in slot_entries]))]

    def _write_slot_entries(self, slot_entries: tuple[SlotEntry, ...], places: list[slice], upload: Upload) -> None:
        columns, prompts = (upload.get(place) for place in places)
        slot_kernels.admit(
            columns.view(4, -1),
            prompts,
            max(len(entry.token_ids) for entry in slot_entries),
            self._tokens,
            self._lens,
            self._computed,
            self._is_finished,
        )
        for entry in slot_entries:
            self._next_positions[entry.slot] = entry.num_computed
            self._prompt_logprobs.admit(entry)
            self._sampler.admit(
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
        """One token each: a graph of some size from theirs on up, padded with the row that is nobody's."""
        num_rows = len(plan.slots)
        if not plan.is_steady:
            self._sorted_slots = self._longest_first(plan.slots)
        plan = replace(plan, slots=self._sorted_slots)
        self._next_positions[plan.slots] += 1
        if not plan.is_steady:
            self._is_sharing = self._share(plan, num_rows, upload)
        size = sharing_size(num_rows, self._most) if self._is_sharing else self._fast_sizes[graph_size(num_rows)]
        if not plan.is_steady:
            numbers = self._slot_numbers[plan.step % _RESULTS_IN_FLIGHT, :size]
            numbers.numpy()[:] = self._padding_slot
            numbers.numpy()[:num_rows] = plan.slots
            self._decode_slots[:size].copy_(numbers, non_blocking=True)
        graph = self._graphs[size, self._is_sharing]
        graph.model.replay()
        if self._sampler.is_plain(plan.slots):
            finish = graph.finish_filtered if self._sampler.has_filters(plan.slots) else graph.finish
            finish.graph.replay()
            return self._ticket(plan, finish.results)
        slots = self._decode_slots[:num_rows]
        logits = graph.logits[:num_rows]
        results, logprobs = self._draw_with_all_features(plan, logits, slots, masks, advances=True)
        return self._ticket(plan, results, logprobs)

    def _longest_first(self, slots: IntArray) -> IntArray:
        """Long contexts start first, so that none is left running alone at the end of a kernel."""
        return slots[np.argsort(-self._next_positions[slots], kind="stable")]

    def _share(self, plan: StepPlan, num_single: int, upload: Upload) -> bool:
        """Find what the first rows of a plan have in common, and bring it to where the graphs read it."""
        groups = self._groups(plan, num_single)
        if groups is None:
            return False
        places = [upload.put(groups.lens), upload.put(groups.tile_seqs), upload.put(groups.tile_lens)]
        upload.send()
        self._shared.take(*(upload.get(place) for place in places))
        return True

    def _groups(self, plan: StepPlan, num_single: int) -> PrefixGroups | None:
        if not self._shares or num_single < MIN_SEQS:
            return None
        return self._mirror.groups(
            plan.slots[:num_single], block_size=self._shape.block_size, seqs_per_tile=self._seqs_per_tile
        )

    def _forward_decode(self, size: int, *, is_sharing: bool) -> Tensor:
        slots, inputs = self._decode_slots[:size], self._inputs.first(size)
        slot_kernels.prepare_decode(
            slots,
            self._tokens,
            self._computed,
            self._block_tables,
            self._shape.block_size,
            inputs.token_ids,
            inputs.positions,
            inputs.slot_mapping,
            inputs.context_lens,
        )
        layout = StepLayout(
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            query_starts=inputs.query_starts,
            context_lens=inputs.context_lens,
            slots=slots,
            block_tables=self._block_tables,
            max_query_len=1,
            max_context_len=self._shape.max_model_len,
            num_decodes=size,
            splits=self._splits(size),
            shared=self._shared.first(size) if is_sharing else None,
        )
        hidden = self._decoder.hidden(inputs.token_ids, layout, self._caches)
        return self._decoder.logits(hidden)

    @torch.inference_mode()
    def _capture_all(self) -> None:
        """Every size, the largest first, so that the others fit into its memory."""
        numbers = range(1, self._shape.max_num_seqs + 1)
        sizes = sorted({graph_size(num_rows) for num_rows in numbers}, reverse=True)
        self._prompt_graphs.capture(self._graph_pool, self._padding_slot)
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            for size in {sizes[0], sizes[-1], sizes[-2:][0]}:  # compiles kernels and sets up libraries
                logits = self._forward_decode(size, is_sharing=False)
                for has_filters in (False, True):
                    self._draw_plainly(logits, self._decode_slots[:size], has_filters=has_filters, advances=True)
        stream.synchronize()
        for size in sizes:
            self._capture(size, is_sharing=False)
        self._fast_sizes = fastest_sizes({size: milliseconds(self._graphs[size, False].model) for size in sizes})
        if self._shares:
            for size in sorted({sharing_size(num_rows, self._most) for num_rows in numbers}, reverse=True):
                self._forward_decode(size, is_sharing=True)  # compiles kernels
                self._capture(size, is_sharing=True)

    def _capture(self, size: int, *, is_sharing: bool) -> None:
        model = torch.cuda.CUDAGraph()
        with torch.cuda.graph(model, pool=self._graph_pool):
            logits = self._forward_decode(size, is_sharing=is_sharing)
        finishes = [self._capture_finish(logits, has_filters=has_filters) for has_filters in (False, True)]
        self._graphs[size, is_sharing] = DecodeGraph(model, logits, *finishes)

    def _capture_finish(self, logits: Tensor, *, has_filters: bool) -> FinishGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool):
            slots = self._decode_slots[: logits.shape[0]]
            results = self._draw_plainly(logits, slots, has_filters=has_filters, advances=True)
        return FinishGraph(graph, results)

    def _mixed(self, plan: StepPlan, upload: Upload, masks: Masks | None) -> Ticket:
        """Any step: rows of one token first, then prompts that go on, then those that begin."""
        plan, num_single, num_fresh = self._fresh_last(plan)
        self._is_sharing = False
        spans = self._prompt_logprobs.spans(
            plan.slots, plan.num_tokens, self._next_positions[plan.slots] - plan.num_tokens
        )
        drawing = np.flatnonzero(plan.samples)
        ends = np.cumsum(plan.num_tokens)[drawing] - 1
        places = [upload.put(array) for array in (plan.slots, plan.num_tokens, ends, plan.slots[drawing])]
        graph = None if spans or plan.reads else self._prompt_graph(plan, num_single)
        groups = None
        if graph is None or not self._reads_little(plan.slots[:num_single]):
            groups = self._groups(plan, num_single)
            graph = graph if groups is None else None
        if graph is not None:
            numbers = upload.put(graph.shape.packed(plan.slots, plan.num_tokens, num_single, self._padding_slot))
            upload.send()
            computed = Computed(graph.run(upload.get(numbers))[upload.get(places[2]).long()])
        else:
            parts = StepParts(num_single, num_fresh, self._next_positions[plan.slots], groups)
            layout, token_ids = self._layouts.of_step(plan, parts, upload)
            computed = self._compute(plan, token_ids, layout, upload.get(places[2]).long(), ends, spans)
        slots, num_tokens, _, sampled_slots = (upload.get(place) for place in places)
        logits = self._decoder.logits(computed.ends)
        self._advance(slots, num_tokens)
        if self._sampler.is_plain(plan.slots[drawing]):
            has_filters = self._sampler.has_filters(plan.slots[drawing])
            results = self._draw_plainly(logits, sampled_slots, has_filters=has_filters, advances=False)
            return self._ticket(plan, results, None, computed)
        drawn = self._draw_with_all_features(plan, logits, sampled_slots, masks, advances=False)
        return self._ticket(plan, *drawn, computed)

    def _prompt_graph(self, plan: StepPlan, num_single: int) -> PromptGraph | None:
        num_prompts = len(plan.slots) - num_single
        longest = int(self._next_positions[plan.slots[num_single:]].max(initial=0))
        return self._prompt_graphs.fitting(plan.num_batched_tokens, num_prompts, longest)

    def _reads_little(self, slots: IntArray) -> bool:
        """Whether it takes these rows less time to read all of their contexts than the host to launch a step."""
        spec, cache = self._decoder.spec, self._caches[0].keys
        token_bytes = 2 * spec.num_kv_heads * spec.head_dim * cache.element_size()
        return int(self._next_positions[slots].sum()) * token_bytes < _LITTLE_BYTES

    def _forward_prompts(self, shape: PromptShape, arrays: list[Tensor]) -> Tensor:
        layout, token_ids = self._layouts.of_arrays(arrays, shape.num_single, shape.num_tokens)
        return self._decoder.hidden(token_ids, layout, self._caches)

    def _compute(
        self,
        plan: StepPlan,
        token_ids: Tensor,
        layout: StepLayout,
        ends: Tensor,
        host_ends: IntArray,
        spans: tuple[Span, ...],
    ) -> Computed:
        """What the model makes of the tokens at `ends`, and of prompts of which something is asked."""
        reads = lay_out(plan.reads, plan.slots, plan.num_tokens) if plan.reads else None
        if not spans and reads is None:
            return Computed(self._decoder.hidden(token_ids, layout, self._caches, kept=ends))
        return compute_with_prompts(
            self._decoder, token_ids, layout, self._caches, host_ends, spans, reads, self._tokens
        )

    def _fresh_last(self, plan: StepPlan) -> tuple[StepPlan, int, int]:
        """The plan with the longest rows of one token first and prompts that begin in this step last, and how many
        there are of both."""
        is_long = plan.num_tokens > 1
        num_single = int(np.argmax(is_long)) if is_long.any() else len(is_long)
        positions = self._next_positions[plan.slots]
        begins = positions == 0
        begins[:num_single] = False
        self._next_positions[plan.slots] += plan.num_tokens
        chunks = num_single + np.argsort(begins[num_single:], kind="stable")
        order = np.concatenate([np.argsort(-positions[:num_single], kind="stable"), chunks])
        ordered = replace(plan, slots=plan.slots[order], num_tokens=plan.num_tokens[order], samples=plan.samples[order])
        return ordered, num_single, int(begins.sum())

    def _splits(self, num_seqs: int) -> Splits:
        spec = self._decoder.spec
        splits = splits_of(num_seqs, spec.num_kv_heads, spec.head_dim, self._shape.max_model_len)
        return replace(splits, arrivals=self._arrivals)

    def _advance(self, slots: Tensor, num_tokens: Tensor) -> None:
        """The tokens of a step are computed, but for rows that had ended."""
        slots_long = slots.long()
        self._computed[slots_long] += num_tokens * ~self._is_finished[slots_long]

    # ---- drawing

    def _draw_plainly(self, logits: Tensor, slots: Tensor, *, has_filters: bool, advances: bool) -> Tensor:
        """Temperature, filters and seed: no host in it, so that a graph can hold it. [2, B] int32."""
        columns = self._sampler.columns
        drawn = torch.empty(slots.shape[0], dtype=torch.int64, device=self._device)
        flags = torch.empty(slots.shape[0], dtype=torch.uint8, device=self._device)
        filters = Filters(columns["min_p"], columns["top_k"], columns["top_p"]) if has_filters else None
        sample(logits, slots, self._lens, columns["temperature"], columns["seed"], drawn, flags, filters)
        return self._append(slots, drawn, flags, advances=advances)

    def _draw_with_all_features(
        self, plan: StepPlan, logits: Tensor, slots: Tensor, masks: Masks | None, *, advances: bool
    ) -> tuple[Tensor, SampledLogprobs | None]:
        slots_long = slots.long()
        drawing = plan.slots if plan.samples.all() else plan.slots[plan.samples]
        sampled = self._sampler.sample(
            logits.float(),
            slots_long,
            self._lens[slots_long],
            host_slots=drawing,
            host_lens=self._next_positions[drawing],  # what is computed is all that there is
            masks=None
            if masks is None
            else PlacedMasks.of(masks, drawing, self._device),  # the model is at work by now
        )
        flags = torch.where(sampled.finished == BROKEN, sampled.finished, 0)
        return self._append(slots, sampled.tokens, flags, advances=advances), sampled.logprobs

    def _append(self, slots: Tensor, drawn: Tensor, flags: Tensor, *, advances: bool) -> Tensor:
        columns = self._sampler.columns
        out = torch.empty(2, slots.shape[0], dtype=torch.int32, device=self._device)
        slot_kernels.append_tokens(
            slots,
            drawn,
            flags,
            self._tokens,
            self._lens,
            self._is_finished,
            columns["end_len"],
            columns["stop_token_ids"],
            out,
            advances=self._computed if advances else None,
        )
        return out

    def _ticket(
        self,
        plan: StepPlan,
        results: Tensor,
        logprobs: SampledLogprobs | None = None,
        computed: Computed | None = None,
    ) -> Ticket:
        """Send what was drawn on its way back. Contiguous on both sides: any other copy would wait for the device."""
        pinned = self._results[plan.step % _RESULTS_IN_FLIGHT, : results.numel()].view(results.shape)
        pinned.copy_(results, non_blocking=True)
        logprobs = None if logprobs is None else on_its_way(logprobs)
        computed = None if computed is None else computed.on_its_way()
        done = torch.cuda.Event()
        done.record()
        return Ticket(plan.step, plan.slots[plan.samples], pinned, logprobs, computed, done)
