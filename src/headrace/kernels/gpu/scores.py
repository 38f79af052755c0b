"""Log-probabilities of one token per row and of the likeliest tokens. No row is sorted or written.

read     each chunk: its largest logit, the sum of its weights, logits above the token's, and its best logits
merge    each row: the best of all chunks
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 4096
_TOP_BLOCK = 32  # no fewer of the best logits of a chunk than any request may ask for: one kernel for all numbers
_MIN_FLOAT = tl.constexpr(-3.4028234663852886e38)  # replaces -inf, so that tokens already taken rank below it


def scores(logits: Tensor, tokens: Tensor, *, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns, for logits [Q, V] and tokens [Q], the tokens' log-probabilities [Q] float32 and ranks [Q] int64, and
    the ids [Q, n] int64 and log-probabilities [Q, n] float32 of the n likeliest. Equally likely tokens are
    ordered by id."""
    num_rows, vocab_size = logits.shape
    num_chunks, num_top = triton.cdiv(vocab_size, _CHUNK), min(num_top, vocab_size)
    device = logits.device
    sums = torch.empty((num_rows, num_chunks, 2), dtype=torch.float32, device=device)
    counts = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=device)
    bests = torch.empty((num_rows, num_chunks, num_top), dtype=torch.float32, device=device)
    best_ids = torch.empty((num_rows, num_chunks, num_top), dtype=torch.int32, device=device)
    chosen = torch.empty(num_rows, dtype=torch.float32, device=device)
    ranks = torch.empty(num_rows, dtype=torch.int64, device=device)
    top_ids = torch.empty((num_rows, num_top), dtype=torch.int64, device=device)
    top_values = torch.empty((num_rows, num_top), dtype=torch.float32, device=device)
    _read[(num_rows, num_chunks)](
        logits, tokens, sums, counts, bests, best_ids, vocab_size, logits.stride(0), num_chunks, num_top,
        CHUNK=_CHUNK, num_warps=8,
    )  # fmt: skip
    _merge[(num_rows,)](
        logits, tokens, sums, counts, bests, best_ids, chosen, ranks, top_ids, top_values, logits.stride(0), num_chunks,
        num_top, CHUNKS_BLOCK=triton.next_power_of_2(num_chunks),
        BESTS_BLOCK=triton.next_power_of_2(num_chunks * max(num_top, _TOP_BLOCK)), num_warps=4,
    )  # fmt: skip
    return chosen, ranks, top_ids, top_values


@triton.jit(do_not_specialize=["num_top"])
def _read(
    logits,
    tokens,
    sums,
    counts,
    bests,
    best_ids,
    vocab_size,
    stride,
    num_chunks,
    num_top,
    CHUNK: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    nth = tl.arange(0, CHUNK)
    inside = chunk * CHUNK + nth < vocab_size
    at = logits + row * stride
    logit = tl.load(at + chunk * CHUNK + nth, mask=inside, other=float("-inf")).to(tl.float32)
    at_chunk = row * num_chunks + chunk
    threshold = tl.load(at + tl.load(tokens + row)).to(tl.float32)
    tl.store(counts + at_chunk, tl.sum((logit > threshold).to(tl.int32)))
    top = tl.max(logit)
    total = tl.sum(tl.exp2((logit - tl.maximum(top, _MIN_FLOAT)) * 1.4426950408889634))  # NaN if any logit is
    tl.store(sums + at_chunk * 2, top)
    tl.store(sums + at_chunk * 2 + 1, total)
    left = tl.where(inside, tl.where(logit >= _MIN_FLOAT, logit, _MIN_FLOAT), float("-inf"))
    for i in range(num_top):
        best, where = tl.max(left, axis=0, return_indices=True)
        tl.store(bests + at_chunk * num_top + i, best)
        tl.store(best_ids + at_chunk * num_top + i, chunk * CHUNK + where)
        left = tl.where(nth == where, float("-inf"), left)


@triton.jit(do_not_specialize=["num_top"])
def _merge(
    logits,
    tokens,
    sums,
    counts,
    bests,
    best_ids,
    chosen,
    ranks,
    top_ids,
    top_values,
    stride,
    num_chunks,
    num_top,
    CHUNKS_BLOCK: tl.constexpr,
    BESTS_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS_BLOCK)
    inside = chunks < num_chunks
    at_chunks = row * num_chunks + chunks
    tops = tl.load(sums + at_chunks * 2, mask=inside, other=float("-inf"))
    totals = tl.load(sums + at_chunks * 2 + 1, mask=inside, other=0.0)
    above = tl.sum(tl.load(counts + at_chunks, mask=inside, other=0))
    highest = tl.maximum(tl.max(tops), _MIN_FLOAT)
    shares = tl.where(totals > 0.0, totals * tl.exp2((tops - highest) * 1.4426950408889634), totals)
    norm = highest + tl.log(tl.sum(shares))
    logit = tl.load(logits + row * stride + tl.load(tokens + row)).to(tl.float32)
    tl.store(chosen + row, logit - norm)
    tl.store(ranks + row, (above + 1).to(tl.int64))
    nth = tl.arange(0, BESTS_BLOCK)
    is_best = nth < num_chunks * num_top
    left = tl.load(bests + row * num_chunks * num_top + nth, mask=is_best, other=float("-inf"))
    for i in range(num_top):
        best, where = tl.max(left, axis=0, return_indices=True)
        found = tl.load(best_ids + row * num_chunks * num_top + where)
        value = tl.where(best == _MIN_FLOAT, float("-inf"), best)
        tl.store(top_ids + row * num_top + i, found.to(tl.int64))
        tl.store(top_values + row * num_top + i, value - norm)
        left = tl.where(nth == where, float("-inf"), left)
