"""Other attention kernels on the same verify work, each in the layout and with the call it likes best.

A peer gets the tree as whatever it understands: a dense mask, a mask function, a packed mask, or expanded requests. The
group is packed into the rows where the kernel does not do so itself. A backend that is asked for by name runs or fails.
Nothing here is imported before it is asked for, and what a peer raises is for the caller to note.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
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


def sdpa(work: VerifyWork, max_autotune: bool = False, backend: SDPBackend | None = None) -> Peer:
    """PyTorch's scaled_dot_product_attention with a dense mask; the group is packed into rows.

    Args:
        backend: the only one that may run; PyTorch's choice by default.
    """
    q, k, v = work.dense()
    requests, num_kv_heads, keys = k.shape[:3]
    group = q.shape[1] // num_kv_heads
    q = q.view(requests, num_kv_heads, -1, q.shape[-1])
    visible = work.visible().repeat(1, group, 1)
    prefix = torch.ones(*visible.shape[:2], keys - visible.shape[2], dtype=torch.bool, device=q.device)
    mask = torch.cat((prefix, visible), -1)[:, None]

    def call() -> Tensor:
        o = _on(backend, lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask))
        return work.packed(o.view(requests, num_kv_heads * group, -1, o.shape[-1]))

    return Peer(f"SDPA{_named(backend)}, dense mask, group packed", call)


def sdpa_cudnn(work: VerifyWork, max_autotune: bool = False) -> Peer:
    """cuDNN's attention with a dense mask, through PyTorch."""
    return sdpa(work, backend=SDPBackend.CUDNN_ATTENTION)


def sdpa_efficient(work: VerifyWork, max_autotune: bool = False) -> Peer:
    """PyTorch's memory-efficient kernel with a dense mask."""
    return sdpa(work, backend=SDPBackend.EFFICIENT_ATTENTION)


def sdpa_flash(work: VerifyWork, max_autotune: bool = False) -> Peer:
    """PyTorch's flash kernel, which takes no mask: virtual requests, each with dense keys of its own.

    The copies are made outside of the timed call; where they do not fit into memory, that is the reason for no time.
    """
    from torch.nn.attention.bias import causal_lower_right

    level, page = work.expanded, work.k.shape[1]
    lengths = {int(n) for n in level.cache_seqlens}
    q = work.q.view(len(level.page_table), -1, *work.q.shape[1:]).transpose(1, 2).contiguous()
    if len(lengths) > 1:
        raise ValueError("virtual requests of different lengths, and the kernel takes dense keys of one length")
    (keys,) = lengths
    table = level.page_table[:, : -(-keys // page)].long()
    k, v = (x[table].flatten(1, 2)[:, :keys].transpose(1, 2).contiguous() for x in (work.k, work.v))
    bias = causal_lower_right(q.shape[2], keys) if level.causal else None
    grouped = q.shape[1] != k.shape[1]

    def call() -> Tensor:
        o = _on(
            SDPBackend.FLASH_ATTENTION,
            lambda: scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=grouped),
        )
        return o.transpose(1, 2).reshape(work.q.shape)

    return Peer(f"SDPA{_named(SDPBackend.FLASH_ATTENTION)}, virtual requests", call)


def _on(backend: SDPBackend | None, call: Callable[[], Tensor]) -> Tensor:
    if backend is None:
        return call()
    with sdpa_kernel(backend):
        return call()


def _named(backend: SDPBackend | None) -> str:
    return "" if backend is None else f" {backend.name.removesuffix('_ATTENTION').lower()}"


def flex_attention(work: VerifyWork, max_autotune: bool = False) -> Peer:
    """FlexAttention with the tree as a mask function; compiled where there is a GPU, before it is returned."""
    q, k, v = work.dense()
    name = "FlexAttention"
    if q.device.type == "cuda":
        name += ", max-autotune" if max_autotune else ", default"
    function = compile_flex_attention(q, k, v, work.visible(), max_autotune=max_autotune)
    return Peer(name, lambda: work.packed(function()))


def compile_flex_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, max_autotune: bool = False
) -> Callable[[], Tensor]:
    """FlexAttention of q [B, H_q, rows, D] on k, v [B, H_kv, keys, D], compiled for these shapes and run once.

    Args:
        visible: [B, rows, drafts] bool, what each row sees of the last keys; those before them it sees all.
        max_autotune: try many tiles, which takes minutes.
    """
    from torch.nn.attention import flex_attention as flex

    prefix = k.shape[2] - visible.shape[2]

    def tree(b, h, i, j):
        return (j < prefix) | visible[b, i, (j - prefix).clamp(min=0)]

    mask = flex.create_block_mask(tree, len(q), None, q.shape[2], k.shape[2], device=q.device)
    function = flex.flex_attention
    if q.device.type == "cuda":
        torch.compiler.reset()
        mode = "max-autotune-no-cudagraphs" if max_autotune else None
        function = torch.compile(function, dynamic=False, mode=mode)

    def call() -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(q, k, v, block_mask=mask, enable_gqa=True)

    call()
    return call


def flashinfer_tree(work: VerifyWork, max_autotune: bool = False) -> Peer:
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


def flash_attention_3(work: VerifyWork, max_autotune: bool = False) -> Peer:
    """FlashAttention-3 on virtual requests: it packs the group and splits the keys, and knows no tree."""
    from flash_attn_interface import flash_attn_with_kvcache

    return Peer("FlashAttention-3, virtual requests", _expanded(work, flash_attn_with_kvcache, "page_table"))


