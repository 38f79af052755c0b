"""Routes of a step with few tokens in one launch: the router's logits, the choice of experts, the order of the routes.

    each program         multiplies the rows by a tile of the router on tensor cores, and stores its sums. The tile is
                         loaded before the kernel before has ended (`dependent_launch`).
    the last to arrive   adds all sums in a fixed order, chooses (`routing.choose`) and sorts

All others wait for the last program, so it has no loop over tokens, and the experts of a token are in one warp, which
finds the highest without a barrier.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.gpu.dependent_launch import dependent_launch, let_next_start, wait_for_kernels_before
from headrace.kernels.gpu.few_rows import MAX_ROWS, Linear
from headrace.kernels.gpu.one_row import MIN_DEPTH, tile_depth
from headrace.kernels.gpu.routing import RULES, choose, key_shift
from headrace.kernels.layout import Routes

_MAX_EXPERTS = 512
_MAX_CHOSEN = 8  # every route is compared with every other, in registers
_ROWS_BLOCK = 16  # the smallest side of a tensor core product
_MIN_COLUMNS, _MAX_COLUMNS = 16, 64  # tensor cores take 64 rows of the weight
_WIDE = 2048
_LANES = 128  # experts of a row that a warp loads at a time, 16 bytes to a thread


def takes_router(router: object, x: Tensor, num_chosen: int, *, has_groups: bool) -> bool:
    """Whether `multiply_and_route` computes the routes of these rows: few of them, not too
    many experts, which are in no groups, and whole tiles of the depth."""
    if not isinstance(router, Linear) or has_groups or not 1 < x.shape[0] <= MAX_ROWS:
        return False
    num_experts, width = router.weight.shape
    fits = num_experts <= _MAX_EXPERTS and num_chosen <= _MAX_CHOSEN and width % MIN_DEPTH == 0
    return fits and router.weight.is_contiguous() and router.weight.dtype == x.dtype


def multiply_and_route(
    router: Linear,  # [E, K]
    x: Tensor,  # [T, K]
    num_chosen: int,
    rule: str,
    *,
    correction: Tensor | None = None,  # [E] float32
    scale: float = 1.0,
    jitter: float = 0.0,
    sorts: bool = True,
) -> Routes:
    """See `ops.multiply_and_route`."""
    (num_experts, width), num_routes, device = router.weight.shape, x.shape[0] * num_chosen, x.device
    weights = torch.empty(num_routes, dtype=torch.float32, device=device)
    chosen = torch.empty(num_routes, dtype=torch.int32, device=device)
    order = torch.empty(num_routes if sorts else 0, dtype=torch.int32, device=device)
    ends = torch.empty(num_experts if sorts else 0, dtype=torch.int32, device=device)
    experts = torch.empty_like(order)
    tile = router_tile(num_experts, width, x.element_size())
    experts_block = max(_MIN_COLUMNS, triton.next_power_of_2(num_experts))
    num_splits = width // tile.depth
    partial = torch.empty((num_splits, _ROWS_BLOCK, experts_block), dtype=torch.float32, device=device)
    arrivals = torch.zeros(1, dtype=torch.int32, device=device) if router.arrivals is None else router.arrivals
    _multiply_and_route[(experts_block // tile.columns, num_splits)](
        x.contiguous(),
        router.weight,
        x if router.bias is None else router.bias,
        x if correction is None else correction,
        partial,
        arrivals,
        chosen,
        weights,
        order,
        experts,
        ends,
        x.shape[0],
        scale,
        2.0 * jitter,
        WIDTH=width,
        NUM_EXPERTS=num_experts,
        EXPERTS_BLOCK=experts_block,
        LANES=min(_LANES, experts_block),
        ROWS=_ROWS_BLOCK,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        NUM_CHOSEN=num_chosen,
        CHOSEN_BLOCK=triton.next_power_of_2(num_chosen),
        SHIFT=key_shift(x.dtype, is_corrected=correction is not None),
        RULE=RULES[rule],
        HAS_BIAS=router.bias is not None,
        HAS_CORRECTION=correction is not None,
        SORTS=sorts,
        num_warps=tile.num_warps,
        **dependent_launch(device),
    )
    return Routes(weights, order, ends, chosen, experts if sorts and num_chosen > 1 else None)


class RouterTile(NamedTuple):
    columns: int  # experts
    depth: int  # one step of the product: a program has no loop
    num_warps: int


def router_tile(num_experts: int, width: int, element_size: int) -> RouterTile:
    """Small tiles, so that programs are short; but the last program reads the sums of all, so the depth is not split
    much. The best of a sweep on an H200 (`benchmarks/layer_time.py`) for 128 experts of width 2,048."""
    depth = tile_depth(width, (1024 if width > _WIDE else 512) // element_size)
    columns = min(_MAX_COLUMNS, max(_MIN_COLUMNS, triton.next_power_of_2(num_experts)))
    return RouterTile(columns, depth, num_warps=8)


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_and_route(
    x,
    weight,
    bias,
    correction,
    partial,
    arrivals,
    chosen,
    weights,
    order,
    sorted_experts,
    ends,
    num_rows,
    scale,
    max_distance,
    WIDTH: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    RULE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    SORTS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    let_next_start(IS_DEPENDENT)
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depths = tl.program_id(1) * DEPTH + tl.arange(0, DEPTH)
    tile_at = weight + columns[:, None] * WIDTH + depths[None, :]
    if NUM_EXPERTS % COLUMNS == 0:
        tile = tl.load(tile_at)
    else:
        tile = tl.load(tile_at, mask=columns[:, None] < NUM_EXPERTS, other=0.0)
    wait_for_kernels_before(IS_DEPENDENT)
    row = tl.load(x + rows[:, None] * WIDTH + depths[None, :], mask=rows[:, None] < num_rows, other=0.0)
    sums = tl.dot(tile, tl.trans(row), input_precision="ieee")
    at = (tl.program_id(1) * ROWS + rows[None, :]) * EXPERTS_BLOCK + columns[:, None]
    tl.store(partial + at, sums)
    tl.debug_barrier()  # the whole program has stored its sums before it counts as arrived
    TILES: tl.constexpr = EXPERTS_BLOCK // COLUMNS
    SPLITS: tl.constexpr = WIDTH // DEPTH
    if tl.atomic_add(arrivals, 1, sem="acq_rel") < TILES * SPLITS - 1:
        return
    tl.store(arrivals, 0)  # the next kernel expects zeros

    CHUNKS: tl.constexpr = EXPERTS_BLOCK // LANES
    each = rows[:, None, None]
    experts = tl.arange(0, CHUNKS)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    experts = tl.broadcast_to(experts, [ROWS, CHUNKS, LANES])  # by these axes a row of experts is in one warp
    logits = tl.zeros([ROWS, CHUNKS, LANES], tl.float32)
    for split in tl.static_range(SPLITS):  # always in this order, so that results repeat exactly
        logits += tl.load(partial + (split * ROWS + each) * EXPERTS_BLOCK + experts, cache_modifier=".cg")
    if HAS_BIAS:
        logits += tl.load(bias + experts, mask=experts < NUM_EXPERTS, other=0.0).to(tl.float32)
    logits = logits.to(x.dtype.element_ty).to(tl.float32)  # rounded as the output of a linear layer
    logits = tl.where(experts < NUM_EXPERTS, logits, float("-inf"))
    numbers, shares = choose(
        logits, experts, correction, scale, max_distance,
        NUM_EXPERTS, NUM_CHOSEN, CHOSEN_BLOCK, SHIFT, RULE, HAS_CORRECTION,
    )  # fmt: skip
    choices = tl.arange(0, CHOSEN_BLOCK)[None, :]
    place = rows[:, None] * NUM_CHOSEN + choices
    is_route = (choices < NUM_CHOSEN) & (rows[:, None] < num_rows)
    tl.store(chosen + place, numbers, mask=is_route)
    tl.store(weights + place, shares, mask=is_route)
    if SORTS:
        NUM_PLACES: tl.constexpr = ROWS * CHOSEN_BLOCK
        keys = numbers * NUM_PLACES + rows[:, None] * CHOSEN_BLOCK + choices  # in the order of the routes
        keys = tl.reshape(tl.where(is_route, keys, 1 << 30), [NUM_PLACES])
        places = tl.arange(0, NUM_PLACES)
        routes = places // CHOSEN_BLOCK * NUM_CHOSEN + places % CHOSEN_BLOCK
        ranks = tl.sum((keys[:, None] < keys[None, :]).to(tl.int32), axis=0)
        tl.store(order + ranks, routes, mask=keys < 1 << 30)
        tl.store(sorted_experts + ranks, keys // NUM_PLACES, mask=keys < 1 << 30)
        numbers = tl.arange(0, EXPERTS_BLOCK)
        stops = tl.sum((keys[:, None] < (numbers[None, :] + 1) * NUM_PLACES).to(tl.int32), axis=0)
        tl.store(ends + numbers, stops, mask=numbers < NUM_EXPERTS)
