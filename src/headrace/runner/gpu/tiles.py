"""Splits the tokens of prefills into tiles: one program of the attention kernel each."""

from __future__ import annotations

import numpy as np

from headrace.steps import IntArray

TILE_ROWS = 128


def tiles_of(num_tokens: IntArray, num_decodes: int, num_fresh: int = 0) -> tuple[IntArray, int]:
    """The tiles of the sequences after the first `num_decodes`: [num_tiles, 2] of (sequence, first token); and how many
    of them, at the end, belong to the last `num_fresh` sequences."""
    first_fresh = len(num_tokens) - num_fresh
    older = _tiles_between(num_tokens, num_decodes, first_fresh)
    fresh = _tiles_between(num_tokens, first_fresh, len(num_tokens))
    return np.concatenate([older, fresh]), len(fresh)


def _tiles_between(num_tokens: IntArray, first: int, end: int) -> IntArray:
    """Tiles in descending order: the last tiles of a prompt see the most keys and start first, so that none is left
    running alone at the end."""
    return tiles_of_rows(num_tokens, first, end, TILE_ROWS)


def tiles_of_rows(num_tokens: IntArray, first: int, end: int, rows: int) -> IntArray:
    """The same with tiles of another size."""
    counts = -(-num_tokens[first:end] // rows)
    seqs = np.repeat(np.arange(first, end), counts)
    firsts = np.arange(len(seqs)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([seqs, firsts * rows], axis=1)[::-1]
