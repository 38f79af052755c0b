"""Sampling on a CPU: temperature, min_p, top_k, top_p and the choice of a token, in one pass over each row of logits.

The vocabulary is not sorted. The largest logit of each short block is found first. The filters then give a floor below
which no token can be kept, so whole blocks are skipped and only the logits above the floor are looked at. A row's
result depends on its own numbers only: sums run in a fixed order, whatever else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from headrace.kernels.cpu.launch import arguments_at, claim, kernel
from headrace.kernels.cpu.native import Pointer, floats, int64s, uint8s
from headrace.steps import BROKEN

BLOCK_LEN = 128  # logits per block, with one maximum and one mass; a row of 49,152 has 384 such blocks

Array: TypeAlias = Any  # an array inside a kernel, as mypy sees it
F = TypeVar("F", bound=Callable[..., Any])

_f32: Any = np.float32
_i32: Any = np.int32
_u64: Any = np.uint64
_LN2_HIGH = 45426 / 65536  # so few bits that multiplying it by a whole power is exact
_LN2_LOW = math.log(2.0) - _LN2_HIGH
_LOWEST_EXPONENT = -87.0  # e to this is about the smallest normal float32: anything below counts as zero
_INF_BITS = 0x7F800000
_NEG_INF_KEY = -0x7F800001
_LOWEST_KEY = -0x80000000
_LOW_WORD = 0xFFFFFFFF


def _compiled(*fastmath: str) -> Callable[[F], F]:
    """Compiles a part of the kernel; floating-point operations are reordered or fused only where `fastmath` allows
    it."""

    def decorate(function: F) -> F:
        compiled: Any = njit(error_model="numpy", fastmath=set(fastmath))(function)
        return cast("F", compiled)

    return decorate


class _Filters(NamedTuple):
    """The settings of one row."""

    temperature: float
    min_p: float
    top_k: int
    top_p: float


class _Scratch(NamedTuple):
    """The buffers of one thread. A row's candidates are the first entries of keys, ids and weights, in id order."""

    tops: Array  # [num_blocks] int32, key of the largest logit of each block
    masses: Array  # [num_blocks] float64, sum of the block's weights
    keys: Array  # [V] int32, the candidates' logits as integers of the same order
    ids: Array  # [V] int32
    weights: Array  # [V] float32, the candidates' probabilities over that of the likeliest token
    ones: Array  # [V] float32


# --- numbers


@_compiled()
def _key(value: Any) -> Any:
    """Converts a float to an integer of the same order; -0 and +0 are equal."""
    bits = _f32(value + _f32(0.0)).view(np.int32)
    return _i32(bits ^ ((bits >> _i32(31)) & _i32(0x7FFFFFFF)))


@_compiled()
def _value(key: Any) -> Any:
    return _i32(key ^ ((key >> _i32(31)) & _i32(0x7FFFFFFF))).view(np.float32)


@_compiled()
def _weight(value: Any, highest: Any, scale: Any) -> Any:
    exponent = _f32((value - highest) * scale)
    return exp(exponent) if exponent >= _f32(_LOWEST_EXPONENT) else _f32(0.0)


# The math library's exp is a call per number; this one is vectorized. Relative error under 1e-7.
@_compiled("contract")
def exp(x: Any) -> Any:
    """Computes e**x for -87 <= x <= 0: two to the nearest whole power, times a Taylor series of the rest."""
    x = max(x, _f32(_LOWEST_EXPONENT))
    power = np.floor(x * _f32(1.0 / math.log(2.0)) + _f32(0.5))
    rest = (x - power * _f32(_LN2_HIGH)) - power * _f32(_LN2_LOW)  # at most ln(2) / 2 either way
    series = _f32(1 / 5040)
    series = series * rest + _f32(1 / 720)
    series = series * rest + _f32(1 / 120)
    series = series * rest + _f32(1 / 24)
    series = series * rest + _f32(1 / 6)
    series = series * rest + _f32(1 / 2)
    series = series * rest + _f32(1)
    series = series * rest + _f32(1)
    return series * _i32((_i32(power) + _i32(127)) << _i32(23)).view(np.float32)


