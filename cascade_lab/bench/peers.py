"""Other attention kernels on the same verify work, each in the layout and with the call it likes best.

A peer gets the tree as whatever it understands: a dense mask, a mask function, a packed mask, or expanded requests. The
group is packed into the rows where the kernel does not do so itself. Nothing here is imported before it is asked for,
and what a peer raises is for the caller to note.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cascade_lab.drafts import VerifyBatch
from cascade_lab.levels import Level

_WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True)
class Peer:
    """A foreign kernel ready to run: `call()` returns o `[T, H_q, D]`."""

    name: str
    call: Callable[[], Tensor]


@dataclass(frozen=True)
class VerifyWork:
    """One batch of equal requests: q [T, H_q, D], caches [P, page, H_kv, D], its pages, and what it expands into."""

    q: Tensor
    k: Tensor
    v: Tensor
    batch: VerifyBatch
    expanded: Level

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H_q, rows, D] and contiguous k, v [B, H_kv, L + nodes, D], the pages in order."""
        requests = len(self.batch.trees)
        keys = self.batch.prefix_lens[0] + self.batch.trees[0].size
        table = self.batch.page_table.long()
        q = self.q.view(requests, -1, *self.q.shape[1:]).transpose(1, 2).contiguous()
        k, v = (x[table].flatten(1, 2)[:, :keys].transpose(1, 2).contiguous() for x in (self.k, self.v))
        return q, k, v

    def visible(self) -> Tensor:
        """[B, rows, nodes] bool: what each row sees of its request's drafts."""
        masks = []
        nodes = self.batch.row_nodes.cpu().split(self.batch.row_counts)
        for tree, rows in zip(self.batch.trees, nodes, strict=True):
            masks.append(tree.dense_mask()[rows])
        return torch.stack(masks).to(self.q.device)

    def packed(self, o: Tensor) -> Tensor:
        """o [B, H_q, rows, D] as [T, H_q, D]."""
        return o.transpose(1, 2).reshape(self.q.shape)


def sdpa(work: VerifyWork, max_autotune: bool) -> Peer:
    """PyTorch's scaled_dot_product_attention with a dense mask; the group is packed into rows."""
    q, k, v = work.dense()
    requests, num_kv_heads, keys = k.shape[:3]
    group = q.shape[1] // num_kv_heads
    q = q.view(requests, num_kv_heads, -1, q.shape[-1])
    visible = work.visible().repeat(1, group, 1)
    prefix = torch.ones(*visible.shape[:2], keys - visible.shape[2], dtype=torch.bool, device=q.device)
    mask = torch.cat((prefix, visible), -1)[:, None]

    def call() -> Tensor:
        o = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return work.packed(o.view(requests, num_kv_heads * group, -1, o.shape[-1]))

    return Peer("SDPA, dense mask, group packed", call)


def flex_attention(work: VerifyWork, max_autotune: bool) -> Peer:
    """FlexAttention with the tree as a mask function; compiled where there is a GPU."""
    from torch.nn.attention import flex_attention as flex

    q, k, v = work.dense()
    prefix, visible = work.batch.prefix_lens[0], work.visible()
    requests, rows, keys = len(q), q.shape[2], k.shape[2]

    def tree(b, h, i, j):
        return (j < prefix) | visible[b, i, (j - prefix).clamp(min=0)]

    mask = flex.create_block_mask(tree, requests, None, rows, keys, device=q.device)
    function = flex.flex_attention
    name = "FlexAttention"
    if q.device.type == "cuda":
        torch.compiler.reset()
        mode = "max-autotune-no-cudagraphs" if max_autotune else None
        function = torch.compile(function, dynamic=False, mode=mode)
        name += ", max-autotune" if max_autotune else ", default"

    def call() -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return work.packed(function(q, k, v, block_mask=mask, enable_gqa=True))

    return Peer(name, call)


def flashinfer_tree(work: VerifyWork, max_autotune: bool) -> Peer:
    """FlashInfer's paged prefill with a packed custom mask; planned once, then only run."""
    import flashinfer

    device, batch = work.q.device, work.batch
    page, keys = work.k.shape[1], batch.prefix_lens[0] + batch.trees[0].size
    requests, pages = len(batch.trees), -(-keys // page)
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    visible = work.visible()
    prefix = torch.ones(*visible.shape[:2], keys - visible.shape[2], dtype=torch.bool, device=device)
    wrapper.plan(
        torch.arange(requests + 1, dtype=torch.int32, device=device) * visible.shape[1],
        torch.arange(requests + 1, dtype=torch.int32, device=device) * pages,
        batch.page_table[:, :pages].reshape(-1).contiguous(),
        torch.full((requests,), keys - (pages - 1) * page, dtype=torch.int32, device=device),
        work.q.shape[1],
        work.k.shape[2],
        work.q.shape[2],
        page,
        custom_mask=torch.cat((prefix, visible), -1).flatten(),
        q_data_type=work.q.dtype,
    )
    return Peer("FlashInfer, custom mask", lambda: wrapper.run(work.q, (work.k, work.v)))


def flash_attention_3(work: VerifyWork, max_autotune: bool) -> Peer:
    """FlashAttention-3 on virtual requests: it packs the group and splits the keys, and knows no tree."""
    from flash_attn_interface import flash_attn_with_kvcache

    return Peer("FlashAttention-3, virtual requests", _expanded(work, flash_attn_with_kvcache, "page_table"))


def flash_attention_2(work: VerifyWork, max_autotune: bool) -> Peer:
    """FlashAttention-2's paged decode on virtual requests: it packs the group and splits the keys."""
    from flash_attn import flash_attn_with_kvcache

    return Peer("FlashAttention-2, virtual requests", _expanded(work, flash_attn_with_kvcache, "block_table"))


def _expanded(work: VerifyWork, function: Callable, table_name: str) -> Callable[[], Tensor]:
    table = work.expanded.page_table.clamp(min=0)
    options = {"cache_seqlens": work.expanded.cache_seqlens, table_name: table, "causal": work.expanded.causal}
    q = work.q.view(len(table), -1, *work.q.shape[1:])

    def call() -> Tensor:
        o = function(q, work.k, work.v, **options)
        return (o[0] if isinstance(o, tuple) else o).flatten(0, 1)

    return call


VERIFY_PEERS = (sdpa, flex_attention, flashinfer_tree, flash_attention_3, flash_attention_2)


def sdpa_causal(q: Tensor, k_cache: Tensor, v_cache: Tensor, level: Level) -> Peer:
    """SDPA's causal prefill of a whole prompt, q [N, H_q, D], on dense keys."""
    table = level.page_table[0].long()
    dense = [x[table].flatten(0, 1)[: len(q)].transpose(0, 1)[None].contiguous() for x in (k_cache, v_cache)]
    rows = q.transpose(0, 1)[None].contiguous()
    grouped = rows.shape[1] != dense[0].shape[1]

    def call() -> Tensor:
        return scaled_dot_product_attention(rows, *dense, is_causal=True, enable_gqa=grouped)[0].transpose(0, 1)

    return Peer("SDPA, causal", call)
