"""Runs plans on a GPU. Nothing here waits for the device but `collect`.

A step of one token each is one graph replay, then the draw and the append, which leave in the rows all that the next
step needs; the host sends only what changed. Other steps run the same model eagerly. Tokens come back in pinned memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.gpu import rows as row_kernels
from headrace.kernels.gpu.attention import MAX_SPLITS, SHARED_ROWS
from headrace.kernels.gpu.draw import draw
from headrace.kernels.layout import SharedPrefixes, StepLayout
from headrace.models.decoder import Decoder
from headrace.models.spec import ModelSpec
from headrace.runner.prefix_groups import MIN_SEQS, BlockTableMirror, PrefixGroups
from headrace.runner.results import step_logprobs
from headrace.runner.shape import RunnerShape
from headrace.runner.tiles import tiles_of
from headrace.runner.upload import Upload, UploadRing
from headrace.sampling import SampledLogprobs, Sampler
from headrace.steps import BROKEN, Admission, IntArray, StepPlan, StepResult

_RESULTS_IN_FLIGHT = 8


@dataclass(frozen=True, slots=True)
class Ticket:
    """A submitted step: its tokens are in `tokens` once `done` has happened."""

    step: int
    rows: IntArray
    tokens: Tensor  # [2, B] int32, pinned
    logprobs: SampledLogprobs | None  # on the device
    done: torch.cuda.Event


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """The model for one number of rows, as one launch."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor  # [B, V]