def flash_attention_2(work: VerifyWork, max_autotune: bool = False) -> Peer:
    """FlashAttention-2's paged decode on virtual requests: it packs the group and splits the keys."""
    from flash_attn import flash_attn_with_kvcache

    return Peer("FlashAttention-2, virtual requests", _expanded(work, flash_attn_with_kvcache, "block_table"))


def vllm_flash_attention(work: VerifyWork, max_autotune: bool = False) -> Peer:
    """The flash attention that vLLM builds, on virtual requests and the paged cache."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    options = _varlen(work) | {"causal": work.expanded.causal}
    return Peer("vLLM flash attention, virtual requests", lambda: _only_o(flash_attn_varlen_func(**options)))


def vllm_unified_attention(work: VerifyWork, max_autotune: bool = False) -> Peer:
    """vLLM's Triton kernel for prefill and decode, on virtual requests and the paged cache; it knows causal alone."""
    try:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    except ImportError:
        from vllm.attention.ops.triton_unified_attention import unified_attention

    o = torch.empty_like(work.q)
    options = _varlen(work) | {
        "out": o,
        "softmax_scale": work.q.shape[-1] ** -0.5,
        "causal": True,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "q_descale": None,
        "k_descale": torch.ones(1, device=o.device),
        "v_descale": torch.ones(1, device=o.device),
    }

    def call() -> Tensor:
        unified_attention(**options)
        return o

    return Peer("vLLM unified attention, virtual requests", call)


def _varlen(work: VerifyWork) -> dict[str, object]:
    """Virtual requests as packed rows with offsets, the way vLLM's kernels take them."""
    level = work.expanded
    return {
        "q": work.q,
        "k": work.k,
        "v": work.v,
        "cu_seqlens_q": level.cu_seqlens_q,
        "max_seqlen_q": len(work.q) // len(level.page_table),
        "seqused_k": level.cache_seqlens,
        "max_seqlen_k": int(level.cache_seqlens.max()),
        "block_table": level.page_table.clamp(min=0),
    }


def _expanded(work: VerifyWork, function: Callable, table_name: str) -> Callable[[], Tensor]:
    table = work.expanded.page_table.clamp(min=0)
    options = {"cache_seqlens": work.expanded.cache_seqlens, table_name: table, "causal": work.expanded.causal}
    q = work.q.view(len(table), -1, *work.q.shape[1:])
    return lambda: _only_o(function(q, work.k, work.v, **options)).flatten(0, 1)


def _only_o(returned: Tensor | tuple) -> Tensor:
    return returned[0] if isinstance(returned, tuple) else returned


# by the name under which an absent one is reported
VERIFY_PEERS: Mapping[str, Callable[[VerifyWork, bool], Peer]] = {
    "SDPA": sdpa,
    "SDPA cudnn": sdpa_cudnn,
    "SDPA flash": sdpa_flash,
    "SDPA efficient": sdpa_efficient,
    "FlexAttention": flex_attention,
    "FlashInfer": flashinfer_tree,
    "FlashAttention-3": flash_attention_3,
    "FlashAttention-2": flash_attention_2,
    "vLLM flash attention": vllm_flash_attention,
    "vLLM unified attention": vllm_unified_attention,
}


def sdpa_causal(q: Tensor, k_cache: Tensor, v_cache: Tensor, level: Level, backend: SDPBackend | None = None) -> Peer:
    """SDPA's causal prefill of a whole prompt, q [N, H_q, D], on dense keys."""
    rows, k, v = (x.transpose(0, 1)[None].contiguous() for x in (q, *_dense_prompt(q, k_cache, v_cache, level)))
    grouped = rows.shape[1] != k.shape[1]

    def call() -> Tensor:
        o = _on(backend, lambda: scaled_dot_product_attention(rows, k, v, is_causal=True, enable_gqa=grouped))
        return o[0].transpose(0, 1)

    return Peer(f"SDPA{_named(backend)}, causal", call)


def flash_attention_3_causal(q: Tensor, k_cache: Tensor, v_cache: Tensor, level: Level) -> Peer:
    """FlashAttention-3's causal prefill on dense keys."""
    from flash_attn_interface import flash_attn_func

    return Peer("FlashAttention-3, causal", _dense_call(flash_attn_func, q, k_cache, v_cache, level))


def flash_attention_2_causal(q: Tensor, k_cache: Tensor, v_cache: Tensor, level: Level) -> Peer:
    """FlashAttention-2's causal prefill on dense keys."""
    from flash_attn import flash_attn_func

    return Peer("FlashAttention-2, causal", _dense_call(flash_attn_func, q, k_cache, v_cache, level))


def _dense_call(function: Callable, q: Tensor, k_cache: Tensor, v_cache: Tensor, level: Level) -> Callable[[], Tensor]:
    dense = [x[None].contiguous() for x in (q, *_dense_prompt(q, k_cache, v_cache, level))]
    return lambda: _only_o(function(*dense, causal=True))[0]


def _dense_prompt(q: Tensor, k_cache: Tensor, v_cache: Tensor, level: Level) -> list[Tensor]:
    """k and v [N, H_kv, D] of the one request, its pages in order."""
    table = level.page_table[0].long()
    return [x[table].flatten(0, 1)[: len(q)] for x in (k_cache, v_cache)]


# called with q [N, H_q, D], both caches and the causal level of one prompt
PREFILL_PEERS: Mapping[str, Callable[[Tensor, Tensor, Tensor, Level], Peer]] = {
    "SDPA": sdpa_causal,
    "SDPA cudnn": partial(sdpa_causal, backend=SDPBackend.CUDNN_ATTENTION),
    "SDPA flash": partial(sdpa_causal, backend=SDPBackend.FLASH_ATTENTION),
    "FlashAttention-3": flash_attention_3_causal,
    "FlashAttention-2": flash_attention_2_causal,
}
