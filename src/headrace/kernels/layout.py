"""What crosses the border of this package: where the tokens of a step and the keys and values of a layer are in
memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Rows of activations in FP8, each with its scale: the value of row t is values[t] * scales[t]."""

    values: Tensor  # [T, K] float8_e4m3fn
    scales: Tensor  # [T, 1] float32


@dataclass(frozen=True, slots=True)
class UnnormedRows:
    """Rows before their RMS norm, for a linear layer that computes it (`ops.takes_unnormed`)."""

    x: Tensor  # [T, K]
    residual: Tensor | None  # [T, K], added to x before the norm
    total: Tensor | None  # [T, K], out: the sum, the new residual stream
    weight: Tensor  # [K] float32, of the norm
    eps: float
    normed: Tensor | None = None  # [T, K], out: the normed rows, if something else reads them too


Rows = Tensor | Fp8Rows | UnnormedRows  # the input of a linear layer


def num_rows_of(rows: Rows) -> int:
    values = rows if isinstance(rows, Tensor) else rows.values if isinstance(rows, Fp8Rows) else rows.x
    return len(values)


@dataclass(frozen=True, slots=True)
class Routes:
    """Which experts a step's tokens go to. With K experts per token, route r is choice r % K of token r // K."""

    weights: Tensor  # [R] float32
    order: Tensor  # [R] int32, the routes, sorted by expert
    ends: Tensor  # [E] int32, where each expert's routes end in `order`
    chosen: Tensor | None = None  # [R] int32, the expert of each route, where a kernel reads it
    experts: Tensor | None = None  # [R] int32, the same in `order`; of few tokens with several experts each


@dataclass(frozen=True, slots=True)
class RouteRows:
    """What each route adds to its token, in the order of the routes. The sum over the routes of a token is left to the
    norm that adds it to the residual stream."""

    rows: Tensor  # [T * num_chosen, H], contiguous
    num_chosen: int  # routes of each token

    @property
    def num_tokens(self) -> int:
        return self.rows.shape[0] // self.num_chosen


Addend = Tensor | RouteRows  # [T, H], what half a layer adds to the residual stream


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Which decoding sequences of a step share prefix blocks, so that these are read once for all of them.

    A tile is up to SEQS sequences with one common prefix. Unused entries are -1 in tile_seqs and 0 in tile_lens.
    """

    lens: Tensor  # [num_decodes] int32, length of each sequence's shared prefix
    tile_seqs: Tensor  # [num_tiles, SEQS] int32, the sequences of each tile
    tile_lens: Tensor  # [num_tiles] int32


@dataclass(frozen=True, slots=True)
class Splits:
    """How the contexts of decoding sequences are split over programs, so that the whole GPU has work until the end."""

    num_splits: int = 1  # most splits of one context
    min_tokens: int = 64  # of a split
    num_seqs: int | None = None  # number of leading sequences whose long contexts are split; None: all
    arrivals: Tensor | None = None  # [num_seqs * Hkv] int32, zeros before and after a kernel; None: allocated per call


@dataclass(frozen=True, slots=True)
class Gathering:
    """Consecutive prefill continuations whose contexts are copied out of their blocks, for a kernel that reads no
    paged cache."""

    first_seq: int
    starts: Tensor  # [C + 1] int32, where each context starts among the gathered tokens, and where the last ends
    num_tokens: int  # room in the gathered tensors
    longest: int  # longest context in tokens


@dataclass(frozen=True, slots=True)
class LowRankWeights:
    """The matrices of L adapters (LoRA) for one linear layer [N, K], of rank up to R. The layer's output is P pieces,
    such as queries, keys and values; piece p of a row x gets (x @ down[p].T) @ up[p].T added.

    Smaller ranks are filled up with zeros.
    """

    down: Tensor  # [L, R, P, K]
    up: Tensor  # [L, N, R], with the adapter's scale
    ranks: Tensor  # [L] int32; 0: the adapter does not change this layer
    piece_sizes: tuple[int, ...]  # rows of `up` of each piece, in order


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Which rows of a step belong to which adapter.

    indexes    2 0 1 2 0 1             of each row: 0 is none, i is the adapter at i - 1 in the tables
    order      2 5 | 0 3 | 1 4         the rows of each adapter, then those without one
    starts     0     2     4           where the rows of each adapter start, and where those of the last end
    """

    indexes: Tensor  # [T] int32
    order: Tensor  # [T] int64
    starts: Tensor  # [L + 1] int32
    tile_ends: Tensor  # [L] int32, where the tiles of each adapter end: TILE_ROWS of its rows are one tile

    @classmethod
    def of(cls, indexes: Tensor, num_adapters: int) -> AdapterRows:
        """Sorts rows by adapter, without a look at the values from the host."""
        keys = torch.where(indexes == 0, num_adapters + 1, indexes)
        keys, order = keys.sort(stable=True)
        bounds = torch.arange(1, num_adapters + 2, dtype=keys.dtype, device=keys.device)
        starts = torch.searchsorted(keys, bounds, out_int32=True)
        num_tiles = (starts[1:] - starts[:-1] + (TILE_ROWS - 1)) // TILE_ROWS
        return cls(indexes, order, starts, num_tiles.cumsum(0).int())

    def kept(self, rows: Tensor) -> AdapterRows:
        """The same for some rows."""
        return self.of(self.indexes[rows], self.tile_ends.shape[0])


