"""The sum of a small tensor over all ranks, in one kernel, through memory that the ranks can write to (CUDA IPC).

    each program, for its chunk:   own part ─▶ memory of every rank ─▶ flag to every rank
                                   wait for the flags of all ranks ─▶ add up the parts in rank order, in float32

All ranks add the same numbers in the same order, so they get the same bits. A rank's memory, of `memory_bytes(size)`:

    parts     [2, ranks, chunks, CHUNK_BYTES]    written by the others
    flags     [2, ranks, chunks] int32           the number of the call whose part is there
    counters  [chunks] int32                     calls so far; written by its owner only

Calls alternate between the two halves. The part of call n + 2 may overwrite that of call n: its writer has finished
call n + 1, so it has seen the flags of that call from all ranks, which they set after they had finished call n. The
counters are in memory and no argument changes from call to call, so a CUDA graph can hold the kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

MAX_BYTES = 512 << 10  # of a tensor; not tuned: there was no machine with several GPUs
CHUNK_BYTES = 8 << 10  # of one program; with 64 chunks at most, all programs run at the same time
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NUM_CHUNKS = MAX_BYTES // CHUNK_BYTES
_POLLS_PER_LOOK = 4096  # at the clock and at the word that ends the wait, which is in the host's memory


def memory_bytes(num_ranks: int) -> int:
    """What each rank provides. It must be zero before the first call."""
    return 2 * num_ranks * MAX_BYTES + 4 * (2 * num_ranks + 1) * _NUM_CHUNKS


def sum_over_peers(
    x: Tensor,  # contiguous, at most MAX_BYTES
    addresses: Tensor,  # [ranks + 1] int64: of each rank's memory as this rank sees it, and of a word that ends waits
    rank: int,
    *,
    timeout_s: float,
    traps: bool = True,  # a rank that does not come within the time is an error; else the sum is wrong
    pushes: bool = True,
    sums: bool = True,
) -> None:
    """Adds up x over all ranks, in place. Every rank must call it with a tensor of the same size and type. `pushes` and
    `sums` choose one half of the work; tests run them one by one."""
    chunk = CHUNK_BYTES // x.itemsize
    if x.numel() == 0:
        return
    _sum_over_peers[(triton.cdiv(x.numel(), chunk),)](
        x,
        addresses,
        x.numel(),
        int(timeout_s * 1e9),
        int(traps),
        RANK=rank,
        NUM_RANKS=len(addresses) - 1,
        CHUNK=chunk,
        BYTES=CHUNK_BYTES,
        NUM_CHUNKS=_NUM_CHUNKS,
        POLLS_PER_LOOK=_POLLS_PER_LOOK,
        PUSHES=pushes,
        SUMS=sums,
        HAS_CLOCK=x.is_cuda,
        num_warps=4,
    )


@triton.jit
def _at(base, half, rank, chunk, NUM_RANKS: tl.constexpr, NUM_CHUNKS: tl.constexpr, BYTES: tl.constexpr):
    """The addresses of a rank's part of a chunk, and of its flag."""
    place = (half * NUM_RANKS + rank) * NUM_CHUNKS + chunk
    return base + place * BYTES, base + 2 * NUM_RANKS * NUM_CHUNKS * BYTES + place * 4


@triton.jit
def _wait(flag, call, end, timeout_ns, traps, POLLS_PER_LOOK: tl.constexpr, HAS_CLOCK: tl.constexpr):
    """Waits until the flag has the number of the call, or until somebody writes to `end`."""
    polls = 0
    has_ended = 0
    start = call.to(tl.int64) * 0
    while (tl.atomic_add(flag, 0, sem="acquire", scope="sys") != call) & (has_ended == 0):
        polls += 1
        if polls % POLLS_PER_LOOK == 0:
            has_ended = tl.load(end, volatile=True)
            if HAS_CLOCK:
                now = globaltimer()
                start = tl.where(start == 0, now, start)
                if now - start > timeout_ns:
                    has_ended = 1
                    if traps != 0:
                        tl.inline_asm_elementwise(
                            "trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
                        )


@triton.jit(do_not_specialize=["timeout_ns", "traps"])
def _sum_over_peers(
    x,
    addresses,
    numel,
    timeout_ns,
    traps,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BYTES: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    POLLS_PER_LOOK: tl.constexpr,
    PUSHES: tl.constexpr,
    SUMS: tl.constexpr,
    HAS_CLOCK: tl.constexpr,
):
    chunk = tl.program_id(0)
    columns = tl.arange(0, CHUNK)
    inside = chunk * CHUNK + columns < numel
    here = x + chunk * CHUNK + columns
    own = tl.multiple_of(tl.load(addresses + RANK), 16)
    flags_end = 2 * NUM_RANKS * NUM_CHUNKS * (BYTES + 4)
    counter = (own + flags_end + chunk * 4).to(tl.pointer_type(tl.int32))
    call = tl.load(counter) + 1
    half = call & 1
    if PUSHES:
        part = tl.load(here, mask=inside)
        for peer in tl.static_range(NUM_RANKS):
            base = tl.multiple_of(tl.load(addresses + peer), 16)
            place, _ = _at(base, half, RANK, chunk, NUM_RANKS, NUM_CHUNKS, BYTES)
            tl.store(place.to(tl.pointer_type(x.dtype.element_ty)) + columns, part, mask=inside)
        tl.debug_barrier()  # one thread sets the flags: after the stores of all
        for peer in tl.static_range(NUM_RANKS):
            _, flag = _at(tl.load(addresses + peer), half, RANK, chunk, NUM_RANKS, NUM_CHUNKS, BYTES)
            tl.atomic_xchg(flag.to(tl.pointer_type(tl.int32)), call, sem="release", scope="sys")
    if SUMS:
        end = tl.load(addresses + NUM_RANKS).to(tl.pointer_type(tl.int32))
        total = tl.zeros([CHUNK], tl.float32)
        for peer in tl.static_range(NUM_RANKS):
            place, flag = _at(own, half, peer, chunk, NUM_RANKS, NUM_CHUNKS, BYTES)
            flag = flag.to(tl.pointer_type(tl.int32))
            _wait(flag, call, end, timeout_ns, traps, POLLS_PER_LOOK, HAS_CLOCK)
            tl.debug_barrier()
            total += tl.load(place.to(tl.pointer_type(x.dtype.element_ty)) + columns, mask=inside).to(tl.float32)
        tl.store(here, total.to(x.dtype.element_ty), mask=inside)
        tl.store(counter, call)
