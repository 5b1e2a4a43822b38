"""Launch parameters: tiles hold their rows, splits pay for themselves, and both come from static shapes alone."""

import json
import re
from pathlib import Path

import pytest
import torch

from cascade_lab import runtime
from cascade_lab.backends.triton.config import (
    TARGETS,
    Tile,
    head_blocks,
    rows_of,
    shared_need,
    splits_for,
    tile_for,
    tiles,
)

RECORD = Path(__file__).resolve().parents[2] / "figures" / "measured" / "compiled.json"
# D, D_v, V is a view of K
WIDTHS = ((64, 64, False), (128, 128, False), (192, 128, False), (256, 256, False), (576, 512, True))
# (D, rows from which on) that no tile of a target holds: 64 KiB with operands of float32, and 99 KiB
T4 = {"float16": {128: 128, 256: 64, 576: 16}, "float32": {128: 128, 192: 64, 256: 32, 576: 16}}
CARD = {"float16": {}, "float32": {256: 64, 576: 32}}
REFUSED = {"sm_75": T4, "sm_86": CARD, "sm_89": CARD, "sm_120": CARD}


@pytest.mark.parametrize("target", TARGETS)
def test_the_table_rises_and_loads_the_same_on_every_target(target):
    for head_dim in (1, 64, 65, 128, 129, 256, 257, 576, 1024):
        rows = [tile.block_m for tile in tiles(target, head_dim)]
        assert rows == sorted(set(rows))
        assert rows == [tile.block_m for tile in tiles("sm_90", head_dim)]
        assert all(tile.block_n % tile.tail_n == 0 and tile.block_n <= 64 for tile in tiles(target, head_dim))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_smallest_tile_that_holds_the_rows_is_taken(dtype):
    assert [tile_for(rows, 64, dtype).block_m for rows in (0, 1, 16, 17, 64, 65, 128, 129, 5000)] == [
        *(16, 16, 16, 32, 64, 128, 128, 128, 128)
    ]
    assert [tile_for(rows, 256, dtype).block_m for rows in (16, 33, 500)] == [16, 64, 64]
    assert [tile_for(rows, 576, dtype).block_m for rows in (16, 33, 500)] == [16, 32, 32]


