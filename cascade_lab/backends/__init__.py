"""Implementations of one attention pass behind `cascade_lab.attention`: plain torch, and Triton kernels.

Each has one function `attend(q, passes, call)` that takes checked arguments and returns the state `(o, lse)` of all
rows over the keys of all passes. No backend is imported here, so a machine without Triton can load the torch backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, dtype


@dataclass(frozen=True)
class Pass:
    """One pass with its arguments checked and filled in: which rows read which keys. Causal is window right = 0."""

    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    cache_seqlens: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    window_size: tuple[int, int]
    tree_mask: Tensor | None
    tail_seqlens: Tensor | None


class Call(NamedTuple):
    """The options that all passes of a call share, as in `attention`; once they are checked, none is at its default.

    Scales are then float32 `[H_kv]`, or None for 1.

    A tuple, for it is made in every call and costs half of a frozen dataclass.
    """

    softmax_scale: float
    softcap: float
    num_splits: int | None
    out_dtype: dtype
    reads: Tensor | None
    backend: str
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
