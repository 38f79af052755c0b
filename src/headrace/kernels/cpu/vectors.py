"""SIMD vectors of float32 for numba: a register type and the instructions that the kernels use.

A `Vector` is one hardware register of LANES floats. LANES follows the machine, and numba's cache is keyed by it too.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8

Vector: TypeAlias = Any  # a register inside a kernel, as mypy sees it

_FLOAT = ir.FloatType()
_INT = ir.IntType(32)
_FLOATS = ir.VectorType(_FLOAT, LANES)
_INTS = ir.VectorType(_INT, LANES)


class VectorType(types.Type):
    def __init__(self) -> None:
        super().__init__(name=f"float32x{LANES}")


vector = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, _FLOATS)


def _constants(value: float) -> ir.Constant:
    return ir.Constant(_FLOATS, [value] * LANES)


def _integers(values: list[int]) -> ir.Constant:
    return ir.Constant(_INTS, values)


def _splat(builder: ir.IRBuilder, value: ir.Value, of: ir.VectorType) -> ir.Value:
    one = builder.insert_element(ir.Constant(of, ir.Undefined), value, _INT(0))
    return builder.shuffle_vector(one, ir.Constant(of, ir.Undefined), _integers([0] * LANES))


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value, flags: tuple[str, ...] = ()) -> ir.Value:
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    function = cgutils.get_or_insert_function(builder.module, function_type, f"{name}.v{LANES}f32")
    return builder.call(function, args, fastmath=flags)


def _fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return _call(builder, "llvm.fmuladd", _FLOATS, a, b, c)


def _vector_pointer(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value) -> ir.Value:
    return builder.bitcast(builder.gep(pointer, [index]), _FLOATS.as_pointer())


@intrinsic
def load(typing: Any, pointer: Any, index: Any) -> Any:
    """Loads LANES floats from pointer[index] on; any alignment."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_vector_pointer(builder, *args), align=4)

    return vector(types.CPointer(types.float32), types.intp), emit


@intrinsic
def store(typing: Any, pointer: Any, index: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _vector_pointer(builder, args[0], args[1]), align=4)
        return context.get_dummy_value()

    return types.void(types.CPointer(types.float32), types.intp, vector), emit


@intrinsic
def prefetch(typing: Any, pointer: Any, index: Any) -> Any:
    """Prefetches the cache line of pointer[index]; any address is allowed."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = builder.bitcast(builder.gep(args[0], [args[1]]), ir.IntType(8).as_pointer())
        function_type = ir.FunctionType(ir.VoidType(), [address.type, _INT, _INT, _INT])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        builder.call(function, [address, _INT(0), _INT(3), _INT(1)])
        return context.get_dummy_value()

    return types.void(types.CPointer(types.float32), types.intp), emit


@intrinsic
def splat(typing: Any, value: Any) -> Any:
    """Returns the same number in every lane."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _splat(builder, args[0], _FLOATS)

    return vector(types.float32), emit


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Returns a * b + c."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _fma(builder, *args)

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
def lanes_from(typing: Any, first: Any) -> Any:
    """Returns first, first + 1, ... as floats."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        firsts = _splat(builder, builder.trunc(args[0], _INT), _INTS)
        return builder.sitofp(builder.add(firsts, _integers(list(range(LANES)))), _FLOATS)

    return vector(types.intp), emit


@intrinsic
def only_lanes(typing: Any, value: Any, begin: Any, end: Any, other: Any) -> Any:
    """Returns `value` in lanes begin..end-1, and the number `other` in the rest, whatever they held (NaN too)."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, begin, end, other = args
        lanes = _integers(list(range(LANES)))
        begins, ends = (_splat(builder, builder.trunc(edge, _INT), _INTS) for edge in (begin, end))
        inside = builder.and_(builder.icmp_signed(">=", lanes, begins), builder.icmp_signed("<", lanes, ends))
        return builder.select(inside, value, _splat(builder, other, _FLOATS))

    return vector(vector, types.intp, types.intp, types.float32), emit


@intrinsic
def largest(typing: Any, value: Any) -> Any:
    """Returns the largest lane; NaN only if all are."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, "llvm.vector.reduce.fmax", _FLOAT, args[0])

    return types.float32(vector), emit


@intrinsic
def total(typing: Any, value: Any) -> Any:
    """Returns the sum of the lanes."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, "llvm.vector.reduce.fadd", _FLOAT, _FLOAT(0.0), args[0], flags=("reassoc",))

    return types.float32(vector), emit


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
        too_small = builder.fcmp_ordered("<", x, _constants(_SMALLEST))
        too_large = builder.fcmp_ordered(">", x, _constants(_LARGEST))
        rounded = _fma(builder, x, _constants(1.0 / math.log(2.0)), _constants(_ROUNDER))
        n = builder.fsub(rounded, _constants(_ROUNDER))
        rest = _fma(builder, n, _constants(-_LN2_HIGH), x)
        rest = _fma(builder, n, _constants(-_LN2_LOW), rest)
        series = _constants(1.0 / math.factorial(7))
        for power in range(6, -1, -1):
            series = _fma(builder, series, rest, _constants(1.0 / math.factorial(power)))
        exponent = builder.shl(builder.bitcast(rounded, _INTS), _integers([23] * LANES))
        scaled = builder.bitcast(builder.add(builder.bitcast(series, _INTS), exponent), _FLOATS)
        scaled = builder.select(too_large, _constants(math.inf), scaled)
        return builder.select(too_small, _constants(0.0), scaled)

    return vector(vector), emit
