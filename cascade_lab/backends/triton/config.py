"""Launch parameters, from static shapes only: tile sizes per head dim and rows, and the number of KV splits.

Rows are query rows times the GQA group (they share a KV head, so they share its tiles). Nothing here reads device
memory or measures, so a launch can be captured in a CUDA graph and is the same on every machine of a kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class Tile:
    """One program's share: block_m packed rows against block_n keys at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (largest head dim, block_m) -> (block_n, num_warps, num_stages)
_TILES = {
    64: {16: (64, 4, 5), 32: (64, 4, 5), 64: (64, 4, 5), 128: (64, 8, 5)},
    128: {16: (64, 4, 5), 32: (64, 8, 5), 64: (64, 8, 5), 128: (64, 8, 3)},
    256: {16: (64, 8, 5), 32: (32, 8, 5), 64: (32, 8, 5)},
    1024: {16: (32, 8, 3)},
}


def tile_for(rows: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """Tile for launches whose longest request has `rows` packed rows.

    Args:
        rows: max_seqlen_q * (H_q / H_kv).
        head_dim: the larger of D and D_v.
        dtype: dtype of q, k and v. float32 takes half the keys per tile.
    """
    table = next(table for limit, table in _TILES.items() if head_dim <= limit or limit == 1024)
    block_m = min(max(16, triton.next_power_of_2(max(rows, 1))), max(table))
    block_n, num_warps, num_stages = table[block_m]
    if dtype == torch.float32:
        block_n, num_stages = min(block_n, 32), 2
    return Tile(block_m, block_n, num_warps, num_stages)


def splits_for(programs: int, max_keys: int, tile: Tile, num_sms: int) -> int:
    """Key splits that fill the device: none when the programs do, else up to two waves, at least 4 tiles of keys each.

    Args:
        programs: row tiles x KV heads x requests, without splits.
        max_keys: keys of the longest request the page table can hold.
        num_sms: multiprocessors of the device; 0 for the interpreter, which runs one program at a time.
    """
    if num_sms == 0 or 5 * programs >= 4 * num_sms:
        return 1
    by_keys = max_keys // (4 * tile.block_n)
    return max(1, min(2 * num_sms // max(programs, 1), by_keys, 128))