@_compiled()
def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> tuple[Any, Any, Any, Any]:
    """Philox-4x32-10 (Salmon et al. 2011): four random 32-bit words, each in a uint64, from counter and key."""
    word = _u64(_LOW_WORD)
    for _ in range(10):
        product_0 = c0 * _u64(0xD2511F53)
        product_1 = c2 * _u64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (product_1 >> _u64(32)) ^ c1 ^ k0,
            product_1 & word,
            (product_0 >> _u64(32)) ^ c3 ^ k1,
            product_0 & word,
        )
        k0 = (k0 + _u64(0x9E3779B9)) & word
        k1 = (k1 + _u64(0xBB67AE85)) & word
    return c0, c1, c2, c3


@_compiled()
def uniform(seed: int, position: int) -> Any:
    """Returns the number in [0, 1) of a seed and a position, with 53 random bits."""
    word, shift = _u64(_LOW_WORD), _u64(32)
    key, counter = _u64(seed), _u64(position)
    first, second, _, _ = philox(counter & word, counter >> shift, _u64(0), _u64(0), key & word, key >> shift)
    return ((first >> _u64(5)) * 67108864.0 + (second >> _u64(6))) / 9007199254740992.0


# --- one row


@_compiled()
def _find_tops(logits: Array, tops: Array) -> tuple[Any, Any]:
    """Writes the largest key of each block. Returns the row's largest, and whether it is finite and no logit is NaN."""
    top, largest = _i32(_LOWEST_KEY), _i32(0)
    for block in range(tops.size):
        tops[block], block_largest = _block_top(logits[block * BLOCK_LEN : (block + 1) * BLOCK_LEN])
        top = max(top, tops[block])
        largest = max(largest, block_largest)
    return top, largest <= _INF_BITS and _NEG_INF_KEY < top < _INF_BITS


@_compiled()
def _block_top(logits: Array) -> tuple[Any, Any]:
    top, largest = _i32(_LOWEST_KEY), _i32(0)
    for i in range(logits.size):
        top = max(top, _key(logits[i]))
        largest = max(
            largest, _i32(_f32(logits[i]).view(np.int32) & _i32(0x7FFFFFFF))
        )  # a NaN's bits exceed infinity's
    return top, largest


@_compiled()
def _first_index(logits: Array, tops: Array, top: int) -> int:
    block = 0
    while tops[block] != top:
        block += 1
    i = block * BLOCK_LEN
    while _key(logits[i]) != top:
        i += 1
    return i


@_compiled()
def _find_masses(logits: Array, highest: float, scale: float, masses: Array) -> float:
    total = 0.0
    for block in range(masses.size):
        masses[block] = _block_mass(logits[block * BLOCK_LEN : (block + 1) * BLOCK_LEN], highest, scale)
        total += masses[block]
    return total


@_compiled("reassoc", "contract")
def _block_mass(logits: Array, highest: float, scale: float) -> float:
    mass = 0.0
    for i in range(logits.size):
        mass += np.float64(_weight(logits[i], highest, scale))
    return mass


@_compiled()
def _sample_from_all(logits: Array, highest: float, scale: float, target: float, masses: Array) -> int:
    running, chosen = 0.0, 0
    for block in range(masses.size):
        if masses[block] > 0.0:
            chosen = block  # the last block with any mass, in case rounding keeps the sum below the target
            if running + masses[block] > target:
                break
            running += masses[block]
    token = 0
    for i in range(chosen * BLOCK_LEN, min((chosen + 1) * BLOCK_LEN, logits.size)):
        weight = _weight(logits[i], highest, scale)
        if weight > 0.0:
            token = i
            running += weight
            if running > target:
                break
    return token


