"""Launch parameters, from static shapes only: tiles per head dim, rows and target, and the number of KV splits.

Rows are query rows times the GQA group (they share a KV head, so they share its tiles). A tile has to fit the shared
memory that a block may have: of a row's candidates the first that does is taken, by an upper bound from block sizes
alone. Nothing here reads device memory or measures, so a launch can be captured in a CUDA graph and is the same on
every machine of a kind. `cascade_lab.evidence.compiled` compiles and inspects the rows for every target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

TARGETS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942")


@dataclass(frozen=True)
class Tile:
    """One program's share: block_m packed rows against block_n keys at a time, tail_n where keys are masked.

    Five stages put two tiles of keys in flight, for the page id has a stage of its own.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int = 5
    tail_n: int = 0
    max_registers: int | None = None

    def __post_init__(self):
        if self.tail_n == 0:
            object.__setattr__(self, "tail_n", self.block_n)


# half precision: largest head dim -> tiles from few rows to many
_TILES = {
    64: (Tile(16, 64, 4), Tile(32, 64, 4), Tile(64, 128, 4, tail_n=64), Tile(128, 128, 8, tail_n=64)),
    128: (Tile(16, 64, 4), Tile(32, 64, 4), Tile(64, 64, 4), Tile(128, 128, 8, tail_n=64)),
    256: (Tile(16, 64, 8), Tile(32, 32, 4, max_registers=255), Tile(64, 32, 8, tail_n=16)),
    1024: (Tile(16, 32, 4), Tile(32, 32, 8)),
}
# where a target needs other tiles: one stage, many warps and few rows on sm_75, for which Triton has no asynchronous
# copies and no tensor cores; few registers on sm_80 and its kin, and room for two programs; 64 KiB of shared memory on
# gfx942; a register limit of its own where the assembler would spill to fit one more program
_EXCEPTIONS: dict[tuple[str, int], tuple[Tile, ...]] = {
    ("sm_75", 64): (Tile(16, 32, 4, 1), Tile(32, 32, 8, 1), Tile(64, 32, 8, 1), Tile(128, 16, 16, 1)),
    ("sm_75", 128): (Tile(16, 32, 8, 1), Tile(32, 32, 8, 1), Tile(64, 16, 16, 1)),
    ("sm_75", 256): (Tile(16, 16, 8, 1), Tile(32, 16, 16, 1)),
    ("sm_75", 1024): (Tile(8, 16, 8, 1),),
    ("sm_80", 64): (
        Tile(16, 64, 4, tail_n=32),
        Tile(32, 64, 4),
        Tile(64, 128, 4, tail_n=64),
        Tile(128, 64, 4, tail_n=32),
    ),
    ("sm_80", 128): (*_TILES[128][:2], Tile(64, 64, 8), Tile(128, 64, 8, tail_n=32)),
    ("sm_86", 64): (*_TILES[64][:2], Tile(64, 64, 4, max_registers=255), _TILES[64][3]),
    ("sm_120", 128): (*_TILES[128][:2], Tile(64, 64, 8), Tile(128, 32, 8, tail_n=16)),
    ("gfx942", 64): tuple(Tile(m, 64, 4, 2) for m in (16, 32, 64, 128)),
    ("gfx942", 128): tuple(Tile(m, 32, 4, 2) for m in (16, 32, 64, 128)),
    ("gfx942", 256): tuple(Tile(m, 16, 4, 2) for m in (16, 32, 64)),
    ("gfx942", 1024): tuple(Tile(m, 16, 4, 1) for m in (16, 32)),
}
_EXCEPTIONS["sm_86", 128] = _EXCEPTIONS["sm_80", 128]
_EXCEPTIONS["sm_120", 64] = _EXCEPTIONS["sm_86", 64]
# float32 on NVIDIA, without tensor cores: one stage, so that a thread holds few keys, and many warps, so that it holds
# few rows
_FULL_TILES = {
    32: (Tile(16, 32, 4, 2), *(Tile(m, 32, 8, 1, max_registers=255) for m in (32, 64, 128))),
    64: (
        Tile(16, 32, 4, 2),
        Tile(32, 32, 8, 1, max_registers=255),
        Tile(64, 32, 16, 1, max_registers=128),
        Tile(128, 16, 16, 1, max_registers=128),
    ),
    128: (*(Tile(m, 16, 8, 1, max_registers=255) for m in (16, 32)), Tile(64, 16, 16, 1)),
    256: (Tile(16, 16, 8, 1, max_registers=255), *(Tile(m, 16, 16, 1) for m in (32, 64))),
    1024: tuple(Tile(m, 16, 8, 1, max_registers=255) for m in (16, 32)),
}
# (largest head dim, block_m) -> the tile to take where the row's own does not fit
_SMALLER = {
    (256, 16): Tile(16, 32, 4, tail_n=16),
    (256, 64): Tile(64, 32, 8, 3, tail_n=16),
    (1024, 32): Tile(32, 16, 8),
}
# least number of a device -> whose rows it takes
_GENERATIONS = ((120, "sm_120"), (100, "sm_100"), (90, "sm_90"), (81, "sm_86"), (80, "sm_80"))
MAX_HEAD_DIM = max(_TILES)
"""The largest D and D_v that kernels of attention have tiles for."""
# reductions across warps and barriers: 256 bytes on most targets, 544 on sm_100
_SCRATCH_BYTES = 1024


