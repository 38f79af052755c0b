"""Where decode graphs read their inputs, and the sizes there are graphs for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.kernels.gpu.decode_attention import MAX_SPLITS
from headrace.kernels.gpu.shared_attention import max_tiles, shared_shape
from headrace.kernels.layout import SharedPrefixes, Splits
from headrace.models.spec import ModelSpec

LONG_CONTEXT = 1024
LONG_PARTS = 4
LEAST_CUT = 32  # sequences
MANY_SEQS = 512
SOON_READ = 4096  # tokens of context
MOST_HEADS_SHARING = 16  # of one kv head: at least four sequences fit in a tile

_CLEARLY = 1.03  # less could be chance, and answers should not depend on that


class SharedBuffers:
    """Where graphs read which rows share a beginning; smaller graphs use the front of it."""

    def __init__(self, size: int, seqs_per_tile: int, device: torch.device) -> None:
        num_tiles = max_tiles(size)
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
        num_tiles = max_tiles(size)
        return SharedPrefixes(self._lens[:size], self._tile_seqs[:num_tiles], self._tile_lens[:num_tiles])


class DecodeInputs:
    """What `prepare_decode` writes and a graph reads, for the largest graph; smaller ones use the beginning."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.token_ids = torch.zeros(size, dtype=torch.int32, device=device)
        self.positions = torch.zeros(size, dtype=torch.int64, device=device)
        self.slot_mapping = torch.zeros(size, dtype=torch.int64, device=device)
        self.context_lens = torch.ones(size, dtype=torch.int32, device=device)
        self.query_starts = torch.arange(size + 1, dtype=torch.int32, device=device)

    def first(self, size: int) -> DecodeInputs:
        part = object.__new__(DecodeInputs)
        part.token_ids, part.positions = self.token_ids[:size], self.positions[:size]
        part.slot_mapping, part.context_lens = self.slot_mapping[:size], self.context_lens[:size]
        part.query_starts = self.query_starts[: size + 1]
        return part


def graph_size(num_rows: int) -> int:
    """The number of rows that a decode step of `num_rows` is padded to."""
    for limit, step in ((8, 1), (32, 8), (128, 16), (512, 32), (1024, 64)):
        if num_rows <= limit:
            return -(-num_rows // step) * step
    return -(-num_rows // 128) * 128


def sharing_size(num_rows: int, most: int) -> int:
    """The same where rows share beginnings: fewer sizes, since each takes a second graph, and none above `most`."""
    for limit in (16, 32):
        if num_rows <= limit:
            return min(limit, most)
    return min(-(-num_rows // 64) * 64, most)


def fastest_sizes(milliseconds_by_size: Mapping[int, float]) -> dict[int, int]:
    """For each size itself, or a larger one that is clearly faster.

    Libraries choose a poor kernel for some sizes: the largest product of an 8B takes 292 us for 448 rows in bfloat16 on
    an H200, and 165 us for 480.
    """
    chosen: dict[int, int] = {}
    fastest = max(milliseconds_by_size)
    for size in sorted(milliseconds_by_size, reverse=True):
        is_slow = milliseconds_by_size[size] > _CLEARLY * milliseconds_by_size[fastest]
        chosen[size] = fastest if is_slow else size
        fastest = min(size, fastest, key=lambda one: milliseconds_by_size[one])
    return chosen


def milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    """How long a replay takes: the less of two, after one that does not count."""
    first, middle, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    graph.replay()
    first.record()
    graph.replay()
    middle.record()
    graph.replay()
    last.record()
    last.synchronize()
    return float(min(first.elapsed_time(middle), middle.elapsed_time(last)))


def enable_sharing(spec: ModelSpec, max_len: int) -> bool:
    """Windows end beginnings too, and a kv head with very many query heads fills a tile by itself."""
    has_windows = any(spec.window_of(layer, max_len) is not None for layer in range(spec.num_layers))
    return not has_windows and spec.num_heads // spec.num_kv_heads <= MOST_HEADS_SHARING


def seqs_per_tile(spec: ModelSpec, kv_dtype: torch.dtype) -> int:
    """Sequences whose query heads of one kv head fill a tile."""
    return max(1, shared_shape(spec.head_dim, kv_dtype).rows // (spec.num_heads // spec.num_kv_heads))


def splits_of(num_seqs: int, num_kv_heads: int, head_dim: int, max_model_len: int) -> Splits:
    """For a step whose longest contexts come first.

    Few sequences are cut small enough for four programs on each of some 132 processors. Of many, only long ones are,
    and only the longest: one program that reads on when all others are done would waste the GPU, but programs of parts
    that are not there cost time too. And of very many none, if a program can read the longest context there may be
    before the others are done; one of small heads, which has one warp, cannot.
    """
    num_parts = min(MAX_SPLITS, 528 // (num_seqs * num_kv_heads))
    if num_parts > 1:
        return Splits(max(num_parts, LONG_PARTS), 64)
    is_soon_read = num_seqs >= MANY_SEQS and max_model_len <= SOON_READ and head_dim > 64
    if max_model_len <= LONG_CONTEXT or is_soon_read:
        return Splits()
    return Splits(LONG_PARTS, LONG_CONTEXT, num_seqs=max(LEAST_CUT, num_seqs // 16))