@_compiled()
def _floor(filters: _Filters, top: Any, total: float, vocab_size: int, scratch: _Scratch) -> Any:
    """Returns a key below which no token is kept. It may be too low, never too high."""
    floor, num_blocks = _i32(_LOWEST_KEY), scratch.tops.size
    if 0 < filters.top_k <= num_blocks:  # top_k blocks each hold a token at min_weight as likely as this one
        floor = _find_threshold(scratch.tops, scratch.ones[:num_blocks], float(filters.top_k), floor, top)
    min_weight = filters.min_p
    if total > 0.0:  # lighter tokens together weigh less than 1 - top_p, so top_p is reached without them
        min_weight = (1.0 - filters.top_p) * total / vocab_size
    if min_weight > 0.0:
        value = _value(top) + filters.temperature * math.log(0.99 * min_weight)
        floor = max(floor, _key(_f32(value - 1e-6 * abs(value))))
    return floor


@_compiled()
def _gather(logits: Array, floor: int, scratch: _Scratch) -> int:
    num = 0
    for block in range(scratch.tops.size):
        if scratch.tops[block] >= floor:
            for i in range(block * BLOCK_LEN, min((block + 1) * BLOCK_LEN, logits.size)):
                key = _key(logits[i])
                scratch.keys[num], scratch.ids[num] = key, i
                num += key >= floor
    return num


@_compiled()
def _weigh(keys: Array, highest: float, scale: float, weights: Array) -> None:
    for i in range(keys.size):
        weights[i] = _weight(_value(keys[i]), highest, scale)


@_compiled()
def _filter(filters: _Filters, total: float, floor: Any, top: Any, num: int, scratch: _Scratch) -> int:
    if filters.min_p > 0.0:
        num = _keep_likely(filters.min_p, num, scratch)
    if 0 < filters.top_k < num:
        num = _keep_top(scratch.ones, float(filters.top_k), floor, top, num, scratch)
    if filters.top_p < 1.0:
        mass = total if total > 0.0 else _sum(scratch.weights[:num])
        num = _keep_top(scratch.weights, filters.top_p * mass, floor, top, num, scratch)
    return num


@_compiled()
def _keep_likely(min_weight: float, num: int, scratch: _Scratch) -> int:
    kept = 0
    for i in range(num):
        if scratch.weights[i] >= min_weight:
            _move(scratch, i, kept)
            kept += 1
    return kept


@_compiled()
def _keep_top(amounts: Array, target: float, floor: Any, top: Any, num: int, scratch: _Scratch) -> int:
    """Keeps the likeliest tokens, as few as have amounts that reach the target; of equal logits the lower ids."""
    threshold = _find_threshold(scratch.keys[:num], amounts[:num], target, floor, top)
    running = _amount_from(scratch.keys[:num], amounts[:num], _i32(threshold + 1))
    kept = 0
    for i in range(num):
        key = scratch.keys[i]
        if key > threshold or (key == threshold and running < target):
            running += amounts[i] if key == threshold else _f32(0.0)
            _move(scratch, i, kept)
            kept += 1
    return kept


@_compiled()
def _find_threshold(keys: Array, amounts: Array, target: float, low: Any, high: Any) -> Any:
    """Returns the highest key such that the amounts from it upwards reach the target; by bisection between low and
    high."""
    while low < high:
        middle = _i32((np.int64(low) + np.int64(high) + 1) >> 1)
        if _amount_from(keys, amounts, middle) >= target:
            low = middle
        else:
            high = _i32(middle - 1)
    return low


@_compiled("reassoc", "contract")
def _amount_from(keys: Array, amounts: Array, threshold: Any) -> Any:
    amount = 0.0
    for i in range(keys.size):
        amount += np.float64(amounts[i] if keys[i] >= threshold else _f32(0.0))
    return amount


@_compiled("reassoc", "contract")
def _sum(weights: Array) -> float:
    total = 0.0
    for i in range(weights.size):
        total += np.float64(weights[i])
    return total


@_compiled()
def _move(scratch: _Scratch, source: int, target: int) -> None:
    scratch.keys[target] = scratch.keys[source]
    scratch.ids[target] = scratch.ids[source]
    scratch.weights[target] = scratch.weights[source]


@_compiled()
def _sample_from_candidates(share: float, num: int, scratch: _Scratch) -> Any:
    target = share * _sum(scratch.weights[:num])
    running, token = 0.0, _i32(0)
    for i in range(num):
        if scratch.weights[i] > 0.0:
            token = scratch.ids[i]
            running += scratch.weights[i]
            if running > target:
                break
    return token


