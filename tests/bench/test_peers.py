"""The peers of the benchmark do the same work: their masks and their expansion are those of the plans.

Stand-ins have the calling convention of the package that they stand for, and compute with this one.
"""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend

from cascade_lab import DraftTree, VerifyBatch, attention, cascade_attention
from cascade_lab.bench import clock as clocks
from cascade_lab.bench import peers
from cascade_lab.bench.gpu import comparison, session
from cascade_lab.drafts import ROWS
from cascade_lab.prefix import prefix_hit_levels
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


@pytest.mark.parametrize("rows", ["branch", "leaf"])
def test_virtual_requests_of_one_length_are_copied_out_for_the_flash_backend(rows):
    work, expected = work_of(rows)
    peer = peers.sdpa_flash(work)
    assert peer.name == "SDPA flash, virtual requests"
    torch.testing.assert_close(peer.call(), expected, atol=2e-6, rtol=0)


def test_virtual_requests_of_other_lengths_are_refused_for_the_flash_backend():
    with pytest.raises(ValueError, match="virtual requests of different lengths"):
        peers.sdpa_flash(work_of("node")[0])


@pytest.mark.parametrize(
    ("peer", "name", "backend"),
    [
        (peers.sdpa_cudnn, "SDPA cudnn, dense mask, group packed", SDPBackend.CUDNN_ATTENTION),
        (peers.sdpa_efficient, "SDPA efficient, dense mask, group packed", SDPBackend.EFFICIENT_ATTENTION),
    ],
)
def test_a_backend_asked_for_by_name_is_the_only_one_that_may_run(monkeypatch, peer, name, backend):
    asked = []
    monkeypatch.setattr(peers, "sdpa_kernel", lambda one: asked.append(one) or nullcontext())
    work, expected = work_of("node")
    made = peer(work)
    assert (made.name, asked) == (name, [])
    torch.testing.assert_close(made.call(), expected, atol=2e-6, rtol=0)
    assert asked == [backend]


def module(monkeypatch, name, **contents):
    """Put a package of that name, and those around it, where imports find it."""
    parts = name.split(".")
    for i in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**contents))


def varlen(q, k, v, cu_seqlens_q, seqused_k, block_table, causal):
    return attention(q, k, v, block_table, seqused_k, cu_seqlens_q=cu_seqlens_q, causal=causal).o


@pytest.mark.parametrize("rows", ROWS)
def test_vllm_flash_attention_gets_packed_virtual_requests(monkeypatch, rows):
    def flash_attn_varlen_func(
        q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, causal=False,
        block_table=None,
    ):  # fmt: skip
        assert cu_seqlens_k is None
        assert (max_seqlen_q, max_seqlen_k) == ({"branch": 4, "leaf": 1, "node": 1}[rows], 44)
        return varlen(q, k, v, cu_seqlens_q, seqused_k, block_table, causal)

    module(monkeypatch, "vllm.vllm_flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)
    work, expected = work_of(rows)
    torch.testing.assert_close(peers.vllm_flash_attention(work).call(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("place", ["vllm.v1.attention.ops", "vllm.attention.ops"])
@pytest.mark.parametrize("rows", ROWS)
def test_vllm_unified_attention_writes_into_its_output(monkeypatch, rows, place):
    def unified_attention(
        q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size,
        block_table, softcap, q_descale, k_descale, v_descale,
    ):  # fmt: skip
        assert causal
        assert (q_descale, window_size, softcap) == (None, (-1, -1), 0.0)
        assert softmax_scale == 8**-0.5
        assert float(k_descale) == float(v_descale) == 1
        out.copy_(varlen(q, k, v, cu_seqlens_q, seqused_k, block_table, causal))

    module(monkeypatch, f"{place}.triton_unified_attention", unified_attention=unified_attention)
    work, expected = work_of(rows)
    torch.testing.assert_close(peers.vllm_unified_attention(work).call(), expected, atol=2e-6, rtol=0)


def test_flex_attention_is_ready_before_it_is_timed(monkeypatch):
    """Made is run: compilation falls into "ready_seconds"."""
    from torch.nn.attention import flex_attention as flex

    calls, real = [], flex.flex_attention
    monkeypatch.setattr(flex, "flex_attention", lambda *a, **k: calls.append(1) or real(*a, **k))
    work, expected = work_of("branch")
    peer = peers.flex_attention(work)
    assert (peer.name, len(calls)) == ("FlexAttention", 1)
    torch.testing.assert_close(peer.call(), expected, atol=2e-6, rtol=0)
    bench = session.Session(clocks.HostClock(), session.PRESETS["smoke"])
    expected = SimpleNamespace(o=expected)
    row = comparison._peer_row(bench, "FlexAttention", lambda: peers.flex_attention(work), expected)
    assert row["agrees"]
    assert row["ready_seconds"] > 0


@pytest.mark.parametrize("name", ["SDPA", "SDPA flash", "FlashAttention-3", "FlashAttention-2"])
def test_prefill_peers_compute_the_causal_prompt(monkeypatch, name):
    def flash_attn_func(q, k, v, causal):
        o = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True
        )
        return o.transpose(1, 2)

    for package in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, package, SimpleNamespace(flash_attn_func=flash_attn_func))
    gen = torch.Generator().manual_seed(5)
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    (level,) = prefix_hit_levels([37], [0], 16, page_table=table)
    k, v = (torch.randn(3, 16, 2, 8, generator=gen) for _ in range(2))
    q = torch.randn(37, 4, 8, generator=gen)
    expected = cascade_attention(q, k, v, [level]).o
    peer = peers.PREFILL_PEERS[name](q, k, v, level)
    assert peer.name == f"{name}, causal"
    torch.testing.assert_close(peer.call(), expected, atol=2e-6, rtol=0)


def test_a_package_that_is_not_installed_is_named_with_the_reason(monkeypatch):
    bench = session.Session(clocks.HostClock(), session.PRESETS["smoke"])
    work, _ = work_of("leaf")
    for name in ("flashinfer", "flash_attn", "flash_attn_interface", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)
    rows = {
        name: comparison._peer_row(bench, name, lambda make=make: make(work, False), None)
        for name, make in peers.VERIFY_PEERS.items()
        if not name.startswith(("SDPA", "FlexAttention"))
    }
    assert len(rows) == 5
    for name, row in rows.items():
        assert row["kernel"] == name
        assert row["missing"].startswith("ModuleNotFoundError: ")
        assert {"vLLM": "vllm", "Flas": "flash"}[name[:4]] in row["missing"]