TILE_ROWS = 16  # the smallest side of a tensor core product


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where the tokens of a step are. The runner builds one per step; every layer reads it.

        tokens         a0 a1 a2 a3 | b0 | c0 c1        T = 7, S = 3
        query_starts   0             4    5      7     sequence s owns tokens query_starts[s]:query_starts[s + 1]
        positions       8  9 10 11 | 99 |  0  1        increasing by one within a sequence
        context_lens   12            100  2            position of its last token, plus one

    On a GPU the sequences are in this order: decodes, prefill continuations, fresh prefills.
    """

    positions: Tensor  # [T] int64, position of each token in its sequence
    slot_mapping: Tensor  # [T] int64, block * block_size + offset: where the token's key and value go
    query_starts: Tensor  # [S + 1] int32
    context_lens: Tensor  # [S] int32; on a GPU 0 for padding
    slots: Tensor  # [S] int32, the slot of each sequence: its row of block_tables
    block_tables: Tensor  # [num_slots, max_blocks] int32, the device's own table, not a copy
    max_query_len: int
    max_context_len: int
    num_decodes: int = 0  # leading sequences with one token each; a GPU has a kernel of its own for them
    splits: Splits = Splits()  # of the decodes
    has_few_decodes: bool = False  # and nothing else: a GPU computes RoPE and attention in one kernel
    offsets: Tensor | None = (
        None  # [T] int32, 0, 1, 2 ... for the tokens of one slot in a step of decodes that verifies
    )
    # drafts: each token is a decode of its own, after those of the same slot; None: each is of another slot
    shared: SharedPrefixes | None = None  # of the decodes
    tiles: Tensor | None = None  # [num_tiles, 2] int32, (sequence, first token) of each tile of the prefills
    num_fresh: int = 0  # last sequences, whose whole context is in this step
    num_fresh_tiles: int = 0  # last entries of `tiles`, which belong to fresh prefills
    gatherings: tuple[Gathering, ...] = ()  # of all prefill continuations, where a kernel for gathered contexts exists
    adapters: AdapterRows | None = None  # None: no token has an adapter

    def __post_init__(self) -> None:
        # Kernels read raw memory: a wrong type would give garbage, not an error.
        for tensor in (self.positions, self.slot_mapping):
            assert tensor.dtype == torch.int64 and tensor.is_contiguous()
        for tensor in (self.query_starts, self.context_lens, self.slots, self.block_tables):
            assert tensor.dtype == torch.int32 and tensor.is_contiguous()

    def adapters_of(self, kept: Tensor | None) -> AdapterRows | None:
        """Those of the `kept` tokens; None: of all."""
        return self.adapters if kept is None or self.adapters is None else self.adapters.kept(kept)

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @property
    def num_seqs(self) -> int:
        return self.context_lens.shape[0]


class StepRows(NamedTuple):
    """The tokens of a step, and where they are: see `StepLayout`."""

    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64
    query_starts: Tensor  # [S + 1] int32
    context_lens: Tensor  # [S] int32


class Appended(NamedTuple):
    """What slots get of the tokens that were sampled in their rows."""

    num_tokens: Tensor  # [S] int64
    states: Tensor  # [S] uint8: steps.UNFINISHED, STOPPED, FULL or BROKEN


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where the tokens of an encoder's step are: whole texts one after the other, without padding."""

    positions: Tensor  # [T] int64 on a CPU, int32 on a GPU: position of each token in its text
    types: Tensor  # [T] the same: 1 for tokens of the second text of a pair, else 0
    starts: Tensor  # [S + 1] int32, where each text starts, and where the last ends
    lens: tuple[int, ...]  # of the texts
    tiles: Tensor | None = None  # on a GPU [num_tiles, 2] int32, (text, first token) of each tile
    tile_rows: int = 0  # tokens of a tile
    uses_flash: bool = True  # FlashAttention-3, on a GPU where it runs


