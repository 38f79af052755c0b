"""How the tokens of prompts are cut into tiles, one program of the attention kernel each."""

from __future__ import annotations

import numpy as np

from headrace.steps import IntArray

TILE_ROWS = 128


def tiles_of(num_tokens: IntArray, num_single: int) -> IntArray:
    """[num_tiles, 2]: (sequence, first token) of each tile of the sequences after the first `num_single`.

    The last tiles of a prompt see the most keys; they start first, so that none is left running alone at the end.
    """
    counts = -(-num_tokens[num_single:] // TILE_ROWS)
    seqs = np.repeat(np.arange(num_single, len(num_tokens)), counts)
    firsts = np.arange(len(seqs)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([seqs, firsts * TILE_ROWS], axis=1)[::-1].copy()
