"""The peers of the benchmark do the same work: their masks and their expansion are those of the plans."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch

from cascade_lab import DraftTree, VerifyBatch, attention, cascade_attention
from cascade_lab.bench import peers
from cascade_lab.drafts import ROWS
from tests.cases import offsets


def work_of(rows: str) -> tuple[peers.VerifyWork, torch.Tensor]:
    """Two requests of three branches of four tokens, in whole pages with copied tails, and their state's o."""
    gen = torch.Generator().manual_seed(3)
    batch = VerifyBatch([40] * 2, [DraftTree.branches(3, 4)] * 2, 16, rows)
    copies = batch.copied_tails("naive")
    caches = []
    for _ in range(2):
        cache = torch.full((copies.num_pages, 16, 2, 8), math.nan)
        cache[: batch.num_pages] = torch.randn(batch.num_pages, 16, 2, 8, generator=gen)
        flat = cache.view(-1, 2, 8)
        flat[copies.dst] = flat[copies.src]
        caches.append(cache)
    q = torch.randn(batch.num_rows, 4, 8, generator=gen)
    expected = cascade_attention(q, *caches, batch.levels("fused")).o
    return peers.VerifyWork(q, *caches, batch, copies.levels[0]), expected


@pytest.mark.parametrize("rows", ROWS)
def test_a_dense_mask_shows_each_row_its_path(rows):
    work, expected = work_of(rows)
    torch.testing.assert_close(peers.sdpa(work, False).call(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("peer", "module", "table_name"),
    [
        (peers.flash_attention_3, "flash_attn_interface", "page_table"),
        (peers.flash_attention_2, "flash_attn", "block_table"),
    ],
)
def test_kernels_without_trees_get_virtual_requests(monkeypatch, peer, module, table_name, rows):
    """A stand-in with flash_attn_with_kvcache's convention: q [V, S, H, D], causal aligned to the bottom right."""
    shapes = []

    def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, causal, **table):
        shapes.append((q.shape[:2], causal))
        assert set(table) == {table_name}
        cu_seqlens_q = offsets([q.shape[1]] * len(q), q.device)
        state = attention(
            q.flatten(0, 1),
            k_cache,
            v_cache,
            table[table_name],
            cache_seqlens,
            cu_seqlens_q=cu_seqlens_q,
            causal=causal,
        )
        return state.o.view(q.shape)

    monkeypatch.setitem(sys.modules, module, SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache))
    work, expected = work_of(rows)
    torch.testing.assert_close(peer(work, False).call(), expected, atol=2e-6, rtol=0)
    assert shapes == [{"branch": ((6, 4), True), "leaf": ((6, 1), False), "node": ((24, 1), False)}[rows]]
