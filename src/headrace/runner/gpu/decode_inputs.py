"""The input buffers of decode graphs: fixed memory that a step fills and a captured graph reads."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.gpu.shared_attention import max_tiles
from headrace.kernels.layout import SharedPrefixes


class DecodeInputs:
    """What `prepare_decode` writes and a graph reads, for the largest graph; smaller ones use the front of it."""

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


class SharedPrefixInputs:
    """The prefix groups of a step (see `prefix_groups`), for the largest graph; smaller ones use the front of it."""

    def __init__(self, size: int, seqs_per_tile: int, device: torch.device) -> None:
        num_tiles = max_tiles(size)
        self._lens = torch.zeros(size, dtype=torch.int32, device=device)
        self._tile_seqs = torch.full((num_tiles, seqs_per_tile), -1, dtype=torch.int32, device=device)
        self._tile_lens = torch.zeros(num_tiles, dtype=torch.int32, device=device)

    def fill(self, lens: Tensor, tile_seqs: Tensor, tile_lens: Tensor) -> None:
        self._lens.zero_()
        self._lens[: len(lens)] = lens
        self._tile_seqs.view(-1)[: len(tile_seqs)] = tile_seqs
        self._tile_lens.zero_()
        self._tile_lens[: len(tile_lens)] = tile_lens

    def first(self, size: int) -> SharedPrefixes:
        num_tiles = max_tiles(size)
        return SharedPrefixes(self._lens[:size], self._tile_seqs[:num_tiles], self._tile_lens[:num_tiles])