def rows_of(name: str) -> str:
    """The one of TARGETS whose rows a device of that name takes."""
    if not name.startswith("sm_"):
        return "gfx942"
    number = int(name.removeprefix("sm_"))
    return next((target for least, target in _GENERATIONS if number >= least), "sm_75")


def converts_float8(name: str) -> bool:
    """Whether a device of that name has instructions from float8 to float16: NVIDIA's from Ada Lovelace on."""
    return name.startswith("sm_") and int(name.removeprefix("sm_")) >= 89


def tiles(target: str, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tile, ...]:
    """The table's rows: tiles of rising block_m.

    Args:
        target: one of TARGETS.
        head_dim: the larger of D and D_v, up to 1024.
        dtype: dtype of q, k and v.
    """
    full, limit = dtype == torch.float32, _row_limit(_TILES, head_dim)
    if full and target != "gfx942" and (target, limit) != ("sm_75", 1024):
        return _FULL_TILES[_row_limit(_FULL_TILES, head_dim)]
    rows = _EXCEPTIONS.get((target, limit), _TILES[limit])
    return tuple(replace(tile, block_n=32, tail_n=32) if full and tile.block_n > 32 else tile for tile in rows)


def _row_limit(table: dict[int, tuple[Tile, ...]], head_dim: int) -> int:
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim: expected at most {MAX_HEAD_DIM}, given {head_dim}")
    return next(limit for limit in table if head_dim <= limit)


def tile_for(
    rows: int,
    head_dim: int,
    dtype: torch.dtype,
    target: str = "sm_90",
    shared_bytes: int | None = None,
    head_dim_v: int | None = None,
    latent: bool = False,
) -> Tile:
    """The tile for launches whose longest request has `rows` packed rows: the smallest that holds them, or the largest.

    Where the table's tile does not fit the shared memory, the row's smaller tile is tried, then fewer stages, then
    fewer keys, and only then tiles of fewer rows. What a launch loads depends on block_m alone, which is the same on
    every target but in two cases: sm_75 has at most 64 rows of head dims above 64, 32 above 128 and 8 above 256, and
    float32 has fewer rows where the shared memory does not hold the table's.

    Args:
        rows: max_seqlen_q * (H_q / H_kv).
        head_dim: D, or the larger of D and D_v where `head_dim_v` is left out.
        dtype: dtype of q, k and v; float32, there for checking, has rows of its own, of at most 64 above D = 64.
        target: one of TARGETS.
        shared_bytes: shared memory that a block may opt in to; without it, as in the interpreter, there is no limit.
        head_dim_v: D_v; `head_dim` where left out.
        latent: V is a view of K's first columns.

    Raises:
        TypeError: bfloat16 on sm_75, which has no instructions for it.
        ValueError: a head dim above MAX_HEAD_DIM, or no tile fits; need and limit are in the message.
    """
    if target == "sm_75" and dtype == torch.bfloat16:
        raise TypeError("dtype of q: expected float16 or float32 on sm_75, which has no bfloat16, given bfloat16")
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    largest = max(head_dim, head_dim_v)
    table = tiles(target, largest, dtype)
    least = next((tile.block_m for tile in table if rows <= tile.block_m), table[-1].block_m)
    needs = []
    for tile in reversed([tile for tile in table if tile.block_m <= least]):
        smaller = None if dtype == torch.float32 else _SMALLER.get((_row_limit(_TILES, largest), tile.block_m))
        for one in _candidates(tile, smaller):
            if shared_bytes is None:
                return one
            needs.append(shared_need(one, dtype, target, head_dim, head_dim_v, latent))
            if needs[-1] <= shared_bytes:
                return one
    raise ValueError(
        f"head_dim: expected a tile of {str(dtype).removeprefix('torch.')} that fits the {shared_bytes} bytes of "
        f"shared memory that a block of the device may have, given D = {head_dim} and D_v = {head_dim_v}, whose "
        f"smallest tile needs {min(needs)} bytes"
    )


