"""SIMD vectors of float32 for numba: a register type and the instructions that the kernels use.

A `Vector` is one hardware register of LANES floats. LANES follows the machine, and numba's cache is keyed by it too.
The functions that take a builder emit the same instructions into code that a kernel generates itself.
"""

from __future__ import annotations

import math
import platform
from typing import Any, TypeAlias

from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

FEATURES = binding.get_host_cpu_features()
LANES = 16 if FEATURES.get("avx512f") else 8
HAS_VNNI = bool(FEATURES.get("avx512vnni") if LANES == 16 else FEATURES.get("avxvnni"))
HAS_FLOAT16 = bool(FEATURES.get("f16c")) or platform.machine() not in ("x86_64", "AMD64")  # conversions from and to it

Vector: TypeAlias = Any  # a register inside a kernel, as mypy sees it

_FLOAT = ir.FloatType()
_INT = ir.IntType(32)
FLOATS = ir.VectorType(_FLOAT, LANES)
INTS = ir.VectorType(_INT, LANES)
SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)
_BYTE, _SHORT, _HALF = ir.IntType(8), ir.IntType(16), ir.HalfType()
_WORDS, _HALVES = ir.VectorType(_SHORT, LANES), ir.VectorType(_HALF, LANES)


class VectorType(types.Type):
    def __init__(self) -> None:
        super().__init__(name=f"float32x{LANES}")


vector = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, FLOATS)


def constants(value: float) -> ir.Constant:
    return ir.Constant(FLOATS, [value] * LANES)


def _integers(values: list[int]) -> ir.Constant:
    return ir.Constant(INTS, values)


def emit_splat(builder: ir.IRBuilder, value: ir.Value, of: ir.VectorType) -> ir.Value:
    one = builder.insert_element(ir.Constant(of, ir.Undefined), value, _INT(0))
    return builder.shuffle_vector(one, ir.Constant(of, ir.Undefined), _integers([0] * LANES))


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value, flags: tuple[str, ...] = ()) -> ir.Value:
    return _call_named(builder, f"{name}.v{LANES}f32", result, *args, flags=flags)


def _call_named(
    builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value, flags: tuple[str, ...] = ()
) -> ir.Value:
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args, fastmath=flags)


def emit_fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return _call(builder, "llvm.fmuladd", FLOATS, a, b, c)


def emit_load(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value, of: ir.VectorType = FLOATS) -> ir.Value:
    """Loads LANES elements from pointer[index] on; any alignment."""
    return builder.load(builder.bitcast(builder.gep(pointer, [index]), of.as_pointer()), align=4)


def emit_load_narrow(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value, element: ir.Type) -> ir.Value:
    """Loads LANES elements of eight or 16 bits from pointer[index] on; any alignment."""
    first = builder.gep(builder.bitcast(pointer, element.as_pointer()), [index])
    return builder.load(builder.bitcast(first, ir.VectorType(element, LANES).as_pointer()), align=1)


def emit_store(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value, value: ir.Value) -> None:
    builder.store(value, builder.bitcast(builder.gep(pointer, [index]), value.type.as_pointer()), align=4)


