"""The kernel's reads and products on fixed work, as exact integers: counter, load recorder and ledger agree.

K tokens are per KV head. Rows x group fill the row tile, so whatever the group, a request whose rows fit one tile reads
each of its keys once.
"""

import pytest
import torch

from cascade_lab import DraftTree, VerifyBatch, attention, cascade_attention, interactions, ledger
from cascade_lab.evidence import reference
from tests.cases import int32, offsets, random

pytestmark = pytest.mark.parametrize("backend", ["triton"], indirect=True)


@pytest.fixture(autouse=True)
def interpreted(loads):
    if loads is None:
        pytest.skip("the load recorder watches the interpreter")


def verify(loads, backend, length, topk, steps, heads, dim=64):
    """K tokens that the fused plan loads for one request with one row per node: by counter, by recorder, by ledger."""
    batch = VerifyBatch([length], [DraftTree.branches(topk, steps)], page_size=16, rows="node")
    H_q, H_kv = heads
    k, v = (random(batch.num_pages, 16, H_kv, dim, seed=i).half() for i in (1, 2))
    q, counted = random(batch.num_rows, H_q, dim, seed=3).half(), torch.zeros(H_kv, dtype=torch.int64)
    levels = batch.levels("fused")
    loads.register(q=q, k=k, v=v, **{n: x for n, x in vars(levels[0]).items() if isinstance(x, torch.Tensor)})
    cascade_attention(q, k, v, levels, reads=counted, backend=backend, num_splits=1)
    recorded = {loads[name].loaded_bytes // (dim * 2 * H_kv) for name in ("k", "v")}
    tokens = ledger(levels, num_q_heads=H_q, num_kv_heads=H_kv).tile_tokens(128)
    assert set(counted.tolist()) == recorded == {tokens}
    return tokens


@pytest.mark.parametrize(
    ("length", "topk", "steps", "heads", "expected"),
    [(2000, 4, 5, (8, 2), 2020), (2000, 4, 5, (8, 8), 2020), (1000, 8, 3, (8, 2), 1024), (200, 4, 3, (4, 1), 212)],
)
def test_a_tree_reads_each_key_once_per_kv_head(loads, backend, length, topk, steps, heads, expected):
    """12 to 24 rows in groups of 1 or 4: up to 96 packed rows in one tile."""
    assert verify(loads, backend, length, topk, steps, heads) == expected


def test_decoding_reads_each_key_once_per_kv_head(loads, backend):
    """Four requests with one row and 1000 keys each, 8 query heads on 2 KV heads."""
    k, v = (random(4, 1000, 2, 64, seed=i).half() for i in (1, 2))
    q, counted = random(4, 8, 64, seed=3).half(), torch.zeros(2, dtype=torch.int64)
    table, lengths = torch.arange(4, dtype=torch.int32)[:, None], int32([1000] * 4, "cpu")
    loads.register(q=q, k=k, v=v, table=table, lengths=lengths, reads=counted)
    attention(q, k, v, table, lengths, reads=counted, backend=backend, num_splits=1)
    assert counted.tolist() == [4000, 4000]
    assert loads["k"].loaded_bytes == loads["v"].loaded_bytes == 4000 * 2 * 64 * 2


def test_a_prefix_hit_prefill_wastes_little(loads, backend):
    """N = 1024, H = 512, groups of 4 in tiles of 128 x 64: 12,544 K tokens, and 4% more products than pairs."""
    n, hit, group = 1024, 512, 4
    k, v = (random(64, 16, 1, 64, seed=i).half() for i in (1, 2))
    q, counted = random(n - hit, group, 64, seed=3).half(), torch.zeros(1, dtype=torch.int64)
    table, lengths = torch.arange(64, dtype=torch.int32)[None], int32([n], "cpu")
    rows = offsets([n - hit], "cpu")
    loads.register(q=q, k=k, v=v, table=table, lengths=lengths, rows=rows, reads=counted)
    attention(q, k, v, table, lengths, cu_seqlens_q=rows, causal=True, reads=counted, backend=backend, num_splits=1)
    assert counted.tolist() == [12_544]
    products = sum(m * columns * times for (m, columns, _), times in loads.dots.items()) // 2
    assert products <= 1.041 * group * interactions(n, hit)


@pytest.mark.parametrize(
    ("dim", "dim_v", "shared"),
    [(192, 128, False), (192, 192, False), (320, 64, True), (576, 512, False), (576, 512, True)],
)
def test_head_dims_of_two_blocks_and_latent_caches(loads, backend, dim, dim_v, shared):
    """K in two blocks of columns; V a view of K's first columns, as in absorbed MLA, is loaded once with it."""
    k = random(8, 16, 1, dim, seed=1)
    v = k[..., :dim_v] if shared else random(8, 16, 1, dim_v, seed=2)
    q, rows = random(5, 4, dim, seed=3), offsets([2, 3], "cpu")
    table, lengths = torch.tensor([[3, 1, 0, 7], [2, 5, -1, -1]], dtype=torch.int32), int32([50, 19], "cpu")
    named = {"q": q, "k": k, "table": table, "lengths": lengths, "rows": rows} | ({} if shared else {"v": v})
    loads.register(**named)
    found = attention(q, k, v, table, lengths, cu_seqlens_q=rows, causal=True, backend=backend)
    exact = reference.attention_oracle(q, k, v, table, lengths, cu_seqlens_q=rows, causal=True)
    reference.assert_state_close(found, exact, atol=2e-5)
    if shared and dim_v == 512:
        assert loads["k"].loaded_bytes == 69 * dim * 4