def _candidates(tile: Tile, smaller: Tile | None) -> Iterator[Tile]:
    """The row's tile, its smaller one, then the former with fewer stages and with half the keys until 16 are left."""
    yield tile
    if smaller is not None and smaller.num_stages <= tile.num_stages:
        yield smaller
    block_n = tile.block_n
    while block_n >= 16:
        for stages in (5, 3, 2, 1):
            if stages <= tile.num_stages and (block_n, stages) != (tile.block_n, tile.num_stages):
                yield replace(tile, block_n=block_n, tail_n=min(tile.tail_n, block_n), num_stages=stages)
        block_n //= 2


def shared_need(
    tile: Tile, dtype: torch.dtype, target: str, head_dim: int, head_dim_v: int | None = None, latent: bool = False
) -> int:
    """Bytes of shared memory that a program of this tile takes at most, whatever its masks.

    On NVIDIA queries stay there beside the buffers of keys, values and page ids, and weights go through it unless each
    warp has rows of its own; on AMD queries only pass through, a block of columns at a time. One stage keeps no
    buffers: keys and values pass through, in half precision one after the other, and in float32 weights take the place
    of keys. Products without tensor cores take operands of float32.

    Args:
        tile, dtype, target, head_dim, head_dim_v, latent: as in `tile_for`.
    """
    main, rest = head_blocks(head_dim)
    half = dtype != torch.float32
    matrix = half and target != "sm_75"
    size = dtype.itemsize if matrix else 4
    nvidia = target.startswith("sm_")
    own_rows = nvidia and matrix and tile.block_m >= 16 * tile.num_warps
    weights = 0 if own_rows else tile.block_m * tile.block_n * size
    keys = tile.block_n * (main + rest) * size
    values = tile.block_n * _power_of_2(head_dim if head_dim_v is None else head_dim_v) * size
    # products that read shared memory themselves keep one buffer more
    count = max(1, (tile.num_stages - 1) // 2)
    count += matrix and target in ("sm_90", "sm_100") and tile.block_m >= 64
    pipelined = count * (keys + (0 if latent else values)) + 2 * tile.block_n * 4 + weights
    if not nvidia:
        return max(tile.block_m * main * size, pipelined + _SCRATCH_BYTES)
    if target == "sm_75" and half:
        passing = max(keys, values, weights)
    elif not half and (target == "sm_75" or tile.num_stages == 1):
        passing = max(keys, weights) + (0 if latent else values)
    elif tile.num_stages == 1:
        passing = weights + max(keys, values)
    else:
        passing = pipelined
    return tile.block_m * (main + rest) * size + passing + _SCRATCH_BYTES


def head_blocks(head_dim: int) -> tuple[int, int]:
    """Columns of K in one or two blocks of a power of two: 576 is 512 + 64, 192 is 128 + 64, 96 is padded to 128.

    Two blocks from 128 on, and where they save at least half of the padding.
    """
    whole = _power_of_2(head_dim)
    main = whole // 2
    rest = _power_of_2(head_dim - main)
    return (main, rest) if main >= 128 and main + rest <= 3 * whole // 4 else (whole, 0)


def splits_for(programs: int, rows: int, max_keys: int, kv_width: int, out_width: int, tile: Tile, num_sms: int) -> int:
    """Key splits that fill the device, as far as they pay.

    None when four fifths of the device have a program already. Otherwise up to two programs per multiprocessor, with at
    least 4 tiles of keys in each, or 256 keys in wide ones, and float32 partial outputs of at most a quarter of the KV
    bytes.

    Args:
        programs: row tiles x KV heads x requests, without splits.
        rows: packed rows of a request.
        max_keys: keys of the longest request the page table can hold.
        kv_width: bytes of one K row and one V row.
        out_width: bytes of one float32 output row.
        tile: of the launch.
        num_sms: multiprocessors of the device; 0 for the interpreter, which runs one program at a time.
    """
    if num_sms == 0 or 5 * programs >= 4 * num_sms:
        return 1
    by_keys = max_keys // min(4 * tile.block_n, 256)
    by_bytes = max_keys * kv_width // (4 * max(rows, 1) * out_width)
    return max(1, min(2 * num_sms // max(programs, 1), by_keys, by_bytes, 128))


def _power_of_2(n: int) -> int:
    """The least power of two that is at least n and 16, the smallest side of a matrix product."""
    return max(16, 1 << (n - 1).bit_length())
