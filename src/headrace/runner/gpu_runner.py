"""Runs plans on a GPU. Nothing here waits for the device but `collect`, and `submit` for masks.

A step of one token each is two graph replays, the model and then the draw and the append, which leave in the rows all
that the next step needs; the host sends only what changed. Other steps run the same model eagerly. Tokens come back in
pinned memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.gpu import flash
from headrace.kernels.gpu import rows as row_kernels
from headrace.kernels.gpu.draw import draw
from headrace.kernels.gpu.filters import Filters
from headrace.kernels.layout import Gathering, SharedPrefixes, Splits, StepLayout
from headrace.models.decoder import Decoder
from headrace.runner.computed import Computed, compute_with_prompts
from headrace.runner.decode_inputs import (
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
from headrace.runner.gatherings import gathering_pays, groups_of, most_gathered
from headrace.runner.gpu_memory import reserve
from headrace.runner.prefix_groups import MIN_SEQS, BlockTableMirror, PrefixGroups
from headrace.runner.product_kernels import load_products
from headrace.runner.prompt_logprobs import PromptLogprobsRows
from headrace.runner.reads import lay_out
from headrace.runner.results import on_its_way, step_logprobs
from headrace.runner.shape import RunnerShape
from headrace.runner.tiles import tiles_of
from headrace.runner.upload import Upload, UploadRing
from headrace.sampling import PlacedMasks, SampledLogprobs, Sampler
from headrace.steps import BROKEN, Admission, IntArray, Masks, StepPlan, StepResult

_RESULTS_IN_FLIGHT = 8


@dataclass(frozen=True, slots=True)
class Ticket:
    """A submitted step: its tokens are in `results` once `done` has happened."""

    step: int
    rows: IntArray
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
        self._padding_row = shape.max_num_seqs
        self._tokens = torch.zeros(num_rows, shape.max_model_len + 1, dtype=torch.int32, device=device)
        self._lens = torch.ones(num_rows, dtype=torch.int64, device=device)
        self._computed = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._block_tables = torch.full((num_rows, max_blocks), shape.num_blocks, dtype=torch.int32, device=device)
        self._is_finished = torch.ones(num_rows, dtype=torch.bool, device=device)
        self._sampler = Sampler(num_rows, spec.vocab_size, device, tokens=self._tokens)
        self._prompt_logprobs = PromptLogprobsRows(num_rows)
        self._caches = [
            ops.allocate_cache(shape.num_blocks + 1, shape.block_size, spec.num_kv_heads, spec.head_dim, dtype, device)
            for _ in range(spec.num_layers)
        ]
        self._upload = UploadRing(device)
        self._most = most = graph_size(shape.max_num_seqs)
        self._decode_rows = torch.full((most,), self._padding_row, dtype=torch.int32, device=device)
        self._inputs = DecodeInputs(most, device)
        self._arrivals = torch.zeros(most * spec.num_kv_heads, dtype=torch.int32, device=device)
        self._graphs: dict[tuple[int, bool], DecodeGraph] = {}  # by size and whether beginnings are shared
        self._fast_sizes: dict[int, int] = {}  # for each size, that of the fastest graph that has room for it
        self._mirror = BlockTableMirror(num_rows, max_blocks)
        self._next_positions = np.zeros(num_rows, np.int64)
        self._sorted_rows = np.empty(0, np.int64)  # of the last decode step
        self._seqs_per_tile = seqs_per_tile(spec, dtype)
        self._shares = enable_sharing(spec, decoder.max_len)
        self._shared = SharedBuffers(most, self._seqs_per_tile, device)
        self._is_sharing = False
        self._gathers = flash.is_made_for(decoder.dtype, spec.head_dim, device)
        self._graph_pool = torch.cuda.graph_pool_handle()
        self._results = torch.empty(_RESULTS_IN_FLIGHT, 2 * most, dtype=torch.int32, pin_memory=True)
        self._row_numbers = torch.empty(_RESULTS_IN_FLIGHT, most, dtype=torch.int32, pin_memory=True)
        load_products(decoder, shape.max_num_batched_tokens)
        self._capture_all()
        reserve(shape.step_bytes, device)

    # ---- the runner's protocol

    @torch.inference_mode()
    def submit(self, plan: StepPlan, masks: Masks | None = None) -> Ticket:
        upload = self._upload.begin(self._num_values(plan))
        self._take_in(plan, upload)
        if plan.num_batched_tokens == len(plan.rows) and plan.samples.all():
            ticket = self._decode(plan, upload, masks)
        else:
            ticket = self._mixed(plan, upload, masks)
        self._upload.end()
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        ticket.done.synchronize()
        tokens, finished = ticket.results.numpy()[:, : len(ticket.rows)].copy()
        logprobs = None if ticket.logprobs is None else step_logprobs(ticket.logprobs)
        return StepResult(
            ticket.step,
            ticket.rows,
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
        num_prompt = sum(len(admission.token_ids) + 16 for admission in plan.admissions)
        num_writes = 0 if plan.table_writes is None else len(plan.table_writes.rows)
        return num_prompt + 3 * num_writes + 2 * plan.num_batched_tokens + 64 * len(plan.rows) + 1024

    def _take_in(self, plan: StepPlan, upload: Upload) -> None:
        writes = plan.table_writes
        places = [] if writes is None else [upload.put(a) for a in (writes.rows, writes.indexes, writes.blocks)]
        admitted = self._put_admissions(plan.admissions, upload)
        if places or admitted:
            upload.send()
        if places:
            assert writes is not None
            self._mirror.write(writes)
            row_kernels.write_tables(self._block_tables, *(upload.get(place) for place in places))
        if admitted:
            self._write_admissions(plan.admissions, admitted, upload)
        if plan.copies:
            copies = torch.tensor(plan.copies).pin_memory().to(self._device, non_blocking=True)
            sources, targets = copies.unbind(1)
            ops.copy_blocks(self._caches, sources, targets)

    def _put_admissions(self, admissions: tuple[Admission, ...], upload: Upload) -> list[slice]:
        if not admissions:
            return []
        lens = np.array([len(a.token_ids) for a in admissions])
        columns = np.array(
            [[a.row for a in admissions], lens, [a.num_computed for a in admissions], np.cumsum(lens) - lens]
        )
        return [upload.put(columns), upload.put(np.concatenate([a.token_ids for a in admissions]))]

    def _write_admissions(self, admissions: tuple[Admission, ...], places: list[slice], upload: Upload) -> None:
        columns, prompts = (upload.get(place) for place in places)
        row_kernels.admit(
            columns.view(4, -1),
            prompts,
            max(len(admission.token_ids) for admission in admissions),
            self._tokens,
            self._lens,
            self._computed,
            self._is_finished,
        )
        for admission in admissions:
            self._next_positions[admission.row] = admission.num_computed
            self._prompt_logprobs.admit(admission)
            self._sampler.admit(
                admission.row,
                admission.params,
                seed=admission.seed,
                prompt_len=admission.prompt_len,
                end_len=admission.end_len,
                stop_token_ids=admission.stop_token_ids,
            )
        self._sampler.send()

    # ---- steps

    def _decode(self, plan: StepPlan, upload: Upload, masks: Masks | None) -> Ticket:
        """One token each: a graph of some size from theirs on up, padded with the row that is nobody's."""
        num_rows = len(plan.rows)
        if not plan.is_steady:
            self._sorted_rows = self._longest_first(plan.rows)
        plan = replace(plan, rows=self._sorted_rows)
        self._next_positions[plan.rows] += 1
        if not plan.is_steady:
            self._is_sharing = self._share(plan, num_rows, upload)
        size = sharing_size(num_rows, self._most) if self._is_sharing else self._fast_sizes[graph_size(num_rows)]
        if not plan.is_steady:
            numbers = self._row_numbers[plan.step % _RESULTS_IN_FLIGHT, :size]
            numbers.numpy()[:] = self._padding_row
            numbers.numpy()[:num_rows] = plan.rows
            self._decode_rows[:size].copy_(numbers, non_blocking=True)
        graph = self._graphs[size, self._is_sharing]
        graph.model.replay()
        if self._sampler.is_plain(plan.rows):
            finish = graph.finish_filtered if self._sampler.has_filters(plan.rows) else graph.finish
            finish.graph.replay()
            return self._ticket(plan, finish.results)
        rows = self._decode_rows[:num_rows]
        logits = graph.logits[:num_rows]
        results, logprobs = self._draw_with_all_features(plan, logits, rows, masks, advances=True)
        return self._ticket(plan, results, logprobs)

    def _longest_first(self, rows: IntArray) -> IntArray:
        """Long contexts start first, so that none is left running alone at the end of a kernel."""
        return rows[np.argsort(-self._next_positions[rows], kind="stable")]

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
            plan.rows[:num_single], block_size=self._shape.block_size, seqs_per_tile=self._seqs_per_tile
        )

    def _forward_decode(self, size: int, *, is_sharing: bool) -> Tensor:
        rows, inputs = self._decode_rows[:size], self._inputs.first(size)
        row_kernels.prepare_decode(
            rows,
            self._tokens,
            self._computed,
            self._block_tables,
            self._shape.block_size,
            inputs.token_ids,
            inputs.positions,
            inputs.slots,
            inputs.context_lens,
        )
        layout = StepLayout(
            positions=inputs.positions,
            slots=inputs.slots,
            query_starts=inputs.query_starts,
            context_lens=inputs.context_lens,
            rows=rows,
            block_tables=self._block_tables,
            max_query_len=1,
            max_context_len=self._shape.max_model_len,
            num_single=size,
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
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            for size in {sizes[0], sizes[-1], sizes[-2:][0]}:  # compiles kernels and sets up libraries
                logits = self._forward_decode(size, is_sharing=False)
                for has_filters in (False, True):
                    self._draw_plainly(logits, self._decode_rows[:size], has_filters=has_filters, advances=True)
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
            rows = self._decode_rows[: logits.shape[0]]
            results = self._draw_plainly(logits, rows, has_filters=has_filters, advances=True)
        return FinishGraph(graph, results)

    def _mixed(self, plan: StepPlan, upload: Upload, masks: Masks | None) -> Ticket:
        """Any step: rows of one token first, then prompts that go on, then those that begin."""
        plan, num_single, num_fresh = self._fresh_last(plan)
        starts = np.concatenate([[0], np.cumsum(plan.num_tokens)])
        token_rows = np.repeat(plan.rows, plan.num_tokens)
        offsets = np.arange(len(token_rows)) - np.repeat(starts[:-1], plan.num_tokens)
        drawing = np.flatnonzero(plan.samples)
        tiles, num_fresh_tiles = tiles_of(plan.num_tokens, num_single, num_fresh)
        arrays = (
            token_rows, offsets, plan.rows, plan.num_tokens, starts, tiles, starts[1:][drawing] - 1, plan.rows[drawing],
        )  # fmt: skip
        places = [upload.put(array) for array in arrays]
        self._is_sharing = False
        groups = self._groups(plan, num_single)
        shared = [] if groups is None else [upload.put(a) for a in (groups.lens, groups.tile_seqs, groups.tile_lens)]
        gatherings = self._gatherings(plan, num_single, num_fresh, upload)
        upload.send()
        on_device = [upload.get(place) for place in places]
        prefixes = None
        if shared:
            lens, seqs, tile_lens = (upload.get(place) for place in shared)
            prefixes = SharedPrefixes(lens, seqs.view(-1, self._seqs_per_tile), tile_lens)
        layout, token_ids = self._mixed_layout(on_device[:6], num_single, int(plan.num_tokens.max()))
        layout = replace(
            layout, shared=prefixes, num_fresh=num_fresh, num_fresh_tiles=num_fresh_tiles, gatherings=gatherings
        )
        ends, rows = on_device[6:]
        computed = self._compute(plan, token_ids, layout, ends.long(), starts[1:][drawing] - 1)
        logits = self._decoder.logits(computed.ends)
        self._advance(layout.rows, on_device[3])
        if self._sampler.is_plain(plan.rows[drawing]):
            has_filters = self._sampler.has_filters(plan.rows[drawing])
            results = self._draw_plainly(logits, rows, has_filters=has_filters, advances=False)
            return self._ticket(plan, results, None, computed)
        return self._ticket(plan, *self._draw_with_all_features(plan, logits, rows, masks, advances=False), computed)

    def _gatherings(self, plan: StepPlan, num_single: int, num_fresh: int, upload: Upload) -> tuple[Gathering, ...]:
        """Of the prompts that go on, which stand between rows of one token and prompts that begin."""
        spec, older = self._decoder.spec, slice(num_single, len(plan.rows) - num_fresh)
        context_lens = self._next_positions[plan.rows[older]]
        if not self._gathers or not gathering_pays(
            plan.num_tokens[older],
            context_lens,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            cache_bytes=self._caches[0].keys.element_size(),
        ):
            return ()
        gatherings = []
        for group in groups_of(context_lens, most_gathered(self._shape.max_num_batched_tokens, self._decoder.max_len)):
            lens = context_lens[group]
            starts = upload.get(upload.put(np.concatenate([[0], np.cumsum(lens)])))
            gatherings.append(Gathering(num_single + group.start, starts, int(lens.sum()), int(lens.max())))
        return tuple(gatherings)

    def _compute(
        self, plan: StepPlan, token_ids: Tensor, layout: StepLayout, ends: Tensor, host_ends: IntArray
    ) -> Computed:
        """What the model makes of the tokens at `ends`, and of prompts of which something is asked."""
        positions = self._next_positions[plan.rows] - plan.num_tokens
        spans = self._prompt_logprobs.spans(plan.rows, plan.num_tokens, positions)
        reads = lay_out(plan.reads, plan.rows, plan.num_tokens) if plan.reads else None
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
        positions = self._next_positions[plan.rows]
        begins = positions == 0
        begins[:num_single] = False
        self._next_positions[plan.rows] += plan.num_tokens
        chunks = num_single + np.argsort(begins[num_single:], kind="stable")
        order = np.concatenate([np.argsort(-positions[:num_single], kind="stable"), chunks])
        ordered = replace(plan, rows=plan.rows[order], num_tokens=plan.num_tokens[order], samples=plan.samples[order])
        return ordered, num_single, int(begins.sum())

    def _mixed_layout(self, arrays: list[Tensor], num_single: int, max_query_len: int) -> tuple[StepLayout, Tensor]:
        """Where the tokens of a step lie, and which they are."""
        token_rows, offsets, rows, num_tokens, starts, tiles = arrays
        token_rows_long = token_rows.long()
        positions = self._computed[token_rows_long] + offsets
        blocks = self._block_tables[token_rows_long, positions // self._shape.block_size].long()
        layout = StepLayout(
            positions=positions,
            slots=blocks * self._shape.block_size + positions % self._shape.block_size,
            query_starts=starts,
            context_lens=(self._computed[rows.long()] + num_tokens).int(),
            rows=rows,
            block_tables=self._block_tables,
            max_query_len=max_query_len,
            max_context_len=self._shape.max_model_len,
            num_single=num_single,
            splits=self._splits(max(1, num_single)),
            tiles=tiles.view(-1, 2),
        )
        return layout, self._tokens[token_rows_long, positions]

    def _splits(self, num_seqs: int) -> Splits:
        splits = splits_of(num_seqs, self._decoder.spec.num_kv_heads, self._shape.max_model_len)
        return replace(splits, arrivals=self._arrivals)

    def _advance(self, rows: Tensor, num_tokens: Tensor) -> None:
        """The tokens of a step are computed, but for rows that had ended."""
        rows_long = rows.long()
        self._computed[rows_long] += num_tokens * ~self._is_finished[rows_long]

    # ---- drawing

    def _draw_plainly(self, logits: Tensor, rows: Tensor, *, has_filters: bool, advances: bool) -> Tensor:
        """Temperature, filters and seed: no host in it, so that a graph can hold it. [2, B] int32."""
        columns = self._sampler.columns
        drawn = torch.empty(rows.shape[0], dtype=torch.int64, device=self._device)
        flags = torch.empty(rows.shape[0], dtype=torch.uint8, device=self._device)
        filters = Filters(columns["min_p"], columns["top_k"], columns["top_p"]) if has_filters else None
        draw(logits, rows, self._lens, columns["temperature"], columns["seed"], drawn, flags, filters)
        return self._append(rows, drawn, flags, advances=advances)

    def _draw_with_all_features(
        self, plan: StepPlan, logits: Tensor, rows: Tensor, masks: Masks | None, *, advances: bool
    ) -> tuple[Tensor, SampledLogprobs | None]:
        rows_long = rows.long()
        drawing = plan.rows if plan.samples.all() else plan.rows[plan.samples]
        sampled = self._sampler.sample(
            logits.float(),
            rows_long,
            self._lens[rows_long],
            host_rows=drawing,
            host_lens=self._next_positions[drawing],  # what is computed is all that there is
            masks=None
            if masks is None
            else PlacedMasks.of(masks, drawing, self._device),  # the model is at work by now
        )
        flags = torch.where(sampled.finished == BROKEN, sampled.finished, 0)
        return self._append(rows, sampled.tokens, flags, advances=advances), sampled.logprobs

    def _append(self, rows: Tensor, drawn: Tensor, flags: Tensor, *, advances: bool) -> Tensor:
        columns = self._sampler.columns
        out = torch.empty(2, rows.shape[0], dtype=torch.int32, device=self._device)
        row_kernels.append_tokens(
            rows,
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
        return Ticket(plan.step, plan.rows[plan.samples], pinned, logprobs, computed, done)
