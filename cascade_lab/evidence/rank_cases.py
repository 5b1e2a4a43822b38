"""Small batches that every rank can make for itself from a seed, and the float64 state of each.

A rank keeps only its own share of the inputs. It makes the whole to be judged by: the oracle sees all keys at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cascade_lab import paging
from cascade_lab.drafts import DraftTree, VerifyBatch
from cascade_lab.evidence.reference import Reference, attention_oracle
from cascade_lab.levels import Level


@dataclass(frozen=True)
class Verification:
    """A batch of draft trees on cached prefixes: q `[T, H_q, D]`, the whole cache, its cascade plan, its state."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    levels: tuple[Level, ...]
    oracle: Reference


def verification(
    *,
    seed: int,
    prefix_lengths: Sequence[int],
    topk: int,
    steps: int,
    page_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> Verification:
    """Every request verifies `topk` branches of `steps` drafts; levels[0] reads prefixes, levels[1] drafts, causal."""
    batch = VerifyBatch(prefix_lengths, [DraftTree.branches(topk, steps)] * len(prefix_lengths), page_size, "branch")
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch.num_rows, num_q_heads, head_dim, generator=g)
    k, v = torch.randn(2, batch.num_pages, page_size, num_kv_heads, head_dim, generator=g)
    (expanded,) = batch.levels("naive")
    tokens = (x.view(-1, expanded.page_size, *x.shape[2:]) for x in (k, v))
    rows = dict(cu_seqlens_q=expanded.cu_seqlens_q, causal=expanded.causal)
    oracle = attention_oracle(q, *tokens, expanded.page_table, expanded.cache_seqlens, **rows)
    return Verification(q, k, v, batch.levels("cascade"), oracle)


@dataclass(frozen=True)
class Prompts:
    """Prompts packed one after another: q `[N, H_q, D]`, k and v `[N, H_kv, D]`, and their causal state."""

    q: Tensor
    k: Tensor
    v: Tensor
    oracle: Reference


def prompts(*, seed: int, prompt_lengths: Sequence[int], num_q_heads: int, num_kv_heads: int, head_dim: int) -> Prompts:
    """A causal prefill of all prompts, without a cache hit."""
    g = torch.Generator().manual_seed(seed)
    tokens = sum(prompt_lengths)
    q = torch.randn(tokens, num_q_heads, head_dim, generator=g)
    k, v = torch.randn(2, tokens, num_kv_heads, head_dim, generator=g)
    lengths = torch.tensor(prompt_lengths, dtype=torch.int32)
    rows = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    table = paging.build_page_table(prompt_lengths, 1)
    oracle = attention_oracle(q, k[:, None], v[:, None], table, lengths, cu_seqlens_q=rows, causal=True)
    return Prompts(q, k, v, oracle)