@pytest.mark.parametrize("name", runtime.TARGETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_tile_fits_the_shared_memory_of_each_target_or_is_refused_with_need_and_limit(name, dtype):
    limit = runtime.TARGETS[name].shared_bytes
    refused = REFUSED.get(name, {}).get(str(dtype).removeprefix("torch."), {})
    for head_dim, value_dim, latent in WIDTHS:
        for rows in (16, 32, 64, 128):
            arguments = (rows, head_dim, dtype, rows_of(name), limit, value_dim, latent)
            if rows >= refused.get(head_dim, 129):
                with pytest.raises(ValueError, match=f"D = {head_dim}.*needs") as error:
                    tile_for(*arguments)
                has, need = map(int, re.findall(r"(\d+) bytes", str(error.value)))
                assert has == limit < need
                continue
            tile = tile_for(*arguments)
            assert tile.block_m == tile_for(rows, head_dim, dtype).block_m
            assert 0 < shared_need(tile, dtype, rows_of(name), head_dim, value_dim, latent) <= limit


@pytest.mark.parametrize("name", ["sm_86", "sm_89", "sm_120"])
def test_smaller_tiles_stand_in_where_99_kib_do_not_hold_the_rows_own(name):
    def taken(rows, head_dim, value_dim, latent=False):
        limit = runtime.TARGETS[name].shared_bytes
        return tile_for(rows, head_dim, torch.bfloat16, rows_of(name), limit, value_dim, latent)

    assert taken(16, 256, 256) == Tile(16, 32, 4, tail_n=16)
    assert taken(32, 256, 256) == Tile(32, 32, 8)
    assert taken(64, 256, 256) == Tile(64, 32, 8, 3)
    assert taken(64, 192, 128) == Tile(64, 32, 8)
    assert taken(16, 576, 512, latent=True) == Tile(16, 32, 4)
    assert taken(32, 576, 512, latent=True) == Tile(32, 16, 8)
    assert taken(64, 64, 64) == Tile(64, 64, 4, max_registers=255)
    assert taken(128, 64, 64) == Tile(128, 64, 8)


def test_a_limit_is_met_to_the_byte_and_none_is_none():
    """Tile by tile down from the row's own, each at just its need; a byte below the last nothing is left."""
    seen, limit = [], None
    while True:
        try:
            tile = tile_for(40, 256, torch.bfloat16, "sm_90", limit)
        except ValueError:
            break
        need = shared_need(tile, torch.bfloat16, "sm_90", 256)
        assert limit is None or need <= limit
        assert tile_for(40, 256, torch.bfloat16, "sm_90", need) == tile
        seen.append((tile.block_n, tile.num_stages))
        limit = need - 1
    assert seen[0] == (32, 5) == (tiles("sm_90", 256)[-1].block_n, tiles("sm_90", 256)[-1].num_stages)
    assert seen[-1] == (16, 1)
    assert len(seen) == len(set(seen)) > 3


def test_bfloat16_is_refused_where_the_card_has_none():
    with pytest.raises(TypeError, match="dtype of q: expected float16 or float32 on sm_75.*given bfloat16"):
        tile_for(16, 64, torch.bfloat16, "sm_75", 64 * 1024)
    assert tile_for(16, 64, torch.float16, "sm_75", 64 * 1024) == Tile(16, 32, 4, 1)


def test_devices_take_the_rows_of_their_generation():
    names = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121", "gfx90a")
    assert [rows_of(name) for name in names] == [
        *("sm_75", "sm_75", "sm_80", "sm_86", "sm_86", "sm_90", "sm_100", "sm_100", "sm_120", "sm_120", "gfx942")
    ]


def test_the_bound_holds_what_was_compiled_and_is_not_far_above_it():
    """Every recorded row of sm_80, sm_90 and sm_100: the compiler's bytes, and a bound at most a tenth above them."""
    rows = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]
    assert len(rows) > 90
    for row in rows:
        work, target = row["work"], row["target"]
        widths = (work["head_dim"], work["head_dim_v"] or work["head_dim"], work["latent"])
        limit = runtime.TARGETS[target].shared_bytes
        tile = tile_for(work["rows"], widths[0], torch.bfloat16, target, limit, *widths[1:])
        assert (tile.block_m, tile.block_n, tile.num_warps) == (row["block_m"], row["block_n"], row["num_warps"])
        need = shared_need(tile, torch.bfloat16, target, *widths)
        assert row["shared_bytes"] <= need <= 1.1 * row["shared_bytes"]


@pytest.mark.parametrize(
    ("head_dim", "blocks"),
    [(1, (16, 0)), (64, (64, 0)), (80, (128, 0)), (96, (128, 0)), (128, (128, 0)), (192, (128, 64)), (256, (256, 0))]
    + [(300, (256, 64)), (500, (512, 0)), (576, (512, 64))],
)
def test_head_dims_are_cut_into_blocks_that_cover_them(head_dim, blocks):
    assert head_blocks(head_dim) == blocks
    assert sum(blocks) >= head_dim


def test_splits_fill_the_device_and_stop_where_partials_cost_more_than_a_quarter_of_the_keys():
    def splits(programs=2, rows=80, max_keys=2000, num_sms=132):
        kv_width, out_width, tile = 2 * 64 * 2, 64 * 4, Tile(128, 64, 4)
        return splits_for(programs, rows, max_keys, kv_width, out_width, tile, num_sms)

    # 80 rows x 256 bytes a split, against 2000 keys x 256 bytes: at most 6 in a quarter
    assert splits() == 6
    assert splits() * 80 * 256 <= 2000 * 256 / 4
    # few rows: as many as 4 tiles of 64 keys allow
    assert splits(rows=4) == 2000 // 256
    # enough keys: two programs for each of 132 multiprocessors
    assert splits(rows=4, max_keys=10**6) == 128
    assert splits(programs=8, rows=4, max_keys=10**6) == 2 * 132 // 8
    # four fifths of the device busy, no keys, or no device: no splits
    assert splits(programs=106) == splits(max_keys=0) == splits(num_sms=0) == 1
