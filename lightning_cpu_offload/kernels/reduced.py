"""Adam's step with moments in BF16 or in 8 bits: 20 or 16 bytes of memory traffic a parameter in place of 28.

Moments are widened to float32, take the step that `kernels.adamw` takes but for the last bit of its root, and are
rounded as `dither` has it. The weights stay in float32 and see the moments before they are rounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .arithmetic import descend_by_products, moments
from .bfloat16 import read, widen, write
from .dither import dither, to_bfloat16
from .float8 import BLOCK, decode_block, encode_block, largest_exponent
from .intrinsics import fetch_add, itemsize, prefetch
from .jit import inlined, kernel

__all__ = ["SHARE", "decode_float8", "encode_float8", "update_bfloat16", "update_float8"]

SHARE = 1 << 16
"""Elements a thread takes at a time: whole blocks."""

AHEAD = np.uint64(4 * BLOCK)
"""How far ahead to prefetch, as in `adamw`."""

LINE_BYTES = 64
_SHIFT = np.uint32(16)
_SECOND, _SECOND_MASK = np.uint32(4), np.uint32(0xFFFF)


@inlined
def _prefetch_block(array: Any, block: Any) -> None:
    """Prefetch the block `AHEAD` of the one that begins at `block`, if all of it is inside the array."""
    first = np.uint64(block) + AHEAD
    if first + np.uint64(BLOCK) <= np.uint64(array.size):
        for i in range(first, first + np.uint64(BLOCK), np.uint64(LINE_BYTES // itemsize(array))):
            prefetch(array, i)


@kernel
def update_bfloat16(
    param: Any,
    gradient: Any,
    weight: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    first: Any,
    start: Any,
    c: Any,
    next_share: Any,
) -> None:
    """Update shares of arrays of equal length until none is left.

    `first` is the place of their first element among the dithers, `start` the dithers' origin at this step. What
    is None means what it means in `adamw`.
    """
    while True:
        share = fetch_add(next_share, SHARE)
        if share >= param.size:
            return
        stop = min(share + SHARE, param.size)
        for block in range(share, stop, BLOCK):
            _prefetch_block(param, block)
            _prefetch_block(gradient, block)
            _prefetch_block(exp_avg, block)
            _prefetch_block(exp_avg_sq, block)
            for i in range(np.uint64(block), np.uint64(min(block + BLOCK, stop))):
                w, m, v = moments(param[i], read(gradient, i), widen(exp_avg[i]), widen(exp_avg_sq[i]), c)
                w = descend_by_products(w, m, v, c)
                param[i] = w
                fraction = dither(i + first, start)
                exp_avg[i] = to_bfloat16(m, np.uint32(fraction >> _SHIFT))
                exp_avg_sq[i] = to_bfloat16(v, np.uint32(np.uint32(fraction >> _SECOND) & _SECOND_MASK))
                if weight is None:
                    write(gradient, i, w)
                else:
                    write(weight, i, w)


@kernel
def update_float8(
    param: Any,
    gradient: Any,
    weight: Any,
    m_codes: Any,
    m_exponents: Any,
    v_codes: Any,
    v_exponents: Any,
    first: Any,
    start: Any,
    c: Any,
    next_share: Any,
) -> None:
    """As `update_bfloat16`, for `param` and its like over the places from `first` on of the codes' arrays.

    A block of which only a part is stepped is decoded and encoded whole; the rest of it keeps its values, unless
    the exponent rises so far that they fall below its range.
    """
    end = first + param.size
    ms, vs = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    while True:
        share = fetch_add(next_share, SHARE)
        if share >= end:
            return
        for block in range(max(share, first // BLOCK * BLOCK), min(share + SHARE, end), BLOCK):
            _prefetch_block(m_codes, block)
            _prefetch_block(v_codes, block)
            begin, stop = max(block, first), min(block + BLOCK, end)
            _prefetch_block(param, begin - first)
            _prefetch_block(gradient, begin - first)
            number, base = block // BLOCK, np.uint64(block)
            size = np.uint64(min(BLOCK, m_codes.size - block))
            decode_block(m_codes, base, size, np.uint32(m_exponents[number]), True, ms)
            decode_block(v_codes, base, size, np.uint32(v_exponents[number]), False, vs)
            inside, outside = np.uint64(begin - block), np.uint64(begin - first)
            for k in range(np.uint64(stop - begin)):
                i, j = outside + k, inside + k
                w, m, v = moments(param[i], read(gradient, i), ms[j], vs[j], c)
                w = descend_by_products(w, m, v, c)
                param[i], ms[j], vs[j] = w, m, v
                if weight is None:
                    write(gradient, i, w)
                else:
                    write(weight, i, w)
            _encode(ms, size, True, start, m_codes, base, m_exponents, number)
            _encode(vs, size, False, start, v_codes, base, v_exponents, number)


@inlined
def _encode(
    values: Any, size: Any, signed: Any, start: Any, codes: Any, base: Any, exponents: Any, number: Any
) -> None:
    exponent = largest_exponent(values, size)
    exponents[number] = exponent
    encode_block(values, size, exponent, signed, start, codes, base)


@kernel
def encode_float8(new: Any, first: Any, signed: Any, start: Any, codes: Any, exponents: Any) -> None:
    """Put the float32 numbers `new` at the places from `first` on."""
    values = np.empty(BLOCK, np.float32)
    for block in range(first // BLOCK * BLOCK, first + new.size, BLOCK):
        number, base = block // BLOCK, np.uint64(block)
        size = np.uint64(min(BLOCK, codes.size - block))
        decode_block(codes, base, size, np.uint32(exponents[number]), signed, values)
        for i in range(max(block, first), min(block + BLOCK, first + new.size)):
            values[i - block] = new[i - first]
        _encode(values, size, signed, start, codes, base, exponents, number)


@kernel
def decode_float8(out: Any, first: Any, signed: Any, codes: Any, exponents: Any) -> None:
    """Fill `out` with the float32 numbers at the places from `first` on."""
    values = np.empty(BLOCK, np.float32)
    for block in range(first // BLOCK * BLOCK, first + out.size, BLOCK):
        number = block // BLOCK
        size = np.uint64(min(BLOCK, codes.size - block))
        decode_block(codes, np.uint64(block), size, np.uint32(exponents[number]), signed, values)
        for i in range(max(block, first), min(block + BLOCK, first + out.size)):
            out[i - first] = values[i - block]
