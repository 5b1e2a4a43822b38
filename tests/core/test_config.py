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
# largest rows of a tile by the larger of D and D_v: half precision, where sm_75 has fewer, and float32
ROWS = {64: 128, 128: 128, 256: 64, 1024: 32}
ROWS_T4 = {64: 128, 128: 64, 256: 32, 1024: 8}
ROWS_FULL = ROWS | {128: 64}


def most_rows(target, dtype, head_dim):
    table = ROWS if dtype != torch.float32 or target == "gfx942" else ROWS_FULL
    table = ROWS_T4 if target == "sm_75" and (dtype != torch.float32 or head_dim > 256) else table
    return next(rows for limit, rows in table.items() if head_dim <= limit)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_the_table_rises_and_loads_the_same_on_every_target_but_on_a_t4(target, dtype):
    for head_dim in (1, 16, 32, 33, 64, 65, 128, 129, 256, 257, 576, 1024):
        table = tiles(target, head_dim, dtype)
        rows = [tile.block_m for tile in table]
        assert rows == sorted(set(rows))
        most = most_rows(target, dtype, head_dim)
        assert rows == ([8] if most == 8 else [m for m in (16, 32, 64, 128) if m <= most])
        for tile in table:
            assert tile.block_n % tile.tail_n == 0
            assert tile.tail_n <= 64, "a tile of a tree's keys has as many bits as a word"
            # a block has at most 1024 threads, and its registers are at most those of a multiprocessor
            assert tile.num_warps in (4, 8, 16)
            assert (tile.max_registers or 0) * 32 * tile.num_warps <= 65536


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_smallest_tile_that_holds_the_rows_is_taken(dtype):
    assert [tile_for(rows, 64, dtype).block_m for rows in (0, 1, 16, 17, 64, 65, 128, 129, 5000)] == [
        *(16, 16, 16, 32, 64, 128, 128, 128, 128)
    ]
    assert [tile_for(rows, 256, dtype).block_m for rows in (16, 33, 500)] == [16, 64, 64]
    assert [tile_for(rows, 576, dtype).block_m for rows in (16, 33, 500)] == [16, 32, 32]


@pytest.mark.parametrize("name", runtime.TARGETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_tile_fits_the_shared_memory_of_each_target(name, dtype):
    """With the rows of the table, or, in float32 on 64 and 99 KiB, with the most that fit."""
    limit, target = runtime.TARGETS[name].shared_bytes, rows_of(name)
    fewer = {}
    for head_dim, value_dim, latent in WIDTHS:
        for rows in (1, 16, 32, 64, 128, 1000):
            arguments = (rows, head_dim, dtype, target, limit, value_dim, latent)
            tile = tile_for(*arguments)
            least = tiles(target, head_dim, dtype)[0].block_m
            expected = next((m for m in (8, 16, 32, 64, 128) if max(rows, least) <= m), 128)
            expected = min(most_rows(target, dtype, head_dim), expected)
            if tile.block_m != expected:
                assert tile.block_m < expected
                fewer[head_dim] = max(fewer.get(head_dim, 0), tile.block_m)
            assert 0 < shared_need(tile, dtype, target, head_dim, value_dim, latent) <= limit
    assert fewer == (FEWER.get(name, {}) if dtype == torch.float32 else {})


# D -> rows that remain in float32, for want of shared memory
FEWER = {"sm_75": {192: 32, 256: 16}} | dict.fromkeys(("sm_86", "sm_89", "sm_120"), {576: 16})


def test_what_no_tile_fits_is_refused_with_need_and_limit():
    with pytest.raises(ValueError, match="D = 576 and D_v = 512.*smallest tile needs") as error:
        tile_for(64, 576, torch.bfloat16, "sm_90", 16384, 512, True)
    has, need = map(int, re.findall(r"(\d+) bytes", str(error.value)))
    assert has == 16384 < need


@pytest.mark.parametrize("name", ["sm_86", "sm_89", "sm_120"])
def test_smaller_tiles_stand_in_where_99_kib_do_not_hold_the_rows_own(name):
    def taken(rows, head_dim, value_dim, latent=False):
        limit = runtime.TARGETS[name].shared_bytes
        return tile_for(rows, head_dim, torch.bfloat16, rows_of(name), limit, value_dim, latent)

    assert taken(16, 256, 256) == Tile(16, 32, 4, tail_n=16)
    assert taken(32, 256, 256) == Tile(32, 32, 4, max_registers=255)
    assert taken(64, 256, 256) == Tile(64, 32, 8, 3, tail_n=16)
    assert taken(64, 192, 128) == Tile(64, 32, 8, tail_n=16)
    assert taken(16, 576, 512, latent=True) == Tile(16, 32, 4)
    assert taken(32, 576, 512, latent=True) == Tile(32, 16, 8)
    assert taken(64, 64, 64) == Tile(64, 64, 4, max_registers=255)
    assert taken(128, 64, 64) == Tile(128, 128, 8, tail_n=64)


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
        seen.append((tile.block_m, tile.block_n, tile.num_stages))
        limit = need - 1
    assert seen[0] == (64, 32, 5) == (64, tiles("sm_90", 256)[-1].block_n, tiles("sm_90", 256)[-1].num_stages)
    assert seen[-1] == (16, 16, 1)
    assert len(seen) == len(set(seen)) > 5
    assert [m for m, *_ in seen] == sorted((m for m, *_ in seen), reverse=True), (
        "fewer rows only where no keys are left"
    )


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
    """Every recorded row of every target: the compiler's bytes, and a bound at most a tenth above them, or 5 KiB where
    nothing is buffered."""
    rows = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]
    assert {row["target"] for row in rows} == set(runtime.TARGETS) - {"gfx942"}
    for row in rows:
        work, target, dtype = row["work"], rows_of(row["target"]), getattr(torch, row["work"]["dtype"])
        widths = (work["head_dim"], work["head_dim_v"] or work["head_dim"], work["latent"])
        tile = tile_for(
            work["rows"], widths[0], dtype, target, runtime.TARGETS[row["target"]].shared_bytes, *widths[1:]
        )
        assert (tile.block_m, tile.block_n, tile.num_warps) == (row["block_m"], row["block_n"], row["num_warps"])
        need = shared_need(tile, dtype, target, *widths)
        slack = 0.1 * row["shared_bytes"] if tile.num_stages > 1 else max(5120, 0.1 * row["shared_bytes"])
        assert row["shared_bytes"] <= need <= row["shared_bytes"] + slack, row


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
