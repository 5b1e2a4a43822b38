"""Launch parameters, from static shapes only: tiles per head dim, rows and target, and the number of KV splits.

Rows are query rows times the GQA group (they share a KV head, so they share its tiles). Nothing here reads device
memory or measures, so a launch can be captured in a CUDA graph and is the same on every machine of a kind. Every row of
the table is compiled and inspected by `cascade_lab.evidence.compiled`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


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


# largest head dim -> tiles from few rows to many
_TILES = {
    64: (Tile(16, 64, 4), Tile(32, 64, 4), Tile(64, 64, 4), Tile(128, 64, 8)),
    128: (Tile(16, 64, 4), Tile(32, 64, 8), Tile(64, 64, 8), Tile(128, 64, 8)),
    256: (Tile(16, 64, 8), Tile(32, 32, 8), Tile(64, 32, 8)),
    1024: (Tile(16, 32, 4), Tile(32, 32, 8)),
}
# where a target needs other tiles: few registers on sm_80, 64 KiB of shared memory on gfx942; a register limit of its
# own where the assembler would spill to fit one more program
_EXCEPTIONS: dict[tuple[str, int], tuple[Tile, ...]] = {
    ("sm_80", 64): (
        Tile(16, 64, 4, tail_n=32),
        Tile(32, 64, 4),
        Tile(64, 64, 4, max_registers=255),
        Tile(128, 64, 4, tail_n=32),
    ),
    ("sm_80", 128): (
        Tile(16, 64, 4),
        Tile(32, 64, 8, max_registers=168),
        Tile(64, 64, 8),
        Tile(128, 64, 8, tail_n=32),
    ),
    ("sm_100", 64): (*_TILES[64][:3], Tile(128, 64, 8, max_registers=255)),
    ("gfx942", 64): tuple(Tile(m, 64, 4, 2) for m in (16, 32, 64, 128)),
    ("gfx942", 128): tuple(Tile(m, 32, 4, 2) for m in (16, 32, 64, 128)),
    ("gfx942", 256): tuple(Tile(m, 16, 4, 2) for m in (16, 32, 64)),
    ("gfx942", 1024): tuple(Tile(m, 16, 4, 1) for m in (16, 32)),
}


def rows_of(name: str) -> str:
    """The one of TARGETS whose rows a device of that name takes."""
    if not name.startswith("sm_"):
        return "gfx942"
    generation = int(name.removeprefix("sm_")) // 10
    return "sm_100" if generation >= 10 else "sm_90" if generation == 9 else "sm_80"


def tiles(target: str, head_dim: int) -> tuple[Tile, ...]:
    """The table's rows for half-precision inputs: tiles of rising block_m.

    Args:
        target: one of TARGETS.
        head_dim: the larger of D and D_v, up to 1024.
    """
    limit = next(limit for limit in _TILES if head_dim <= limit)
    return _EXCEPTIONS.get((target, limit), _TILES[limit])


def tile_for(rows: int, head_dim: int, dtype: torch.dtype, target: str = "sm_90") -> Tile:
    """The tile for launches whose longest request has `rows` packed rows: the smallest that holds them, or the largest.

    block_m is the same on every target, so what a launch loads is too.

    Args:
        rows: max_seqlen_q * (H_q / H_kv).
        head_dim: the larger of D and D_v.
        dtype: dtype of q, k and v; float32, there for checking, takes the same rows and fewer keys.
        target: one of TARGETS.
    """
    table = tiles(target, head_dim)
    if dtype == torch.float32:
        table = tuple(Tile(t.block_m, min(t.block_n, 32), t.num_warps, min(t.num_stages, 2)) for t in table)
    return next((tile for tile in table if rows <= tile.block_m), table[-1])


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
    least 4 tiles of keys in each, and float32 partial outputs of at most a quarter of the KV bytes.

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
    by_keys = max_keys // (4 * tile.block_n)
    by_bytes = max_keys * kv_width // (4 * max(rows, 1) * out_width)
    return max(1, min(2 * num_sms // max(programs, 1), by_keys, by_bytes, 128))


def _power_of_2(n: int) -> int:
    """The least power of two that is at least n and 16, the smallest side of a matrix product."""
    return max(16, 1 << (n - 1).bit_length())
