"""Arithmetic of one lane that NumPy has no operator for, on arrays of lanes; integers wrap as in hardware.

Subnormal numbers are kept where `.ftz` would flush them, and ex2, lg2, rcp, tanh and div.full are NumPy's, which are
nearer to the exact value than the hardware's approximations.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c of float32 through float64, where the product is exact."""
    return (a.astype(np.float64) * b.astype(np.float64) + c).astype(np.float32)


def stack(count: int, registers: list[np.ndarray]) -> np.ndarray:
    """Registers of `count` lanes as rows of a matrix."""
    rows = np.empty((len(registers), count), np.float32)
    for row, register in zip(rows, registers, strict=True):
        row[:] = register
    return rows


def dot(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """A chain of fma over the rows of two stacks, added to c at the end."""
    return np.einsum("kl,kl->l", a, b) + c


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 rounded to nearest even bfloat16, its bits in uint32."""
    bits = x.view(U32)
    rounded = (bits + U32(0x7FFF) + (bits >> U32(16) & U32(1))) >> U32(16)
    unordered = np.isnan(x)
    return np.where(unordered, U32(0x7FFF), rounded) if unordered.any() else rounded


def to_f16(x: np.ndarray) -> np.ndarray:
    """float32 rounded to nearest even float16, its bits in uint32."""
    return x.astype(np.float16).view(U16).astype(U32)


def half(pair: np.ndarray, k: int) -> np.ndarray:
    """The lower (0) or upper (1) float16 of a register of two."""
    return (pair >> U32(16 * k)).astype(U16).view(np.float16)


def half2(operation: Callable, *pairs: np.ndarray) -> np.ndarray:
    """`operation` on both float16 of registers of two, each result rounded once."""
    low, high = (operation(*(half(pair, k) for pair in pairs)).view(U16).astype(U32) for k in (0, 1))
    return low | high << U32(16)


def float8_to_f16(pair: np.ndarray, exponent_bits: int) -> np.ndarray:
    """Two float8 in 16 bits, e4m3 or e5m2 by their exponent bits, as two float16 in 32."""
    table = _FLOAT8[exponent_bits].view(U16).astype(U32)
    return table[pair & U16(255)] | table[pair >> U16(8)] << U32(16)


def _float8_values(exponent_bits: int) -> np.ndarray:
    """The number of each of 256 codes by the definition: e4m3 has one NaN and no infinity, e5m2 both as in IEEE 754."""
    mantissa_bits, bias = 7 - exponent_bits, 2 ** (exponent_bits - 1) - 1
    values = np.zeros(256, np.float16)
    for code in range(256):
        exponent, mantissa = code >> mantissa_bits & 2**exponent_bits - 1, code & 2**mantissa_bits - 1
        fraction = mantissa / 2**mantissa_bits
        value = (1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias)
        if exponent == 2**exponent_bits - 1 and (exponent_bits == 5 or mantissa == 7):
            value = np.nan if mantissa else np.inf
        values[code] = -value if code & 128 else value
    return values


_FLOAT8 = {exponent_bits: _float8_values(exponent_bits) for exponent_bits in (4, 5)}


def _divisor(b: np.ndarray) -> np.ndarray:
    return np.where(b == 0, b.dtype.type(1), b)


def quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Integer division towards zero; by 0 the result is unspecified, as in hardware."""
    b = _divisor(b)
    if a.dtype.kind == "u":
        return a // b
    down = a // b
    return down + ((down * b != a) & ((a < 0) != (b < 0))).astype(a.dtype)


def remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a - quotient(a, b) * _divisor(b)


def shift_left(a: np.ndarray, by: np.ndarray, bits: int) -> np.ndarray:
    """Shifts of `bits` and more give 0."""
    shifted = a << np.minimum(by, U32(bits - 1)).astype(a.dtype)
    return np.where(by >= bits, a.dtype.type(0), shifted)


def shift_right(a: np.ndarray, by: np.ndarray, bits: int) -> np.ndarray:
    """Shifts of `bits` and more give 0, or the sign of a signed number."""
    shifted = a >> np.minimum(by, U32(bits - 1)).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(by >= bits, a.dtype.type(0), shifted)


def extract(a: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """bfe: a field of bits, extended by its sign if a is signed."""
    bits = a.dtype.itemsize * 8
    start, length = (np.minimum(x & U32(255), U32(bits)) for x in (start, length))
    if a.dtype.kind == "u":
        mask = np.where(length == 64, U64(2**64 - 1), (U64(1) << np.minimum(length, U32(63)).astype(U64)) - U64(1))
        return (shift_right(a.astype(U64), start, 64) & mask).astype(a.dtype)
    # past its end the field repeats the sign bit of a
    end = np.minimum(start + length, U32(bits))
    field = shift_right(shift_left(a, U32(bits) - end, bits), U32(bits) - end + start, bits)
    return np.where(length == 0, a.dtype.type(0), field)


def high_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper half of the product of 32-bit integers, or of unsigned 64-bit ones."""
    if a.dtype.itemsize == 4:
        wide = np.int64 if a.dtype.kind == "i" else U64
        return (a.astype(wide) * b.astype(wide) >> wide(32)).astype(a.dtype)
    half, low = U64(32), U64(0xFFFFFFFF)
    a_low, a_high, b_low, b_high = a & low, a >> half, b & low, b >> half
    middle = a_high * b_low + (a_low * b_low >> half)
    other = a_low * b_high + (middle & low)
    return a_high * b_high + (middle >> half) + (other >> half)


def permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """prmt: four bytes picked from the eight of a and b, each perhaps replaced by its sign."""
    a, b, selector = np.broadcast_arrays(a, b, selector)
    pool = a.astype(U64) | b.astype(U64) << U64(32)
    result = np.zeros_like(a)
    for k in range(4):
        pick = selector >> U32(4 * k) & U32(15)
        byte = (pool >> (pick & U32(7)).astype(U64) * U64(8)).astype(U32) & U32(255)
        sign = np.where(byte & U32(128), U32(255), U32(0))
        result |= np.where(pick & U32(8), sign, byte) << U32(8 * k)
    return result


def logic(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """lop3: any function of three bits, bit 4 a + 2 b + c of `table`."""
    result = a & b & c & U32(0)
    for k in range(8):
        if table >> k & 1:
            result = result | (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
    return result


def funnel(low: np.ndarray, high: np.ndarray, by: np.ndarray, left: bool, wrap: bool) -> np.ndarray:
    """shf: 32 bits of the 64 in (high, low), shifted by up to 32 places."""
    by = (by & U32(31) if wrap else np.minimum(by, U32(32))).astype(U64)
    both = high.astype(U64) << U64(32) | low.astype(U64)
    return ((both << by >> U64(32)) if left else both >> by).astype(U32)
