"""Masks written out by hand, and the masks of the package against them."""

import numpy as np
import pytest
import torch

from cascade_lab.evidence.masks import branches, keys_seen, mask_words
from cascade_lab.regions import (
    CSA,
    HCA,
    NSA,
    Chunked,
    Compressed,
    Dense,
    Mixture,
    SinkWindow,
    SlidingWindow,
    TopK,
    TopKBlocks,
)


def drawn(mask):
    return ["".join("#" if seen else "." for seen in row) for row in mask]


@pytest.mark.parametrize(
    ("region", "expected"),
    [
        (Dense(), ["#....", "##...", "###..", "####.", "#####"]),
        (SlidingWindow(2), ["#....", "##...", ".##..", "..##.", "...##"]),
        (SinkWindow(1, 2), ["#....", "##...", "###..", "#.##.", "#..##"]),
        (Chunked(3), ["#....", "##...", "###..", "...#.", "...##"]),
        (TopKBlocks(2, 1), ["#....", "##...", "..#..", "..##.", "....#"]),
        (TopKBlocks(2, 2), ["#....", "##...", "###..", "####.", None]),
    ],
    ids=str,
)
def test_token_masks_by_hand(region, expected):
    (mask,) = branches(region, 5).values()
    assert [row if want else None for row, want in zip(drawn(mask), expected, strict=True)] == expected


def test_entries_appear_when_their_last_token_is_there():
    assert drawn(branches(Compressed(2), 5)["entries"]) == ["..", "#.", "#.", "##", "##"]
    nsa = branches(NSA(3, 1, 2, 1, 2), 5)
    assert drawn(nsa["entries"]) == ["...", "...", "#..", "##.", "###"]
    assert list(nsa) == ["entries", "selected", "tokens"]
    hca = branches(HCA(2, 1), 4)
    assert drawn(hca["tokens"]) == ["#...", ".#..", "..#.", "...#"]


def test_last_row_of_two_blocks_sees_its_own_and_one_earlier():
    for seed in range(8):
        row = drawn(branches(TopKBlocks(2, 2), 5, seed=seed)["tokens"])[4]
        assert row in ("##..#", "..###")


@pytest.mark.parametrize(
    "region",
    [
        SlidingWindow(7),
        SinkWindow(3, 9),
        Chunked(10),
        TopK(6),
        TopKBlocks(8, 3),
        Compressed(4),
        CSA(4, 5, 6),
        HCA(7, 9),
        NSA(8, 3, 5, 2, 6),
    ],
    ids=str,
)
def test_selection_moves_marks_and_keeps_their_number(region):
    first, second = (branches(region, 90, seed=seed) for seed in (0, 1))
    assert keys_seen(region, 90, seed=0) == keys_seen(region, 90, seed=1)
    assert keys_seen(region, 90) == [region.visible(t) for t in range(1, 91)]
    moved = any(not np.array_equal(first[name], second[name]) for name in first)
    assert moved == isinstance(region, (TopK, TopKBlocks, CSA, NSA))
    assert all(mask.dtype == bool and len(mask) == 90 for mask in first.values())


def test_no_row_sees_its_future():
    for region in (Dense(), SlidingWindow(5), SinkWindow(4, 2), Chunked(7), TopK(3), TopKBlocks(4, 2)):
        assert not np.triu(branches(region, 40)["tokens"], 1).any()


def test_words_hold_bit_j_for_key_j():
    mask = np.zeros((3, 130), bool)
    mask[0, [0, 63, 64]], mask[1, 129] = True, True
    words = mask_words(mask)
    assert words.dtype == torch.int64
    assert words.tolist() == [[1 - 2**63, 1, 0], [0, 0, 2], [0, 0, 0]]


def test_a_mixture_has_no_mask_of_its_own():
    with pytest.raises(TypeError, match="Mixture"):
        branches(Mixture(((1, Dense()),)), 4)