class GpuRunner:
    """Owns weights, cache and rows on one GPU. The last row and the last block are nobody's: padding goes there."""

    def __init__(self, decoder: Decoder, shape: RunnerShape) -> None:
        spec, device, dtype = decoder.spec, decoder.device, decoder.dtype
        self._decoder, self._device, self._shape = decoder, device, shape
        num_rows, max_blocks = shape.max_num_seqs + 1, -(-shape.max_model_len // shape.block_size)
        self._padding_row = shape.max_num_seqs
        self._tokens = torch.zeros(num_rows, shape.max_model_len + 1, dtype=torch.int32, device=device)
        self._lens = torch.ones(num_rows, dtype=torch.int64, device=device)
        self._computed = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._block_tables = torch.full((num_rows, max_blocks), shape.num_blocks, dtype=torch.int32, device=device)
        self._is_finished = torch.ones(num_rows, dtype=torch.bool, device=device)
        self._sampler = Sampler(num_rows, spec.vocab_size, device)
        self._caches = [
            ops.allocate_cache(shape.num_blocks + 1, shape.block_size, spec.num_kv_heads, spec.head_dim, dtype, device)
            for _ in range(spec.num_layers)
        ]
        self._upload = UploadRing(device)
        most = graph_size(shape.max_num_seqs)
        self._decode_rows = torch.full((most,), self._padding_row, dtype=torch.int32, device=device)
        self._inputs = DecodeInputs(most, device)
        self._graphs: dict[tuple[int, bool], DecodeGraph] = {}  # by size and whether beginnings are shared
        self._mirror = BlockTableMirror(num_rows, max_blocks)
        group = triton_block(spec.num_heads // spec.num_kv_heads)
        self._seqs_per_tile = max(1, SHARED_ROWS // group)
        self._shares = enable_sharing(spec)
        self._shared = SharedBuffers(most, self._seqs_per_tile, device)
        self._is_sharing = False
        self._graph_pool = torch.cuda.graph_pool_handle()
        self._results = torch.empty(_RESULTS_IN_FLIGHT, 2 * most, dtype=torch.int32, pin_memory=True)
        self._row_numbers = torch.empty(_RESULTS_IN_FLIGHT, most, dtype=torch.int32, pin_memory=True)
        self._capture_all()

    # ---- the runner's protocol

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Ticket:
        upload = self._upload.begin(self._num_values(plan))
        self._take_in(plan, upload)
        if plan.num_batched_tokens == len(plan.rows) and plan.samples.all():
            logits, rows = self._decode(plan, upload)
            advances = self._computed
        else:
            logits, rows = self._mixed(plan, upload)
            advances = None
        ticket = self._finish(plan, logits, rows, advances)
        self._upload.end()
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        ticket.done.synchronize()
        tokens, finished = ticket.tokens.numpy().copy()
        logprobs = None if ticket.logprobs is None else step_logprobs(ticket.logprobs)
        return StepResult(ticket.step, ticket.rows, tokens.astype(np.int64), finished.astype(np.uint8), logprobs)

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
            rows, indexes, blocks = (upload.get(place) for place in places)
            self._block_tables[rows.long(), indexes.long()] = blocks
        if admitted:
            self._write_admissions(plan.admissions, admitted, upload)
        if plan.copies:
            copies = torch.tensor(plan.copies).pin_memory().to(self._device, non_blocking=True)
            sources, targets = copies.unbind(1)
            ops.copy_blocks(self._caches, sources, targets)

    def _put_admissions(self, admissions: tuple[Admission, ...], upload: Upload) -> list[slice]:
        if not admissions:
            return []
        columns = np.array([(a.row, len(a.token_ids), a.num_computed) for a in admissions], np.int32).T
        return [upload.put(columns), *(upload.put(a.token_ids) for a in admissions)]

    def _write_admissions(self, admissions: tuple[Admission, ...], places: list[slice], upload: Upload) -> None:
        rows, lens, computed = upload.get(places[0]).view(3, -1).long()
        self._lens[rows], self._computed[rows] = lens, computed
        self._is_finished.index_fill_(0, rows, 0)  # an assignment would copy the scalar, and wait for it
        for admission, place in zip(admissions, places[1:], strict=True):
            self._tokens[admission.row, : len(admission.token_ids)] = upload.get(place)
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

    def _decode(self, plan: StepPlan, upload: Upload) -> tuple[Tensor, Tensor]:
        """One token each: a graph of the next size up, padded with the row that is nobody's."""
        num_rows = len(plan.rows)
        size = graph_size(num_rows)
        if not plan.is_steady:
            self._is_sharing = self._share(plan, num_rows, upload)
            numbers = self._row_numbers[plan.step % _RESULTS_IN_FLIGHT, :size]
            numbers.numpy()[:] = self._padding_row
            numbers.numpy()[:num_rows] = plan.rows
            self._decode_rows[:size].copy_(numbers, non_blocking=True)
        graph = self._graphs.get((size, self._is_sharing)) or self._capture(size, is_sharing=self._is_sharing)
        graph.graph.replay()
        return graph.logits[:num_rows], self._decode_rows[:num_rows]

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
            num_splits=num_splits(size, self._decoder.spec.num_kv_heads),
            shared=self._shared.first(size) if is_sharing else None,
        )
        hidden = self._decoder.hidden(inputs.token_ids, layout, self._caches)
        return self._decoder.logits(hidden)

    @torch.inference_mode()
    def _capture_all(self) -> None:
        """Every size, the largest first, so that the others fit into its memory."""
        sizes = sorted({graph_size(n) for n in range(1, self._shape.max_num_seqs + 1)}, reverse=True)
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            for size in {sizes[0], sizes[-1]}:
                self._forward_decode(size, is_sharing=False)  # compiles kernels and sets up libraries
        stream.synchronize()
        for size in sizes:
            self._capture(size, is_sharing=False)

    def _capture(self, size: int, *, is_sharing: bool) -> DecodeGraph:
        key = (size, is_sharing)
        if is_sharing:
            self._forward_decode(size, is_sharing=True)  # compiles kernels the first time
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool):
            logits = self._forward_decode(size, is_sharing=is_sharing)
        self._graphs[key] = DecodeGraph(graph, logits)
        return self._graphs[key]

    def _mixed(self, plan: StepPlan, upload: Upload) -> tuple[Tensor, Tensor]:
        """Any step: rows of one token first, then parts of prompts."""
        num_single = int(np.argmax(plan.num_tokens > 1))
        starts = np.concatenate([[0], np.cumsum(plan.num_tokens)])
        token_rows = np.repeat(plan.rows, plan.num_tokens)
        offsets = np.arange(len(token_rows)) - np.repeat(starts[:-1], plan.num_tokens)
        drawing = np.flatnonzero(plan.samples)
        arrays = (
            token_rows, offsets, plan.rows, plan.num_tokens, starts, tiles_of(plan.num_tokens, num_single),
            starts[1:][drawing] - 1, plan.rows[drawing],
        )  # fmt: skip
        places = [upload.put(array) for array in arrays]
        self._is_sharing = False
        groups = self._groups(plan, num_single)
        shared = [] if groups is None else [upload.put(a) for a in (groups.lens, groups.tile_seqs, groups.tile_lens)]
        upload.send()
        on_device = [upload.get(place) for place in places]
        prefixes = None
        if shared:
            lens, seqs, tile_lens = (upload.get(place) for place in shared)
            prefixes = SharedPrefixes(lens, seqs.view(-1, self._seqs_per_tile), tile_lens)
        return self._forward_mixed(on_device, num_single, int(plan.num_tokens.max()), prefixes)

    def _forward_mixed(
        self, arrays: list[Tensor], num_single: int, max_query_len: int, shared: SharedPrefixes | None
    ) -> tuple[Tensor, Tensor]:
        token_rows, offsets, rows, num_tokens, starts, tiles, ends, drawing = arrays
        token_rows_long = token_rows.long()
        positions = self._computed[token_rows_long] + offsets
        blocks = self._block_tables[token_rows_long, positions // self._shape.block_size].long()
        rows_long = rows.long()
        layout = StepLayout(
            positions=positions,
            slots=blocks * self._shape.block_size + positions % self._shape.block_size,
            query_starts=starts,
            context_lens=(self._computed[rows_long] + num_tokens).int(),
            rows=rows,
            block_tables=self._block_tables,
            max_query_len=max_query_len,
            max_context_len=self._shape.max_model_len,
            num_single=num_single,
            num_splits=num_splits(max(1, num_single), self._decoder.spec.num_kv_heads),
            shared=shared,
            tiles=tiles.view(-1, 2),
        )
        hidden = self._decoder.hidden(self._tokens[token_rows_long, positions], layout, self._caches)
        goes_on = ~self._is_finished[rows_long]
        self._computed[rows_long] += num_tokens * goes_on
        return self._decoder.logits(hidden[ends.long()]), drawing

    def _finish(self, plan: StepPlan, logits: Tensor, rows: Tensor, advances: Tensor | None) -> Ticket:
        """Draw, append, and send the tokens on their way back."""
        num_rows = rows.shape[0]
        columns = self._sampler.columns
        drawing = plan.rows[plan.samples]
        logprobs = None
        if self._sampler.is_plain(drawing):
            drawn = torch.empty(num_rows, dtype=torch.int64, device=self._device)
            flags = torch.empty(num_rows, dtype=torch.uint8, device=self._device)
            draw(logits, rows, self._lens, columns["temperature"], columns["seed"], drawn, flags)
        else:
            rows_long = rows.long()
            sampled = self._sampler.sample(logits.float(), rows_long, self._lens[rows_long], host_rows=drawing)
            drawn, logprobs = sampled.tokens, sampled.logprobs
            flags = torch.where(sampled.finished == BROKEN, sampled.finished, 0)
        out = torch.empty(2, num_rows, dtype=torch.int32, device=self._device)
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
            advances=advances,
        )
        # Contiguous on both sides: any other copy would wait for the device.
        result = self._results[plan.step % _RESULTS_IN_FLIGHT, : 2 * num_rows].view(2, num_rows)
        result.copy_(out, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return Ticket(plan.step, drawing, result, logprobs, done)


class SharedBuffers:
    """Where graphs read which rows share a beginning; smaller graphs use the front of it."""

    def __init__(self, size: int, seqs_per_tile: int, device: torch.device) -> None:
        num_tiles = max(1, size // MIN_SEQS)
        self._lens = torch.zeros(size, dtype=torch.int32, device=device)
        self._tile_seqs = torch.full((num_tiles, seqs_per_tile), -1, dtype=torch.int32, device=device)
        self._tile_lens = torch.zeros(num_tiles, dtype=torch.int32, device=device)

    def take(self, lens: Tensor, tile_seqs: Tensor, tile_lens: Tensor) -> None:
        self._lens.zero_()
        self._lens[: len(lens)] = lens
        self._tile_seqs.view(-1)[: len(tile_seqs)] = tile_seqs
        self._tile_lens.zero_()
        self._tile_lens[: len(tile_lens)] = tile_lens

    def first(self, size: int) -> SharedPrefixes:
        num_tiles = max(1, size // MIN_SEQS)
        return SharedPrefixes(self._lens[:size], self._tile_seqs[:num_tiles], self._tile_lens[:num_tiles])


class DecodeInputs:
    """What `prepare_decode` writes and a graph reads, for the largest graph; smaller ones use the beginning."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.token_ids = torch.zeros(size, dtype=torch.int32, device=device)
        self.positions = torch.zeros(size, dtype=torch.int64, device=device)
        self.slots = torch.zeros(size, dtype=torch.int64, device=device)
        self.context_lens = torch.ones(size, dtype=torch.int32, device=device)
        self.query_starts = torch.arange(size + 1, dtype=torch.int32, device=device)

    def first(self, size: int) -> DecodeInputs:
        part = object.__new__(DecodeInputs)
        part.token_ids, part.positions = self.token_ids[:size], self.positions[:size]
        part.slots, part.context_lens = self.slots[:size], self.context_lens[:size]
        part.query_starts = self.query_starts[: size + 1]
        return part


def graph_size(num_rows: int) -> int:
    """The number of rows that a decode step of `num_rows` is padded to."""
    for limit, step in ((8, 1), (32, 8), (128, 16), (512, 32), (1024, 64)):
        if num_rows <= limit:
            return -(-num_rows // step) * step
    return -(-num_rows // 128) * 128


def enable_sharing(spec: ModelSpec) -> bool:
    """Windows end beginnings too, and a kv head with very many query heads fills a tile by itself."""
    return all(window is None for window in spec.windows) and spec.num_heads // spec.num_kv_heads <= SHARED_ROWS // 4


def triton_block(size: int) -> int:
    return 1 << (size - 1).bit_length()


def num_splits(num_seqs: int, num_kv_heads: int) -> int:
    """Enough programs for four on each of some 132 processors, and no more."""
    return max(1, min(MAX_SPLITS, 528 // (num_seqs * num_kv_heads)))
