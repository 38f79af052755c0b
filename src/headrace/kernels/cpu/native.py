"""What compiled kernels do below numba: typed pointers, atomic steps on shared words, and calls of addresses."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])
Pointer: TypeAlias = Any  # a flat array without bounds, as mypy sees it inside a kernel

# Sums may be reordered and fused; infinities and NaN keep their meaning.
_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
OPTIONS: dict[str, Any] = {"error_model": "numpy", "fastmath": _FASTMATH}
_IS_X86 = platform.machine() in ("x86_64", "AMD64")
_PAUSE = "llvm.x86.sse2.pause"
_WORD = ir.IntType(64)


def inner(function: F) -> F:
    """Compiles a function that kernels call."""
    compiled: F = njit(**OPTIONS)(function)
    return compiled


def _pointer_to(element: Any) -> Any:
    """Returns an intrinsic that turns an address into a typed pointer."""

    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        result = types.CPointer(element)

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(result))

        return result(types.intp), emit

    return pointer


floats = _pointer_to(types.float32)
int32s = _pointer_to(types.int32)
int64s = _pointer_to(types.int64)
uint8s = _pointer_to(types.uint8)
uint16s = _pointer_to(types.uint16)


@intrinsic
def after(typing: Any, pointer: Any, distance: Any) -> Any:
    """Returns the pointer to pointer[distance]."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    return pointer(pointer, types.intp), emit


@intrinsic
def address_of(typing: Any, pointer: Any, distance: Any) -> Any:
    """Returns the address of pointer[distance]."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(builder.gep(args[0], [args[1]]), _WORD)

    return types.intp(pointer, types.intp), emit


@intrinsic
def fetch_add(typing: Any, word: Any, amount: Any) -> Any:
    """Adds to a word and returns what was there before. What this thread wrote is seen by whoever sees the new one."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        pointer = builder.bitcast(args[0], _WORD.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(word, types.int64), emit


@intrinsic
def exchange(typing: Any, word: Any, value: Any) -> Any:
    """Stores a value and returns what was there before. Reads after it see what others wrote before their own steps."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("xchg", args[0], args[1], "seq_cst")

    return types.int64(word, types.int64), emit


@intrinsic
def replaced(typing: Any, word: Any, expected: Any, value: Any) -> Any:
    """Stores a value if the word is as expected; returns whether it was."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        result = builder.cmpxchg(args[0], args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(result, 1)

    return types.boolean(word, types.int64, types.int64), emit


@intrinsic
def look_at(typing: Any, word: Any) -> Any:
    """Reads a word, and all that was written before it was."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.load_atomic(args[0], "acquire", 8)

    return types.int64(word), emit


@intrinsic
def pause(typing: Any) -> Any:
    """Tells the core that this thread only waits."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        if _IS_X86:
            function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), []), _PAUSE)
            builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def call_kernel(typing: Any, entry: Any, arguments: Any) -> Any:
    """Calls the kernel at an address."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [_WORD])
        builder.call(builder.inttoptr(args[0], function.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def call_c(typing: Any, address: Any) -> Any:
    """Calls the C function without arguments at an address, which returns an int."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.IntType(32), [])
        return builder.sext(builder.call(builder.inttoptr(args[0], function.as_pointer()), []), _WORD)

    return types.int64(types.int64), emit


@intrinsic
def system_call(typing: Any, syscall: Any, number: Any, first: Any, second: Any, third: Any) -> Any:
    """Calls C's `syscall` at an address, with no further arguments than three."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(_WORD, [_WORD], var_arg=True)
        zero = _WORD(0)
        return builder.call(builder.inttoptr(args[0], function.as_pointer()), [*args[1:], zero, zero, zero])

    return types.int64(types.int64, types.int64, types.int64, types.int64, types.int64), emit
