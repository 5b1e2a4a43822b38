"""Launch parameters: tiles hold their rows, splits pay for themselves, and both come from static shapes alone."""

import pytest
import torch

from cascade_lab.backends.triton.config import TARGETS, Tile, head_blocks, splits_for, tile_for, tiles


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
