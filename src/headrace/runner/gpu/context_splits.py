"""How decode attention splits long contexts over programs, so that no program runs alone at the end of a kernel."""

from __future__ import annotations

from headrace.kernels.gpu import latent
from headrace.kernels.gpu.decode_attention import MAX_SPLITS
from headrace.kernels.gpu.few_decodes import MAX_FEW_DECODES
from headrace.kernels.layout import Splits
from headrace.models.spec import ModelSpec

LONG_CONTEXT = 1024  # tokens; of many sequences only longer contexts are split
HALF_LONG_CONTEXT = 512  # the same where fewer than `MANY_PROGRAMS` programs share the work
LONG_SPLITS = 4
MIN_SPLIT_SEQS = 32
MANY_PROGRAMS = 2560
SHORT_CONTEXT = 4096  # tokens that one program reads before `MANY_PROGRAMS` others are done
NUM_PROGRAMS = 528  # four on each of about 132 processors: with fewer, every context is split
SPLIT_PROGRAMS = 1024  # and so finely
MIN_SPLIT_TOKENS = 64


def programs_per_decode(spec: ModelSpec) -> int:
    """How many programs compute a decode of one sequence, if its context is not split."""
    return spec.num_kv_heads if spec.latent is None else latent.programs_per_decode(spec.num_heads)


def splits_of(num_seqs: int, programs_per_seq: int, head_dim: int, max_model_len: int) -> Splits:
    """The splits for a decode step whose longest contexts come first.

    - Few sequences: every context is split.
    - Many sequences: only long contexts are split, and only the longest of them, which come first. A program that reads
      on when all others are done wastes the GPU, but programs of unused splits cost time too.
    - Very many sequences and a short maximum context: none is split, since one program reads the longest possible
      context before the others are done. For small heads (`head_dim` <= 64) a program has one warp and is too slow.

    What counts is the number of programs: a model with four KV heads has half as many as one with eight.
    """
    num_programs = num_seqs * programs_per_seq
    if num_programs <= NUM_PROGRAMS // 2:
        wanted = NUM_PROGRAMS if num_seqs <= MAX_FEW_DECODES else SPLIT_PROGRAMS
        return Splits(max(LONG_SPLITS, min(MAX_SPLITS, wanted // num_programs)), MIN_SPLIT_TOKENS)
    has_many, has_small_heads = num_programs >= MANY_PROGRAMS, head_dim <= 64
    is_read_in_time = has_many and max_model_len <= SHORT_CONTEXT and not has_small_heads
    if max_model_len <= LONG_CONTEXT or is_read_in_time:
        return Splits()
    longest = LONG_CONTEXT if has_many or has_small_heads else HALF_LONG_CONTEXT
    return Splits(LONG_SPLITS, longest, num_seqs=max(MIN_SPLIT_SEQS, num_seqs // 16))
