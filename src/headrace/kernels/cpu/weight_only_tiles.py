"""The code that the kernels of packed weights are made of: rounding activations, and a tile of the GEMM.

A tile has a chunk of some rows and of one panel:

    integers   [rows, K] int16, of which pairs of neighbours are loaded
    factors    [rows, 2, groups of the whole row] float32
    words      [words of the chunk, PANEL] int32, see `gemm_weight_only`
    scales     [groups of the chunk, PANEL]; minima likewise
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from headrace.kernels.cpu.panels import NUM_VECTORS, PANEL, SIZE, Step, emit_choice, emit_for_rows, emit_sums
from headrace.kernels.cpu.vectors import (
    FLOATS,
    INTS,
    LANES,
    SHORTS,
    constants,
    emit_absolute,
    emit_dot_shorts,
    emit_fma,
    emit_integer_total,
    emit_largest,
    emit_load,
    emit_load_narrow,
    emit_prefetch,
    emit_rounded,
    emit_splat,
    emit_store,
    emit_total,
)

WORD_BITS = 32
UNIT_LENS = {4: 8, 6: 16, 8: 4}  # weights of a unit, by their bits: one word, with six bits three
WORDS_AHEAD = 32  # prefetched, for each output of a panel: 6 KiB, about what arrives while they are computed
USUAL_GROUP_LEN = 32
_LARGEST = 32767.0
_TINY = 1e-12  # largest value of a group of zeros
_BYTE, _SHORT, _INT = (ir.IntType(bits) for bits in (8, 16, 32))
_HALF, _FLOAT = ir.HalfType(), ir.FloatType()
_FORMS = [(dtype, has_minima) for dtype in (torch.float16, torch.float32, torch.int8) for has_minima in (False, True)]
_FLOAT_POINTER, _BYTE_POINTER, _INT_POINTER = (
    types.CPointer(each) for each in (types.float32, types.uint8, types.int32)
)


def form_of(dtype: torch.dtype, *, has_minima: bool) -> int:
    """The number by which the kernel knows how scales and minima are stored."""
    return _FORMS.index((dtype, has_minima))


@intrinsic
def round_group(typing: Any, x: Any, num_vectors: Any, integers: Any, factors: Any, num_groups: Any) -> Any:
    """Rounds a group of activations. Its factor is NaN if a value is not finite."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        num_vectors = args[1]
        usual = partial(_emit_rounding, b, *args, unrolled=USUAL_GROUP_LEN // LANES)
        emit_choice(b, num_vectors, {USUAL_GROUP_LEN // LANES: usual, 0: partial(_emit_rounding, b, *args)})
        return context.get_dummy_value()

    size = types.intp
    return types.void(_FLOAT_POINTER, size, _BYTE_POINTER, _FLOAT_POINTER, size), emit


def _emit_rounding(
    b: ir.IRBuilder,
    x: ir.Value,
    num_vectors: ir.Value,
    integers: ir.Value,
    factors: ir.Value,
    num_groups: ir.Value,
    *,
    unrolled: int | None = None,  # the number of vectors, where it is known
) -> None:
    shorts = b.bitcast(integers, _SHORT.as_pointer())

    def over_vectors(zeros: list[ir.Value], step: Step) -> list[ir.Value]:
        if unrolled is None:
            return emit_sums(b, num_vectors, zeros, step)
        return reduce(lambda found, v: step(SIZE(v), found), range(unrolled), zeros)

    def look(v: ir.Value, found: list[ir.Value]) -> list[ir.Value]:
        value = emit_load(b, x, b.mul(v, SIZE(LANES)))
        size = emit_absolute(b, value)
        top = b.select(b.fcmp_ordered(">", size, found[0]), size, found[0])
        return [top, emit_fma(b, value, constants(0.0), found[1])]

    tops, nothing = over_vectors([constants(_TINY), constants(0.0)], look)
    top = emit_largest(b, tops, has_nan=False)
    inverse = emit_splat(b, b.fdiv(_FLOAT(_LARGEST), top), FLOATS)

    def store(v: ir.Value, found: list[ir.Value]) -> list[ir.Value]:
        first = b.mul(v, SIZE(LANES))
        rounded = emit_rounded(b, b.fmul(emit_load(b, x, first), inverse))
        narrow = b.trunc(rounded, ir.VectorType(_SHORT, LANES))
        b.store(narrow, b.bitcast(b.gep(shorts, [first]), narrow.type.as_pointer()), align=2)
        return [b.add(found[0], rounded)]

    (totals,) = over_vectors([ir.Constant(INTS, [0] * LANES)], store)
    factor = b.fdiv(top, _FLOAT(_LARGEST))
    total = b.sitofp(emit_integer_total(b, totals), _FLOAT)
    b.store(b.fadd(factor, emit_total(b, nothing)), factors)
    b.store(b.fmul(factor, total), b.gep(factors, [num_groups]))


@intrinsic
def multiply_words(
    typing: Any,
    num_rows: Any,
    bits: Any,
    words: Any,
    form: Any,
    scales: Any,
    minima: Any,
    outer_scales: Any,  # [PANEL]
    outer_minima: Any,
    minimum_of_scale: Any,  # what a scale is multiplied by where minima are not stored
    num_groups: Any,
    group_len: Any,
    integers: Any,
    depth: Any,  # from one row of them to the next
    factors: Any,
    all_groups: Any,  # of a row of factors
    before: Any,  # [rows, PANEL], what the sums are added to
    before_stride: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """Multiplies a chunk of up to TILE_ROWS rows by the same chunk of a panel."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        num_rows, bits, words, *of_scales = args[:9]
        scales, rest = _Scales(*of_scales), args[9:]

        def of_width(width: int) -> None:
            emit_for_rows(b, num_rows, lambda count: _emit_tile(b, count, _Words(words, width), scales, *rest))

        emit_choice(b, bits, {width: partial(of_width, width) for width in UNIT_LENS})
        return context.get_dummy_value()

    size = types.intp
    weights = (_INT_POINTER, size, *[_BYTE_POINTER] * 4, types.float32, size, size)
    rows = (_BYTE_POINTER, size, _FLOAT_POINTER, size)
    return types.void(size, size, *weights, *rows, _FLOAT_POINTER, size, _FLOAT_POINTER, size), emit


class _Words(NamedTuple):
    """Code that reads weights, a unit of words at a time."""

    pointer: ir.Value
    bits: int

    @property
    def unit_len(self) -> int:
        return UNIT_LENS[self.bits]

    def load(self, b: ir.IRBuilder, unit: ir.Value) -> list[list[ir.Value]]:  # by word and vector
        num_words = self.unit_len * self.bits // WORD_BITS
        return [self._load_word(b, b.add(b.mul(unit, SIZE(num_words)), SIZE(word))) for word in range(num_words)]

    def _load_word(self, b: ir.IRBuilder, word: ir.Value) -> list[ir.Value]:
        starts = [b.add(b.mul(word, SIZE(PANEL)), SIZE(v * LANES)) for v in range(NUM_VECTORS)]
        for at in starts:
            emit_prefetch(b, self.pointer, b.add(at, SIZE(WORDS_AHEAD * PANEL)))
        return [emit_load(b, self.pointer, at, INTS) for at in starts]

    def pairs(self, b: ir.IRBuilder, unit: list[list[ir.Value]], place: int) -> list[ir.Value]:
        """The neighbours 2 * place and 2 * place + 1 of each output, as integers of 16 bits, by vector."""
        bits = 4 if self.bits == 6 else self.bits
        word, place_in_word = divmod(place, WORD_BITS // 2 // bits)
        found = [_emit_field(b, each, bits * place_in_word, bits) for each in unit[word]]
        if self.bits == 6:
            upper = [_emit_field(b, each, 2 * place - 4, 2, at=4) for each in unit[2]]
            found = [b.or_(*each) for each in zip(found, upper, strict=True)]
        return [b.bitcast(each, SHORTS) for each in found]


def _emit_field(b: ir.IRBuilder, words: ir.Value, shift: int, bits: int, at: int = 0) -> ir.Value:
    """Takes some bits from both halves of words, which are moved right by `shift` to begin at bit `at`."""
    if shift > 0:
        words = b.lshr(words, ir.Constant(INTS, [shift] * LANES))
    elif shift < 0:
        words = b.shl(words, ir.Constant(INTS, [-shift] * LANES))
    mask = ((1 << bits) - 1) << at
    return b.and_(words, ir.Constant(INTS, [mask << 16 | mask] * LANES))


class _Scales(NamedTuple):
    """Code that reads the scales and minima of a group."""

    form: ir.Value
    scales: ir.Value
    minima: ir.Value
    outer_scales: ir.Value
    outer_minima: ir.Value
    minimum_of_scale: ir.Value

    def load(self, b: ir.IRBuilder, group: ir.Value) -> tuple[list[ir.Value], list[ir.Value]]:
        """Returns them in float32. The form is the same each time, so the processor predicts the branch."""
        forms = {number: partial(self._load_form, b, group, *form) for number, form in enumerate(_FORMS)}
        found = emit_choice(b, self.form, forms)
        results = [b.phi(FLOATS) for _ in range(2 * NUM_VECTORS)]
        for values, block in found:
            for phi, value in zip(results, values, strict=True):
                phi.add_incoming(value, block)
        return results[:NUM_VECTORS], results[NUM_VECTORS:]

    def _load_form(self, b: ir.IRBuilder, group: ir.Value, dtype: torch.dtype, has_minima: bool) -> list[ir.Value]:
        steps = _emit_numbers(b, dtype, self.scales, self.outer_scales, group)
        if has_minima:
            return steps + _emit_numbers(b, dtype, self.minima, self.outer_minima, group)
        return steps + [b.fmul(each, emit_splat(b, self.minimum_of_scale, FLOATS)) for each in steps]


def _emit_numbers(
    b: ir.IRBuilder, dtype: torch.dtype, pointer: ir.Value, outer: ir.Value, group: ir.Value
) -> list[ir.Value]:
    """Loads scales or minima of a group in float32."""
    starts = [b.add(b.mul(group, SIZE(PANEL)), SIZE(v * LANES)) for v in range(NUM_VECTORS)]
    if dtype == torch.float32:
        return [emit_load(b, b.bitcast(pointer, _FLOAT.as_pointer()), at) for at in starts]
    if dtype == torch.float16:
        return [b.fpext(emit_load_narrow(b, pointer, at, _HALF), FLOATS) for at in starts]
    inner = [b.sitofp(emit_load_narrow(b, pointer, at, _BYTE), FLOATS) for at in starts]
    factors = [emit_load_narrow(b, outer, SIZE(v * LANES), _HALF) for v in range(NUM_VECTORS)]
    return [b.fmul(each, b.fpext(factor, FLOATS)) for each, factor in zip(inner, factors, strict=True)]


def _emit_tile(
    b: ir.IRBuilder,
    num_rows: int,
    weights: _Words,
    scales: _Scales,
    num_groups: ir.Value,
    group_len: ir.Value,
    integers: ir.Value,
    depth: ir.Value,
    factors: ir.Value,
    all_groups: ir.Value,
    before: ir.Value,
    before_stride: ir.Value,
    out: ir.Value,
    out_stride: ir.Value,
) -> None:
    inputs = b.bitcast(integers, _INT.as_pointer())  # pairs
    rows = [b.gep(inputs, [b.mul(b.udiv(depth, SIZE(2)), SIZE(row))]) for row in range(num_rows)]
    row_factors = [b.gep(factors, [b.mul(all_groups, SIZE(2 * row))]) for row in range(num_rows)]
    places = [(row, v) for row in range(num_rows) for v in range(NUM_VECTORS)]
    num_units = b.udiv(group_len, SIZE(weights.unit_len))

    def of_group(group: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        first_unit = b.mul(group, num_units)

        def of_unit(number: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            unit = b.add(first_unit, number)
            words = weights.load(b, unit)
            for place in range(weights.unit_len // 2):
                pair = b.add(b.mul(unit, SIZE(weights.unit_len // 2)), SIZE(place))
                columns = weights.pairs(b, words, place)
                values = [_emit_pair(b, row, pair) for row in rows]
                sums = [
                    emit_dot_shorts(b, values[row], columns[v], sum_)
                    for (row, v), sum_ in zip(places, sums, strict=True)
                ]
            return sums

        sums = emit_sums(b, num_units, [ir.Constant(INTS, [0] * LANES)] * len(places), of_unit)
        steps, minima = scales.load(b, group)
        of_rows = [emit_splat(b, b.load(b.gep(row, [group])), FLOATS) for row in row_factors]
        row_sums = [emit_splat(b, b.load(b.gep(row, [b.add(all_groups, group)])), FLOATS) for row in row_factors]
        results = []
        for (row, v), sum_, total in zip(places, sums, totals, strict=True):
            known = emit_fma(b, minima[v], row_sums[row], total)
            results.append(emit_fma(b, b.sitofp(sum_, FLOATS), b.fmul(steps[v], of_rows[row]), known))
        return results

    totals = emit_sums(b, num_groups, [constants(0.0)] * len(places), of_group)
    for (row, v), total in zip(places, totals, strict=True):
        known = emit_load(b, before, b.add(b.mul(before_stride, SIZE(row)), SIZE(v * LANES)))
        emit_store(b, out, b.add(b.mul(out_stride, SIZE(row)), SIZE(v * LANES)), b.fadd(known, total))


def _emit_pair(b: ir.IRBuilder, row: ir.Value, pair: ir.Value) -> ir.Value:
    """Loads two neighbours of a row into all lanes."""
    return b.bitcast(emit_splat(b, b.load(b.gep(row, [pair]), align=2), INTS), SHORTS)
