"""Visible regions written out key by key, from their definitions alone: what the closed forms are held against.

A region attends in one or more branches, and a row's keys are counted branch by branch: a token that stands in the
window and in a selected block costs two pairs. Branch columns are raw tokens, or compressed entries numbered in order.
"""

from __future__ import annotations

import numpy as np
import torch

from cascade_lab.regions import (
    CSA,
    HCA,
    NSA,
    Chunked,
    Compressed,
    Dense,
    Region,
    SinkWindow,
    SlidingWindow,
    TopK,
    TopKBlocks,
)


def branches(region: Region, n: int, *, seed: int = 0) -> dict[str, np.ndarray]:
    """The masks of a prompt's n rows, branch by branch.

    Args:
        region: any region but `Mixture`, which adds up whole layers.
        n: prompt tokens, at least 1.
        seed: of the choice that a sparse core makes; it moves the marks, never their number.

    Returns:
        Branch name to bool `[n, columns]`: "tokens" has n columns, "entries" one per compressed entry, "selected" n.

    Raises:
        TypeError: a region without a mask.
    """
    row, key = np.arange(n)[:, None], np.arange(n)
    causal = key <= row
    window = getattr(region, "window", getattr(region, "w", n))
    recent = causal & (key > row - window)
    draw = np.random.default_rng(seed)
    match region:
        case Dense():
            return {"tokens": causal}
        case SlidingWindow():
            return {"tokens": recent}
        case SinkWindow(s=s):
            return {"tokens": recent | (causal & (key < s))}
        case Chunked(c=c):
            return {"tokens": causal & (key // c == row // c)}
        case TopK(k=k):
            return {"tokens": _chosen(causal, k, draw)}
        case TopKBlocks(block=block, k=k):
            return {"tokens": _blocks(causal, block, k, draw)}
        case Compressed(m=m):
            return {"entries": _entries(n, m, m)}
        case CSA(m=m, k=k):
            return {"entries": _chosen(_entries(n, m, m), k, draw), "tokens": recent}
        case HCA(m=m):
            return {"entries": _entries(n, m, m), "tokens": recent}
        case NSA(length=length, stride=stride, block=block, k=k):
            entries, selected = _entries(n, length, stride), _blocks(causal, block, k, draw)
            return {"entries": entries, "selected": selected, "tokens": recent}
    raise TypeError(f"region: expected one with a mask of its own, given {region}")


def keys_seen(region: Region, n: int, *, seed: int = 0) -> list[int]:
    """Keys that each of the n rows sees, counted mark by mark over all branches."""
    return sum(mask.sum(1) for mask in branches(region, n, seed=seed).values()).tolist()


def mask_words(mask: np.ndarray) -> torch.Tensor:
    """Bits of a bool `[rows, keys]` mask as `attention` takes them: int64 `[rows, ceil(keys / 64)]`."""
    padded = np.pad(mask, ((0, 0), (0, -mask.shape[1] % 64)))
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view("<i8").astype(np.int64))


def _entries(n: int, length: int, stride: int) -> np.ndarray:
    """Entry e holds tokens e stride to e stride + length - 1, and is there once the last of them is."""
    ends = np.arange(length, n + 1, stride)
    return ends <= np.arange(1, n + 1)[:, None]


def _chosen(allowed: np.ndarray, k: int, draw: np.random.Generator) -> np.ndarray:
    """At most k of the allowed columns of each row, by a random score."""
    score = np.where(allowed, draw.random(allowed.shape), -1.0)
    rank = (-score).argsort(1).argsort(1)
    return allowed & (rank < k)


def _blocks(causal: np.ndarray, block: int, k: int, draw: np.random.Generator) -> np.ndarray:
    """Each row's own block and k - 1 random earlier ones, less the row's future."""
    n = len(causal)
    own = np.arange(n)[:, None] // block
    blocks = np.arange(-(-n // block))
    earlier = _chosen(blocks < own, k - 1, draw)
    return causal & (earlier | (blocks == own))[:, np.arange(n) // block]