def emit_rounded(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Returns the nearest integers."""
    return builder.fptosi(_call(builder, "llvm.rint", FLOATS, value), INTS)


def emit_absolute(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    return _call(builder, "llvm.fabs", FLOATS, value)


def emit_largest(builder: ir.IRBuilder, value: ir.Value, *, has_nan: bool = True) -> ir.Value:
    """Returns the largest lane; NaN only if all are. It takes fewer instructions where none is."""
    return _call(builder, "llvm.vector.reduce.fmax", _FLOAT, value, flags=() if has_nan else ("nnan",))


def emit_total(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Returns the sum of the lanes."""
    return _call(builder, "llvm.vector.reduce.fadd", _FLOAT, _FLOAT(0.0), value, flags=("reassoc",))


def emit_integer_total(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    return _call_named(builder, f"llvm.vector.reduce.add.v{LANES}i32", _INT, value)


def emit_dot_bytes(builder: ir.IRBuilder, inputs: ir.Value, weights: ir.Value, sums: ir.Value) -> ir.Value:
    """Adds to each lane the products of four unsigned bytes and four signed ones. Only with VNNI."""
    return _call_named(builder, f"llvm.x86.avx512.vpdpbusd.{32 * LANES}", INTS, sums, inputs, weights)


def emit_dot_shorts(builder: ir.IRBuilder, inputs: ir.Value, weights: ir.Value, sums: ir.Value) -> ir.Value:
    """Adds to each lane the products of two signed integers of 16 bits."""
    if HAS_VNNI:
        words = (builder.bitcast(each, INTS) for each in (inputs, weights))
        return _call_named(builder, f"llvm.x86.avx512.vpdpwssd.{32 * LANES}", INTS, sums, *words)
    name = "llvm.x86.avx512.pmaddw.d.512" if LANES == 16 else "llvm.x86.avx2.pmadd.wd"
    return builder.add(sums, _call_named(builder, name, INTS, inputs, weights))


def emit_prefetch(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value) -> None:
    """Prefetches the cache line of pointer[index]; any address is allowed."""
    address = builder.bitcast(builder.gep(pointer, [index]), ir.IntType(8).as_pointer())
    function_type = ir.FunctionType(ir.VoidType(), [address.type, _INT, _INT, _INT])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    builder.call(function, [address, _INT(0), _INT(3), _INT(1)])


@intrinsic
def load(typing: Any, pointer: Any, index: Any) -> Any:
    """Loads LANES floats from pointer[index] on; any alignment."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_load(builder, *args)

    return vector(types.CPointer(types.float32), types.intp), emit


@intrinsic
def load_float16(typing: Any, address: Any) -> Any:
    """Loads LANES numbers of float16 at an address; any alignment. Only with `HAS_FLOAT16`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _emit_widened(builder, _emit_load_at(builder, args[0], _SHORT))

    return vector(types.intp), emit


@intrinsic
def load_bytes_as_float16(typing: Any, address: Any, shift: Any) -> Any:
    """Loads LANES bytes as numbers of float16: the first bit is the sign, the others are shifted to the left. Only with
    `HAS_FLOAT16`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, shift = args
        wide = builder.sext(_emit_load_at(builder, address, _BYTE), _WORDS)
        shift = builder.trunc(shift, _SHORT)
        others = builder.or_(builder.shl(_SHORT(0x7F), shift), _SHORT(0x8000))
        moved = builder.shl(wide, emit_splat(builder, shift, _WORDS))
        return _emit_widened(builder, builder.and_(moved, emit_splat(builder, others, _WORDS)))

    return vector(types.intp, types.intp), emit


def _emit_load_at(builder: ir.IRBuilder, address: ir.Value, element: ir.Type) -> ir.Value:
    pointer = builder.inttoptr(address, ir.VectorType(element, LANES).as_pointer())
    return builder.load(pointer, align=1)


def _emit_widened(builder: ir.IRBuilder, words: ir.Value) -> ir.Value:
    if not HAS_FLOAT16:
        return ir.Constant(FLOATS, ir.Undefined)
    return builder.fpext(builder.bitcast(words, _HALVES), FLOATS)


@intrinsic
def float_of_half(typing: Any, bits: Any) -> Any:
    """Returns the number that has these bits in float16."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not HAS_FLOAT16:
            return ir.Constant(_FLOAT, ir.Undefined)
        return builder.fpext(builder.bitcast(builder.trunc(args[0], _SHORT), _HALF), _FLOAT)

    return types.float32(types.intp), emit


@intrinsic
def half_of_float(typing: Any, value: Any) -> Any:
    """Returns the bits of the nearest float16."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not HAS_FLOAT16:
            return ir.Constant(_SHORT, ir.Undefined)
        return builder.bitcast(builder.fptrunc(args[0], _HALF), _SHORT)

    return types.uint16(types.float32), emit


@intrinsic
def bits_of(typing: Any, value: Any) -> Any:
    """Returns the bits of a float32."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _INT)

    return types.int32(types.float32), emit


@intrinsic
def store(typing: Any, pointer: Any, index: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_store(builder, *args)
        return context.get_dummy_value()

    return types.void(types.CPointer(types.float32), types.intp, vector), emit


@intrinsic
def prefetch(typing: Any, pointer: Any, index: Any) -> Any:
    """Prefetches the cache line of pointer[index]; any address is allowed."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_prefetch(builder, *args)
        return context.get_dummy_value()

    return types.void(types.CPointer(types.float32), types.intp), emit


@intrinsic
def splat(typing: Any, value: Any) -> Any:
    """Returns the same number in every lane."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_splat(builder, args[0], FLOATS)

    return vector(types.float32), emit


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Returns a * b + c."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_fma(builder, *args)

    return vector(vector, vector, vector), emit


@intrinsic
def add(typing: Any, a: Any, b: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(*args)

    return vector(vector, vector), emit


@intrinsic
def subtract(typing: Any, a: Any, b: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fsub(*args)

    return vector(vector, vector), emit


@intrinsic
def multiply(typing: Any, a: Any, b: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(*args)

    return vector(vector, vector), emit


@intrinsic
def divide(typing: Any, a: Any, b: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fdiv(*args)

    return vector(vector, vector), emit


@intrinsic
def maximum(typing: Any, a: Any, b: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, b = args
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    return vector(vector, vector), emit


@intrinsic
def absolute(typing: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_absolute(builder, args[0])

    return vector(vector), emit


@intrinsic
def lanes_from(typing: Any, first: Any) -> Any:
    """Returns first, first + 1, ... as floats."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        firsts = emit_splat(builder, builder.trunc(args[0], _INT), INTS)
        return builder.sitofp(builder.add(firsts, _integers(list(range(LANES)))), FLOATS)

    return vector(types.intp), emit


@intrinsic
def only_lanes(typing: Any, value: Any, begin: Any, end: Any, other: Any) -> Any:
    """Returns `value` in lanes begin..end-1, and the number `other` in the rest, whatever they held (NaN too)."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, begin, end, other = args
        lanes = _integers(list(range(LANES)))
        begins, ends = (emit_splat(builder, builder.trunc(edge, _INT), INTS) for edge in (begin, end))
        inside = builder.and_(builder.icmp_signed(">=", lanes, begins), builder.icmp_signed("<", lanes, ends))
        return builder.select(inside, value, emit_splat(builder, other, FLOATS))

    return vector(vector, types.intp, types.intp, types.float32), emit


@intrinsic
def largest(typing: Any, value: Any) -> Any:
    """Returns the largest lane; NaN only if all are."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_largest(builder, args[0])

    return types.float32(vector), emit


@intrinsic
def total(typing: Any, value: Any) -> Any:
    """Returns the sum of the lanes."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_total(builder, args[0])

    return types.float32(vector), emit


@intrinsic
def mix_lanes(typing: Any, value: Any, length: Any) -> Any:
    """Multiplies each `length` neighbouring lanes, or all if there are fewer, with the Hadamard matrix of ones and
    minus ones."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, length = args
        step = 1
        while step < LANES:
            others = builder.shuffle_vector(value, value, _integers([lane ^ step for lane in range(LANES)]))
            signs = ir.Constant(FLOATS, [-1.0 if lane & step else 1.0 for lane in range(LANES)])
            is_on = builder.icmp_signed(">", length, length.type(step))
            value = builder.select(is_on, emit_fma(builder, value, signs, others), value)
            step *= 2
        return value

    return vector(vector, types.intp), emit


_LN2_HIGH = 0.693359375  # multiplying it by any exponent of a float32 is exact
_LN2_LOW = math.log(2.0) - _LN2_HIGH
_ROUNDER = 1.5 * 2.0**23  # added to a small float, it leaves the nearest integer in the low bits
_SMALLEST = -87.0  # beyond these two the result leaves the range of normal floats
_LARGEST = 88.0


@intrinsic
def exp(typing: Any, value: Any) -> Any:
    """Computes e**value to about one unit in the last place; 0 below -87, infinite above 88, NaN of NaN.

    value = n * ln2 + rest with |rest| <= ln2 / 2; e**rest is its Taylor series, and n is added to the exponent's bits.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x = args[0]
        too_small = builder.fcmp_ordered("<", x, constants(_SMALLEST))
        too_large = builder.fcmp_ordered(">", x, constants(_LARGEST))
        rounded = emit_fma(builder, x, constants(1.0 / math.log(2.0)), constants(_ROUNDER))
        n = builder.fsub(rounded, constants(_ROUNDER))
        rest = emit_fma(builder, n, constants(-_LN2_HIGH), x)
        rest = emit_fma(builder, n, constants(-_LN2_LOW), rest)
        series = constants(1.0 / math.factorial(7))
        for power in range(6, -1, -1):
            series = emit_fma(builder, series, rest, constants(1.0 / math.factorial(power)))
        exponent = builder.shl(builder.bitcast(rounded, INTS), _integers([23] * LANES))
        scaled = builder.bitcast(builder.add(builder.bitcast(series, INTS), exponent), FLOATS)
        scaled = builder.select(too_large, constants(math.inf), scaled)
        return builder.select(too_small, constants(0.0), scaled)

    return vector(vector), emit