@dataclass(frozen=True, slots=True)
class LayerState:
    """The recurrent state of one layer, indexed by slot.

    A sequence that starts (its first token of the step has position 0) reads zeros, whatever is here: nothing has to be
    cleared when a sequence takes a slot, also again after a preemption. A step reads the state before its tokens and
    leaves the state after them, so tokens must be computed in order and once. States that were never written may hold
    anything, even NaN.
    """

    conv: Tensor  # [num_slots, K - 1, C], the last inputs of a causal convolution over K tokens, oldest first
    matrices: Tensor | None = None  # [num_slots, H, ...] float32, one matrix per head


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The KV cache of one layer. The device chooses the strides. Positions that were never written may hold anything,
    even NaN. A layer without attention has no blocks.

    Keys and values may be narrower than the activations, in FP8: values are float8_e4m3fn without scales, keys are
    e3m4 (uint8, see `kernels/reference/e3m4.py`) times a power of two for each head, `key_units`. Such keys have their
    dimensions mixed, and so have the queries that meet them: see `hadamard_len`. Of latents there is one head, and its
    values are the first dimensions of its keys, in FP8 float8_e4m3fn: see `of_latents`.
    """

    keys: Tensor  # [num_blocks, Hkv, block_size, D]
    values: Tensor  # [num_blocks, Hkv, block_size, D]
    state: LayerState | None = None  # of a layer with a recurrent mixer
    key_units: Tensor | None = None  # [Hkv] float32, of keys in e3m4

    @classmethod
    def of_latents(cls, keys: Tensor, rank: int) -> LayerCache:
        """Returns a cache whose values are not stored again: [num_blocks, 1, block_size, R + rotary_dim] -> the first R
        dimensions of each key."""
        return cls(keys=keys, values=keys[:, :, :, :rank])

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def hadamard_len(self) -> int:
        """How many neighbouring dimensions of a head are mixed by an orthonormal Hadamard matrix after RoPE, in queries
        and keys: 1 for none, in e3m4 half of the head, or the largest power of two that divides the half.

        Scores do not change, but what rounding does to them: the largest dimensions of keys meet those of queries, and
        mixed their errors average out (docs/experiments.md). The halves, whose dimensions RoPE pairs, stay apart.
        """
        half = self.keys.shape[3] // 2
        return half & -half if self.key_units is not None else 1

    @property
    def raw_sides(self) -> tuple[Tensor, ...]:
        """The memory of each block as words, [num_blocks, words] int64: of the keys, and of the values unless they are
        a part of them."""
        are_latents = self.values.shape != self.keys.shape
        sides = (self.keys,) if are_latents else (self.keys, self.values)
        return tuple(_words_of_blocks(side) for side in sides)


def _words_of_blocks(side: Tensor) -> Tensor:
    num_elements = side.stride(0)  # the blocks lie one after the other
    assert num_elements == side[0].numel() and side.storage_offset() == 0
    return side.as_strided((side.shape[0], num_elements), (num_elements, 1)).view(torch.int64)
