"""Where things lie: the tokens of one step, and the keys and values of one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Rows of activations in eight bits, each with the factor that brings it back: values[t] * scales[t]."""

    values: Tensor  # [T, K] float8_e4m3fn
    scales: Tensor  # [T, 1] float32


Rows = Tensor | Fp8Rows  # what a matrix product takes


@dataclass(frozen=True, slots=True)
class Routes:
    """Which experts a step's tokens go to. Of K experts a token, route r is choice r % K of token r // K."""

    weights: Tensor  # [R] float32
    order: Tensor  # [R] int32, the routes, those to the first expert first
    ends: Tensor  # [E] int32, where each expert's end in `order`


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Which of a step's single-token sequences begin with the same blocks, so that these are read once for all of them.

    A tile is up to SEQS sequences with one common beginning; places and lengths past the last tile are -1 and 0.
    """

    lens: Tensor  # [num_single] int32, tokens at the beginning of each sequence that its tile takes care of
    tile_seqs: Tensor  # [num_tiles, SEQS] int32, the sequences of each tile
    tile_lens: Tensor  # [num_tiles] int32


@dataclass(frozen=True, slots=True)
class Splits:
    """How the contexts of single-token sequences are cut, so that the whole GPU has work to the end."""

    num_parts: int = 1  # of one context, at most
    min_tokens: int = 64  # of a part
    num_seqs: int | None = None  # leading sequences that are cut, if they are long; None: any
    arrivals: Tensor | None = None  # [of them * Hkv] int32, zeros before and after a kernel; None: made for each


@dataclass(frozen=True, slots=True)
class Gathering:
    """Consecutive prompts that go on, whose contexts are brought together for a kernel that reads no blocks."""

    first_seq: int
    starts: Tensor  # [C + 1] int32, where their contexts begin among the gathered tokens, and where the last ends
    num_tokens: int  # there is room for
    longest: int  # context, in tokens


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where the tokens of a step lie. The runner builds one a step; every layer reads it.

    tokens         a0 a1 a2 a3 | b0 | c0 c1        T = 7, S = 3
    query_starts   0             4    5      7     sequence s owns tokens query_starts[s]:query_starts[s + 1]
    positions       8  9 10 11 | 99 |  0  1        increasing by one within a sequence
    context_lens   12            100  2            position of its last token, plus one
    """

    positions: Tensor  # [T] int64, position of each token in its sequence
    slot_mapping: Tensor  # [T] int64, block * block_size + offset: where the token's key and value go
    query_starts: Tensor  # [S + 1] int32
    context_lens: Tensor  # [S] int32; on a GPU 0 for a place that nobody has
    slots: Tensor  # [S] int32, the slot of each sequence: its row of block_tables
    block_tables: Tensor  # [num_rows, max_blocks] int32, the device's own table, neither copied nor gathered
    max_query_len: int
    max_context_len: int
    num_single: int = 0  # leading sequences that are known to have one token; a GPU has a kernel of its own for them
    splits: Splits = Splits()  # of those
    shared: SharedPrefixes | None = None  # of the single-token sequences
    tiles: Tensor | None = None  # [num_tiles, 2] int32, (sequence, first token) of each tile of the others' tokens
    num_fresh: int = 0  # last sequences that have no tokens but those of this step
    num_fresh_tiles: int = 0  # last of `tiles`, which are theirs
    gatherings: tuple[Gathering, ...] = ()  # of all prompts that go on, where there is a kernel for gathered contexts

    def __post_init__(self) -> None:
        # Kernels read raw memory: a wrong type would be garbage, not an error.
        for tensor in (self.positions, self.slot_mapping):
            assert tensor.dtype == torch.int64 and tensor.is_contiguous()
        for tensor in (self.query_starts, self.context_lens, self.slots, self.block_tables):
            assert tensor.dtype == torch.int32 and tensor.is_contiguous()

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @property
    def num_seqs(self) -> int:
        return self.context_lens.shape[0]


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The KV cache of one layer. Strides are the device's choice; slots never written may hold anything, NaN too.

    Keys and values may be of a narrower type than the activations: float8_e4m3fn, without factors.
    """

    keys: Tensor  # [num_blocks, Hkv, block_size, D]
    values: Tensor  # [num_blocks, Hkv, block_size, D]

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]
