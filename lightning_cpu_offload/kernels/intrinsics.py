"""What the kernels need from the processor and Python has no word for.

numba notices a change of the file that holds a cached kernel, not of files the kernel calls into: after editing
this file or `bfloat16.py`, remove the `__pycache__` folder beside it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["fetch_add", "float_from_bits", "float_to_bits", "itemsize", "prefetch"]

_INT32 = ir.IntType(32)


@intrinsic
def float_from_bits(typing_context: Any, bits: Any) -> Any:
    """Return the float32 whose representation is the uint32 `bits`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic
def float_to_bits(typing_context: Any, value: Any) -> Any:
    """Return the representation of the float32 `value` as a uint32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _INT32)

    return types.uint32(types.float32), codegen


@intrinsic
def itemsize(typing_context: Any, array: Any) -> Any:
    """Return the bytes of an element of `array`: a constant to the compiler, which `array.itemsize` is not."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(types.intp, array.dtype.bitwidth // 8)

    return types.intp(array), codegen


@intrinsic
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of `array[index]`, an index inside the array; only a hint."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array_type = signature.args[0]
        struct = context.make_array(array_type)(context, builder, args[0])
        item = cgutils.get_item_pointer(context, builder, array_type, struct, [args[1]], wraparound=False)
        pointer = builder.bitcast(item, cgutils.voidptr_t)
        parameters = [cgutils.voidptr_t, _INT32, _INT32, _INT32]
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [cgutils.voidptr_t], ir.FunctionType(ir.VoidType(), parameters)
        )
        read, keep_in_all_caches, data = _INT32(0), _INT32(3), _INT32(1)
        builder.call(function, [pointer, read, keep_in_all_caches, data])
        return context.get_dummy_value()

    return types.void(array, types.uint64), codegen


@intrinsic
def fetch_add(typing_context: Any, counter: Any, amount: Any) -> Any:
    """Add `amount` to the one element of the int64 array `counter` and return what it was, atomically."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        struct = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", struct.data, args[1], "monotonic")

    return types.int64(counter, types.int64), codegen
