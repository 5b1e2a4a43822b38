"""Implementations of one attention pass behind `cascade_lab.attention`: plain torch, and Triton kernels.

Both take the same checked arguments, a `Pass`, and return the same `(o, lse)` state. No backend is imported here, so
that a machine without Triton can load the torch backend.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Pass:
    """One pass with its arguments checked and filled in: what a backend runs. Causal is window right = 0."""

    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    cache_seqlens: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    window_size: tuple[int, int]
    tree_mask: Tensor | None
    tail_seqlens: Tensor | None