@_compiled()
def _sample_row(logits: Array, filters: _Filters, seed: int, position: int, scratch: _Scratch) -> tuple[int, int]:
    top, is_valid = _find_tops(logits, scratch.tops)
    if not is_valid:
        return 0, False
    if filters.temperature == 0.0:
        return _first_index(logits, scratch.tops, top), True
    share = uniform(seed, position)
    highest, scale = _value(top), _f32(1.0 / filters.temperature)
    narrows = filters.min_p > 0.0 or filters.top_k > 0
    total = 0.0 if narrows else _find_masses(logits, highest, scale, scratch.masses)
    if not narrows and filters.top_p == 1.0:
        return _sample_from_all(logits, highest, scale, share * total, scratch.masses), True
    floor = _floor(filters, top, total, logits.size, scratch)
    num = _gather(logits, floor, scratch)
    _weigh(scratch.keys[:num], highest, scale, scratch.weights)
    num = _filter(filters, total, floor, top, num, scratch)
    return _sample_from_candidates(share, num, scratch), True


# --- all rows


@_compiled()
def _double(bits: Any) -> Any:
    return np.int64(bits).view(np.float64)


@_compiled()
def _new_scratch(vocab_size: int) -> _Scratch:
    num_blocks = (vocab_size + BLOCK_LEN - 1) // BLOCK_LEN
    return _Scratch(
        np.empty(num_blocks, np.int32),
        np.empty(num_blocks, np.float64),
        np.empty(vocab_size, np.int32),
        np.empty(vocab_size, np.int32),
        np.empty(vocab_size, np.float32),
        np.ones(vocab_size, np.float32),
    )


@kernel(
    logits="pointer",
    slots="pointer",
    lens="pointer",
    temperature="pointer",
    min_p="pointer",
    top_k="pointer",
    top_p="pointer",
    seed="pointer",
    tokens="pointer",
    flags="pointer",
    num_rows="integer",
    vocab_size="integer",
)
def _sample(pointer: Pointer) -> None:
    args = arguments_at(pointer)
    logits = carray(floats(args.logits), (args.num_rows, args.vocab_size))
    slots, lens, seed = int64s(args.slots), int64s(args.lens), int64s(args.seed)
    temperature, min_p = int64s(args.temperature), int64s(args.min_p)
    top_k, top_p = int64s(args.top_k), int64s(args.top_p)
    tokens, flags = int64s(args.tokens), uint8s(args.flags)
    scratch = _new_scratch(args.vocab_size)
    while True:
        i = claim(pointer)
        if i >= args.num_rows:
            break
        slot = slots[i]
        filters = _Filters(_double(temperature[slot]), _double(min_p[slot]), top_k[slot], _double(top_p[slot]))
        tokens[i], is_valid = _sample_row(logits[i], filters, seed[slot], lens[i], scratch)
        flags[i] = 0 if is_valid else BROKEN


def sample(
    logits: Tensor,  # [R, V] float32, only read
    slots: Tensor,  # [R] int64, the slot of each row
    lens: Tensor,  # [R] int64, the counter of each row's random number
    *,
    temperature: Tensor,  # [num_slots] float64, indexed by slot like all below; 0 is greedy
    min_p: Tensor,  # float64, 0 is off
    top_k: Tensor,  # int64, 0 is off
    top_p: Tensor,  # float64, 1 is off
    seed: Tensor,  # int64
) -> tuple[Tensor, Tensor]:
    """Returns the sampled token of each row, [R] int64, and its flag, [R] uint8: steps.BROKEN where a logit is NaN or
    the largest is not finite, else 0."""
    num_rows, vocab_size = logits.shape
    tokens, flags = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.uint8)
    inputs = [logits.contiguous(), slots.contiguous(), lens.contiguous()]
    columns = [temperature, min_p, top_k, top_p, seed]
    _sample(*inputs, *columns, tokens, flags, num_rows, vocab_size, num_tasks=num_rows)
    return tokens, flags
