"""What lanes of a warp do together: shuffles, reductions, and matrix products, whose operands lie across registers.

A warp's m16n8k16 product keeps A, B and the accumulator in fragments: lane 4 r + q holds columns 2 q and 2 q + 1 of row
r of every 8 x 8 tile. Operands are gathered into matrices once, multiplied in float32, and taken apart when a register
is asked for. Accumulators are kept transposed, for B's fragments are rows of B transposed. The order of additions is
that of NumPy's matrix product, not of a tensor core: results are right to a tolerance, not to the bit.
"""

from __future__ import annotations

import numpy as np

from cascade_lab.evidence.ptx.faults import Divergence
from cascade_lab.evidence.ptx.lanes import WARP, Lanes

_HIGH = np.uint32(0xFFFF0000)


def shuffle(lanes: Lanes, index: int, mode: str, values, distance, clamp, mask) -> tuple[np.ndarray, np.ndarray]:
    """shfl.sync: the value of another lane of the warp, and whether that lane exists in the segment."""
    lanes.require_whole(index, mask)
    lane = lanes.every % WARP
    distance, clamp = (lanes.spread(x).astype(np.int64) for x in (distance, clamp))
    segment, limit = clamp >> 8 & 31, clamp & 31
    low = lane & segment
    last = low | limit & ~segment
    other = {
        "bfly": lane ^ distance,
        "idx": low | distance & ~segment & 31,
        "up": lane - distance,
        "down": lane + distance,
    }
    source = other[mode]
    found = source >= last if mode == "up" else source <= last
    source = np.where(found, source, lane)
    return lanes.spread(values)[lanes.every - lane + source], found


_REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def reduce(lanes: Lanes, index: int, operation: str, values, members, mask) -> np.ndarray:
    """redux.sync: one number of all lanes that `members` names to each of them; they name each other, and take part."""
    every = np.arange(WARP)
    values = lanes.spread(values).reshape(-1, WARP)
    members = lanes.spread(members).view(np.uint32).reshape(-1, WARP)
    taking = np.ones_like(members, bool) if mask is None else lanes.spread(mask).reshape(-1, WARP)
    # [warps, lanes, lanes]: whether a lane, the second, is named by another, the first
    named = (members[:, :, None] >> every.astype(np.uint32) & 1).astype(bool)
    agreed = named[:, every, every] & (~named | (taking[:, None] & (members[:, None] == members[:, :, None]))).all(2)
    if not agreed[taking].all():
        lanes.fault(Divergence, index, "reached by other threads than those that it names")
    number = np.iinfo(values.dtype)
    nothing = {"min": number.max, "max": number.min, "and": values.dtype.type(0) - 1 if number.min else number.max}
    parts = np.where(named, values[:, None], values.dtype.type(nothing.get(operation, 0)))
    return _REDUCTIONS[operation].reduce(parts, axis=2, dtype=values.dtype).ravel()


def _floats(words: np.ndarray, kind: str) -> np.ndarray:
    """Pairs of halves in 32-bit words, [..., n], as float32 [..., 2 n]."""
    if kind == "f16":
        return words.view(np.float16).astype(np.float32)
    wide = np.empty((*words.shape, 2), np.uint32)
    np.left_shift(words, np.uint32(16), out=wide[..., 0])
    np.bitwise_and(words, _HIGH, out=wide[..., 1])
    return wide.reshape(*words.shape[:-1], -1).view(np.float32)


def halves(bits: np.ndarray, kind: str) -> np.ndarray:
    """16-bit numbers, given by their bits, as float32."""
    if kind == "f16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _tiles(lanes: Lanes, registers: list[np.ndarray]) -> list[np.ndarray]:
    """Registers as [warps, 8, 4]."""
    return [lanes.spread(register).reshape(-1, 8, 4) for register in registers]


def _rows(lanes: Lanes, registers: list[np.ndarray], kind: str) -> np.ndarray:
    """A's four registers as [warps, 16 rows, 16 columns]: upper left, lower left, upper right, lower right."""
    words = np.empty((lanes.warps, 2, 8, 2, 4), np.uint32)
    for k, tile in enumerate(_tiles(lanes, registers)):
        words[:, k % 2, :, k // 2] = tile
    return _floats(words.reshape(-1, 16, 8), kind)


def operand_a(lanes: Lanes, registers: list[np.ndarray], kind: str) -> np.ndarray:
    """A transposed, [warps, 16 columns, 16 rows]."""
    return np.ascontiguousarray(_rows(lanes, registers, kind).swapaxes(1, 2))


def operand_b(lanes: Lanes, registers: list[np.ndarray], kind: str) -> np.ndarray:
    """B transposed, [warps, 8 columns, 16 rows], from two registers."""
    return _floats(np.concatenate(_tiles(lanes, registers), 2), kind)


def accumulator(lanes: Lanes, registers: list[np.ndarray]) -> np.ndarray:
    """Four float32 registers as the product's transpose, [warps, 8 columns, 16 rows]."""
    tile = np.empty((lanes.warps, 4, 2, 2, 8), np.float32)
    for k, part in enumerate(_tiles(lanes, registers)):
        tile[:, :, k % 2, k // 2] = part.swapaxes(1, 2)
    return tile.reshape(-1, 8, 16)


def accumulated(tile: np.ndarray, k: int) -> np.ndarray:
    """Register k of an accumulator."""
    return tile.reshape(-1, 4, 2, 2, 8)[:, :, k % 2, k // 2].swapaxes(1, 2).ravel()


def multiply(lanes: Lanes, index: int, a: np.ndarray, b: np.ndarray, c: np.ndarray, mask) -> np.ndarray:
    """mma.sync on gathered operands: (A B + C) transposed."""
    lanes.require_whole(index, mask)
    product = b @ a
    product += c
    return product


def group_operand(lanes: Lanes, registers: list[np.ndarray], kind: str) -> np.ndarray:
    """A of a warp group, [warp groups, 64 rows, 16 columns]: 16 rows a warp."""
    return _rows(lanes, registers, kind).reshape(-1, 64, 16)


def group_accumulator(lanes: Lanes, registers: list[np.ndarray]) -> np.ndarray:
    """A warp group's accumulator, [warp groups, 64 rows, 2 columns per register]."""
    tile = np.empty((lanes.warps, 2, 8, len(registers) // 4, 4, 2), np.float32)
    for k, part in enumerate(_tiles(lanes, registers)):
        tile[:, k // 2 % 2, :, k // 4, :, k % 2] = part
    return tile.reshape(-1, 64, 2 * len(registers))


def group_accumulated(tile: np.ndarray, k: int) -> np.ndarray:
    """Register k of a warp group's accumulator."""
    return tile.reshape(-1, 2, 8, tile.shape[2] // 8, 4, 2)[:, k // 2 % 2, :, k // 4, :, k % 2].ravel()


def group_multiply(a: np.ndarray, b: np.ndarray, c: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """wgmma on gathered operands: A B, plus C in the groups where `keep` is true."""
    product = a @ b
    if keep.all():
        product += c
    elif keep.any():
        product += np.where(keep[::128, None, None], c, np.float32(0))
    return product
