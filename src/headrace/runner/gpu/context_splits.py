"""How decode attention splits long contexts over programs, so that no program runs alone at the end of a kernel."""

from __future__ import annotations

from headrace.kernels.gpu import latent
from headrace.kernels.gpu.decode_attention import MAX_SPLITS
from headrace.kernels.layout import Splits
from headrace.models.spec import ModelSpec

LONG_CONTEXT = 1024  # tokens; of many sequences only longer contexts are split
LONG_SPLITS = 4
MIN_SPLIT_SEQS = 32
MANY_SEQS = 512
SHORT_CONTEXT = 4096  # tokens that one program reads before the programs of `MANY_SEQS` others are done
NUM_PROGRAMS = 528  # four on each of about 132 processors
MIN_SPLIT_TOKENS = 64


def programs_per_decode(spec: ModelSpec) -> int:
    """How many programs compute a decode of one sequence, if its context is not split."""
    return spec.num_kv_heads if spec.latent is None else latent.programs_per_decode(spec.num_heads)


def splits_of(num_seqs: int, programs_per_seq: int, head_dim: int, max_model_len: int) -> Splits:
    """The splits for a decode step whose longest contexts come first.

    - Few sequences: every context is split, into enough splits for `NUM_PROGRAMS`.
    - Many sequences: only long contexts are split, and only the longest of them, which come first. A program that reads
      on when all others are done wastes the GPU, but programs of unused splits cost time too.
    - Very many sequences and a short maximum context: none is split, since one program reads the longest possible
      context before the others are done. For small heads (`head_dim` <= 64) a program has one warp and is too slow.
    """
    num_splits = min(MAX_SPLITS, NUM_PROGRAMS // (num_seqs * programs_per_seq))
    if num_splits > 1:
        return Splits(max(num_splits, LONG_SPLITS), MIN_SPLIT_TOKENS)
    is_read_in_time = num_seqs >= MANY_SEQS and max_model_len <= SHORT_CONTEXT and head_dim > 64
    if max_model_len <= LONG_CONTEXT or is_read_in_time:
        return Splits()
    return Splits(LONG_SPLITS, LONG_CONTEXT, num_seqs=max(MIN_SPLIT_SEQS, num_seqs // 16))
