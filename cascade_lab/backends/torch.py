"""One attention pass in plain torch: blocked online softmax over a paged cache, with a blocked backward.

For a row with scores s_j = scale * q.k_j over its visible keys, the pass returns the state

    lse = ln sum_j exp(s_j),        o = sum_j exp(s_j - lse) v_j.

Keys arrive one block at a time. A running maximum m, sum l and accumulator a are enough, because a block whose
maximum is larger only rescales what was there: with M = max(m, max_j s_j),

    l <- l 2^(m - M) + sum_j 2^(s_j - M),        a <- a 2^(m - M) + sum_j 2^(s_j - M) v_j.

Scores are kept in base 2 (log2 e is folded into q): on a CPU torch's exp2, unlike its exp, stays fast on arguments
that underflow. The rows of the query heads that share a KV head are stacked, so one batched product per block
serves the group and no key is repeated. No array of size T x L exists, forward or backward. Nothing here checks
arguments: `cascade_lab.attention` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import threshold_

from cascade_lab import runtime
from cascade_lab.backends import Call, Pass
from cascade_lab.states import merge_state, merge_states

LOG2E = 1 / math.log(2)

# Elements, not bytes. Rows and scores of a block are sized for the L2 caches of a CPU; the token limit bounds the
# copies of K and V that paging or half precision force.
BLOCK_ROWS = 128
BLOCK_SCORES = 1 << 19
BLOCK_TOKENS = 1 << 20
MIN_BLOCK_KEYS = 64


def attend(q: Tensor, passes: Sequence[Pass], call: Call) -> tuple[Tensor, Tensor]:
    """State of every query row over the cached keys that the passes name.

    Shapes: q [T, H_q, D] with any strides; k_cache [P, page, H_kv, D] and v_cache [P, page, H_kv, D_v] with any
    strides and a unit last one; page_table [R, max_pages], cache_seqlens [R] and cu_seqlens_q [R + 1] int32.
    window_size is (left, right) around the key position i + K - Q of row i, -1 for no limit, so causal is
    (left, 0). tree_mask is int64 [T, words] over the last tail_seqlens[r] keys. reads, int64 [H_kv], gains the
    tokens loaded in the forward pass: a token counts once for every block of query rows that it is loaded for.

    Returns o [T, H_q, D_v] in out_dtype and lse [T, H_q] in natural log: float64 for float64 inputs, else float32,
    which is also the type that all arithmetic is done in. Rows that see no key get o = 0 and lse = -inf; sinks are
    merged in last, as a state of no value. Differentiable once, through o and lse, with respect to q, k_cache, v_cache
    and sinks.

    num_splits is accepted and has no effect: a state does not depend on how its keys were cut, and cutting only
    helps a device with more idle processors than row blocks. max_seqlen_q has none either.
    """
    states = []
    options = call.k_scale, call.v_scale, call.softmax_scale, call.softcap
    for one in passes:
        o, lse, loaded = _Attention.apply(q, one.k_cache, one.v_cache, one, *options)
        if call.reads is not None:
            call.reads.add_(loaded)
        states.append((o, lse))
    if len(states) > 1:
        o, lse = (torch.stack(parts, dim=1) for parts in zip(*states, strict=True))
        o, lse = merge_states(o, lse, backend="torch")
    if call.sinks is not None:
        nothing = o.new_zeros(o.shape[-1]).expand_as(o)
        o, lse = merge_state(o, lse, nothing, call.sinks.to(lse.dtype).expand_as(lse), backend="torch")
    return o.to(call.out_dtype), lse


class _Attention(torch.autograd.Function):
    """`_forward` with `attention_backward` as its derivative; what has a gradient stands beside the pass."""

    @staticmethod
    def forward(q: Tensor, _k: Tensor, _v: Tensor, one: Pass, *options) -> tuple[Tensor, Tensor, int]:
        return _forward(q, one, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        *differentiable, one, k_scale, v_scale, softmax_scale, softcap = inputs
        indices = (one.page_table, one.cache_seqlens, one.cu_seqlens_q, one.tree_mask, one.tail_seqlens)
        ctx.save_for_backward(*output[:2], *differentiable, *indices, k_scale, v_scale)
        ctx.constants = (*one.window_size, softmax_scale, softcap)

    @staticmethod
    def backward(ctx: Any, d_o: Tensor, d_lse: Tensor, _loaded: None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[:3]
        gradients = attention_backward(list(needs), d_o, d_lse, *ctx.saved_tensors, *ctx.constants)
        return *(x if need else None for x, need in zip(gradients, needs, strict=True)), *[None] * 5


@runtime.outside_autocast
def _forward(
    q: Tensor, one: Pass, k_scale: Tensor | None, v_scale: Tensor | None, softmax_scale: float, softcap: float
) -> tuple[Tensor, Tensor, int]:
    """o [T, H_q, D_v] and lse [T, H_q] in the working precision, and the tokens loaded per KV head."""
    plan = _plan(q, one, k_scale, softmax_scale, softcap)
    o = plan.q.new_empty(*plan.q.shape[:3], plan.values.dim, dtype=plan.dtype)
    lse = plan.q.new_empty(*plan.q.shape[:3], 1, dtype=plan.dtype)
    scratch = plan.scratch()
    loaded = 0
    for tile in plan.tiles():
        q = plan.packed_rows(tile)
        tile_o, tile_lse, tokens, biased = _online_softmax(plan, q, plan.key_blocks(tile), scratch)
        loaded += tokens
        if biased and bool(tile_o.sum().isnan()):
            # It may have come from a key that only other rows see, as 0 * NaN is NaN: let each row see its own keys.
            group = plan.q.shape[2]
            for i in range(tile.i0, tile.i1):
                rows = slice((i - tile.i0) * group, (i - tile.i0 + 1) * group)
                blocks = plan.row_blocks(tile, i)
                row_o, row_lse, tokens, _ = _online_softmax(plan, q[:, rows], blocks, scratch)
                tile_o[:, rows], tile_lse[:, rows] = row_o, row_lse
                loaded += tokens
        o[tile.rows], lse[tile.rows] = plan.unpacked(tile_o), plan.unpacked(tile_lse)
    if v_scale is not None:
        o *= v_scale[:, None, None]
    return o.flatten(1, 2), lse.flatten(1), loaded


def _online_softmax(
    plan: _Plan, q: Tensor, blocks: Iterator[_KeyBlock], scratch: Tensor
) -> tuple[Tensor, Tensor, int, bool]:
    """State of packed rows q [H_kv, n, D] over key blocks: o [H_kv, n, D_v], natural-log lse [H_kv, n, 1].

    Also the number of tokens loaded, and whether a block held keys that some of the rows do not see.
    """
    finfo = torch.finfo(q.dtype)
    smallest = math.log2(finfo.tiny)
    peak = total = acc = None
    loaded, biased = 0, False
    for block in blocks:
        s = _scores(plan, q, block, scratch)
        top = s.amax(-1, keepdim=True)
        if peak is not None:
            top = torch.maximum(top, peak)
        # -inf - -inf is NaN, so a row that has seen nothing yet is shifted by a finite number and stays at -inf.
        shift = top.clamp(min=finfo.min)
        # Weights that would be subnormal are far below rounding, and they slow a product down many times.
        p = threshold_(s.sub_(shift), smallest, -math.inf).exp2_()
        if peak is None:
            total, acc = p.sum(-1, keepdim=True), torch.bmm(p, block.v)
        else:
            decay = peak.sub_(shift).exp2_()
            total.mul_(decay).add_(p.sum(-1, keepdim=True))
            acc.mul_(decay).baddbmm_(p, block.v)
        peak = top
        loaded += block.k.shape[1]
        biased |= block.bias is not None
    if peak is None:
        empty_o = q.new_zeros(*q.shape[:2], plan.values.dim)
        return empty_o, q.new_full((*q.shape[:2], 1), -math.inf), 0, False
    lse = total.log2().add_(peak).div_(LOG2E)
    return acc.mul_(total.masked_fill_(total == 0, 1).reciprocal_()), lse, loaded, biased


def _scores(plan: _Plan, q: Tensor, block: _KeyBlock, scratch: Tensor, slope: Tensor | None = None) -> Tensor:
    """Base-2 scores [H_kv, n, keys] of packed rows in scratch memory: -inf, or NaN, at hidden keys.

    slope, of the same shape, receives the derivative 1 - tanh^2 of the softcap.
    """
    s = _shaped(scratch, q.shape[0], q.shape[1], block.k.shape[1])
    torch.bmm(q, block.k.transpose(1, 2), out=s)
    if plan.cap is not None:
        s.tanh_()
        if slope is not None:
            torch.square(s, out=slope).neg_().add_(1)
        s.mul_(plan.cap)
    if block.bias is not None:
        block.biased_part(s).add_(block.bias[:, None])
    return s


def _shaped(scratch: Tensor, *shape: int) -> Tensor:
    return scratch[: math.prod(shape)].view(shape)


@torch.library.custom_op("cascade_lab::attention_backward", mutates_args=())
def attention_backward(
    needs: list[bool],
    d_o: Tensor,
    d_lse: Tensor,
    o: Tensor,
    lse: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    tree_mask: Tensor | None,
    tail_seqlens: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    left: int,
    right: int,
    softmax_scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k_cache and v_cache over one pass; an empty tensor for one that `needs` leaves out.

    An operator, because its loops read lengths that a compiler does not know. (o, lse) may be the state over more
    keys than the pass reads, with gradients to match: the result is then the pass's share.

    Weights are recomputed as p = exp(s - lse). With d_p = d_o v^T the gradient of a score is
    p * (d_p - sum(d_o * o) + d_lse): the second term is what the normalisation takes back, the third is lse's own
    derivative. Slots that several requests read collect the sum of their gradients; slots that nobody reads get 0.
    """
    window = (left, right)
    one = Pass(k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, 0, window, tree_mask, tail_seqlens)
    return _gradients(q, one, k_scale, v_scale, softmax_scale, softcap, needs, d_o, d_lse, o, lse)


@runtime.outside_autocast
def _gradients(
    q: Tensor,
    one: Pass,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    softmax_scale: float,
    softcap: float,
    needs: list[bool],
    d_o: Tensor,
    d_lse: Tensor,
    o: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `attention_backward`, of one pass."""
    d_o, d_lse, o = (x.to(lse.dtype) for x in (d_o, d_lse, o))
    plan = _plan(q, one, k_scale, softmax_scale, softcap)
    need_q, need_k, need_v = needs
    d_q = plan.q.new_empty(plan.q.shape, dtype=plan.dtype)
    d_k = plan.q.new_zeros(plan.keys.cache.shape if need_k else 0, dtype=plan.dtype)
    d_v = plan.q.new_zeros(plan.values.cache.shape if need_v else 0, dtype=plan.dtype)

    # A row without keys has no weights and passes nothing on, whatever gradient arrives for it.
    empty = lse == -math.inf
    d_o = d_o.masked_fill(empty[..., None], 0)
    row_term = (d_lse - (d_o * o).sum(-1)).masked_fill_(empty, 0)
    norm = lse.masked_fill(empty, math.inf).mul_(LOG2E)
    heads = plan.q.shape[1:3]
    d_o, row_term, norm = (x.unflatten(1, heads) for x in (d_o, row_term[..., None], norm[..., None]))
    if v_scale is not None:
        d_o = d_o * v_scale[:, None, None]

    smallest = math.log2(torch.finfo(plan.dtype).tiny)
    scratch, d_scratch = plan.scratch(), plan.scratch()
    slope_scratch = None if plan.cap is None else plan.scratch()
    for tile in plan.tiles():
        q = plan.packed_rows(tile)
        tile_d_o, tile_term, tile_norm = (plan.packed(x[tile.rows]) for x in (d_o, row_term, norm))
        tile_d_q = torch.zeros_like(q)
        for block in plan.key_blocks(tile):
            k, rows = block.k, q
            shape = (*q.shape[:2], k.shape[1])
            slope = None if slope_scratch is None else _shaped(slope_scratch, *shape)
            s = _scores(plan, q, block, scratch, slope)
            p = threshold_(s.sub_(tile_norm), smallest, -math.inf).exp2_()
            d_s = torch.bmm(tile_d_o, block.v.transpose(1, 2), out=_shaped(d_scratch, *shape))
            d_s.add_(tile_term).mul_(p)
            if slope is not None:
                d_s.mul_(slope)
            if block.bias is not None and not all(bool(x.isfinite().all()) for x in (d_s, k, q)):
                # A hidden key's zero weight must stay zero beside NaN or infinity. Where such a key is seen, p and d_s
                # are NaN themselves, so its factor may be dropped.
                hidden = (block.bias != 0)[:, None]
                block.biased_part(p).masked_fill_(hidden, 0)
                block.biased_part(d_s).masked_fill_(hidden, 0)
                k, rows = (x.nan_to_num(0, 0, 0) for x in (k, q))
            if need_q:
                tile_d_q.baddbmm_(d_s, k)
            if need_k:
                _accumulate(d_k, block.slots, torch.bmm(d_s.transpose(1, 2), rows).mul_(plan.k_factor))
            if need_v:
                _accumulate(d_v, block.slots, torch.bmm(p.transpose(1, 2), tile_d_o))
        d_q[tile.rows] = plan.unpacked(tile_d_q.mul_(plan.softmax_scale))
    d_q = d_q.flatten(1, 2) if need_q else d_q.new_empty(0)
    return d_q.to(plan.q.dtype), d_k.to(plan.q.dtype), d_v.to(plan.q.dtype)


@attention_backward.register_fake
def _(needs, d_o, d_lse, o, lse, q, k_cache, v_cache, *_rest):
    return tuple(q.new_empty(x.shape if need else 0) for x, need in zip((q, k_cache, v_cache), needs, strict=True))


def _refuse_second_derivative(ctx: Any, *_: Tensor) -> None:
    raise RuntimeError("attention on the torch backend is once_differentiable: its gradient has no gradient")


attention_backward.register_autograd(_refuse_second_derivative)


def _accumulate(gradient: Tensor, slots: slice | Tensor, block: Tensor) -> None:
    """Add block [H_kv, n, D] to a contiguous cache gradient at flat slots, which may repeat."""
    flat, block = gradient.flatten(0, 1), block.transpose(0, 1)
    if isinstance(slots, slice):
        flat[slots] += block
    else:
        flat.index_add_(0, slots.to(flat.device), block)


class _KeyBlock(NamedTuple):
    """Keys and values of one block, [H_kv, n, D] and [H_kv, n, D_v], and what is hidden of keys [start, stop)."""

    k: Tensor
    v: Tensor
    slots: slice | Tensor
    start: int = 0
    stop: int = 0
    bias: Tensor | None = None  # [rows, stop - start], 0 or -inf; all rows see the other keys

    def biased_part(self, x: Tensor) -> Tensor:
        """View [H_kv, rows, G, stop - start] of x [H_kv, rows * G, n]."""
        assert self.bias is not None
        return x.view(x.shape[0], len(self.bias), -1, x.shape[2])[..., self.start : self.stop]


@dataclass(frozen=True)
class _Request:
    """The rows [row, row + rows) of one request, the keys they may see, and where those keys are stored."""

    row: int
    rows: int
    keys: int
    pages: Tensor  # int32 on the host, just the pages that hold the keys
    left: int
    right: int
    tree: Tensor | None  # int64 [rows, words]
    tail: int

    def span(self, i0: int, i1: int) -> tuple[int, int]:
        """Keys [lo, hi) outside of which no row in [i0, i1) sees anything."""
        first, last = i0 + self.keys - self.rows, i1 - 1 + self.keys - self.rows
        lo = max(0, first - self.left) if self.left >= 0 else 0
        hi = min(self.keys, last + self.right + 1) if self.right >= 0 else self.keys
        return lo, hi

    def common(self, i0: int, i1: int) -> tuple[int, int]:
        """Keys [lo, hi) that every row in [i0, i1) sees; lo > hi is possible and means none."""
        if self.tree is not None:
            return 0, max(0, self.keys - self.tail)
        first, last = i0 + self.keys - self.rows, i1 - 1 + self.keys - self.rows
        lo = max(0, last - self.left) if self.left >= 0 else 0
        hi = min(self.keys, first + self.right + 1) if self.right >= 0 else self.keys
        return lo, hi

    def bias(self, i0: int, i1: int, a: int, b: int, like: Tensor) -> Tensor:
        """[i1 - i0, b - a] with the dtype and device of like: 0 where the row sees the key, else -inf."""
        bias = like.new_zeros(i1 - i0, b - a)
        if self.tree is not None:
            words = self.tree.shape[1]
            bit = torch.arange(a, b, device=like.device) - (self.keys - self.tail)
            marked = (self.tree[i0:i1, (bit // 64).clamp(0, words - 1)] >> (bit % 64)) & 1 == 1
            return bias.masked_fill_((bit >= 0) & ~(marked & (bit < 64 * words)), -math.inf)
        # Row x and column y stand for position first + x and key a + y.
        first = i0 + self.keys - self.rows
        if self.left >= 0:
            bias += torch.full_like(bias, -math.inf).tril_(first - self.left - a - 1)
        if self.right >= 0:
            bias += torch.full_like(bias, -math.inf).triu_(first + self.right - a + 1)
        return bias

    def slots(self, a: int, b: int, page_size: int) -> slice | Tensor:
        """Flat token slots (page * page_size + offset) of keys [a, b): a slice when they are consecutive."""
        first = a // page_size
        pages = self.pages[first : (b - 1) // page_size + 1].long()
        if len(pages) == 1 or bool((pages.diff() == 1).all()):
            start = int(pages[0]) * page_size + a - first * page_size
            return slice(start, start + b - a)
        token = torch.arange(a, b, device=pages.device)
        return pages[token // page_size - first] * page_size + token % page_size


class _Tile(NamedTuple):
    """Rows [i0, i1) of a request, which stand at `rows` in q, and the number of keys they take at a time."""

    request: _Request
    i0: int
    i1: int
    rows: slice
    block_keys: int


class _Cache:
    """Reads tokens of a paged cache [P, page, H_kv, D] as [H_kv, n, D] in the working precision.

    Tokens that lie in a row in memory come as a view. Others are gathered, those and no others, into a buffer that
    the next load overwrites.
    """

    def __init__(self, cache: Tensor, max_tokens: int, dtype: torch.dtype) -> None:
        self.cache = cache
        pages, self.page_size, num_heads, self.dim = cache.shape
        self.flat: Tensor | None = None
        if pages == 1 or cache.stride(0) == self.page_size * cache.stride(1):
            self.flat = cache.as_strided((pages * self.page_size, num_heads, self.dim), cache.stride()[1:])
        self.gathered = cache.new_empty(max_tokens, num_heads, self.dim)
        self.widened = None if cache.dtype == dtype else torch.empty_like(self.gathered, dtype=dtype)

    def load(self, slots: slice | Tensor) -> Tensor:
        block = self._consecutive(slots) if isinstance(slots, slice) else self._gather(slots)
        if self.widened is not None:
            block = self.widened[: len(block)].copy_(block)
        return block.transpose(0, 1)

    def _consecutive(self, slots: slice) -> Tensor:
        if self.flat is not None:
            return self.flat[slots]
        page = slots.start // self.page_size
        if page == (slots.stop - 1) // self.page_size:
            return self.cache[page, slots.start - page * self.page_size : slots.stop - page * self.page_size]
        return self._gather(torch.arange(slots.start, slots.stop, device=self.cache.device))

    def _gather(self, slots: Tensor) -> Tensor:
        slots = slots.to(self.cache.device)
        if self.flat is not None:
            return torch.index_select(self.flat, 0, slots, out=self.gathered[: len(slots)])
        return self.cache[slots // self.page_size, slots % self.page_size]


@dataclass(frozen=True)
class _Plan:
    """One pass, cut into tiles: what the forward and the backward loop share."""

    q: Tensor  # [T, H_kv, G, D]
    keys: _Cache
    values: _Cache
    requests: list[_Request]
    block_shapes: list[tuple[int, int]]  # rows and keys, by request
    dtype: torch.dtype
    softmax_scale: float | Tensor  # with k_scale [H_kv, 1, 1], and so q_factor
    q_factor: float | Tensor  # q * q_factor gives base-2 scores, or the argument of tanh when there is a cap
    cap: float | None  # factor of tanh, in base 2
    k_factor: float  # q_factor * k_factor = softmax_scale

    def tiles(self) -> Iterator[_Tile]:
        for request, (rows, keys) in zip(self.requests, self.block_shapes, strict=True):
            for i0 in range(0, request.rows, rows):
                i1 = min(request.rows, i0 + rows)
                yield _Tile(request, i0, i1, slice(request.row + i0, request.row + i1), keys)

    def scratch(self) -> Tensor:
        """Memory for the scores of one block of any tile."""
        per_row = self.q.shape[1] * self.q.shape[2]
        size = max((rows * keys * per_row for rows, keys in self.block_shapes), default=0)
        return self.q.new_empty(size, dtype=self.dtype)

    def packed(self, x: Tensor) -> Tensor:
        """[n, H_kv, G, D] -> [H_kv, n * G, D] in the working precision, contiguous and new."""
        n, num_kv_heads, group, dim = x.shape
        packed = x.new_empty(num_kv_heads, n * group, dim, dtype=self.dtype)
        packed.view(num_kv_heads, n, group, dim).copy_(x.transpose(0, 1))
        return packed

    def packed_rows(self, tile: _Tile) -> Tensor:
        """The tile's rows of q, packed and scaled."""
        return self.packed(self.q[tile.rows]).mul_(self.q_factor)

    def unpacked(self, x: Tensor) -> Tensor:
        """[H_kv, n * G, D] -> [n, H_kv, G, D], a view."""
        return x.unflatten(1, (-1, self.q.shape[2])).transpose(0, 1)

    def key_blocks(self, tile: _Tile) -> Iterator[_KeyBlock]:
        """The key blocks that some row of the tile sees, in order."""
        request, i0, i1, _, size = tile
        lo, hi = request.span(i0, i1)
        common_lo, common_hi = request.common(i0, i1)
        for a in range(lo, hi, size):
            b = min(hi, a + size)
            slots = request.slots(a, b, self.keys.page_size)
            k, v = self.keys.load(slots), self.values.load(slots)
            start = a if a < common_lo else max(a, common_hi)
            stop = b if b > common_hi else min(b, common_lo)
            if start < stop:
                yield _KeyBlock(k, v, slots, start - a, stop - a, request.bias(i0, i1, start, stop, k))
            else:
                yield _KeyBlock(k, v, slots)

    def row_blocks(self, tile: _Tile, i: int) -> Iterator[_KeyBlock]:
        """The keys that row i of the tile's request sees and no others, so that no block needs a bias."""
        request, size = tile.request, tile.block_keys
        lo, hi = request.span(i, i + 1)
        for a in range(lo, hi, size):
            b = min(hi, a + size)
            slots = request.slots(a, b, self.keys.page_size)
            visible = (request.bias(i, i + 1, a, b, self.q)[0] == 0).cpu()
            if not visible.all():
                slots = (
                    torch.arange(slots.start, slots.stop, device=visible.device) if isinstance(slots, slice) else slots
                )
                slots = slots[visible]
            if visible.any():
                yield _KeyBlock(self.keys.load(slots), self.values.load(slots), slots)


def _plan(q: Tensor, one: Pass, k_scale: Tensor | None, softmax_scale: float, softcap: float) -> _Plan:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    page_size, num_kv_heads, value_dim = one.v_cache.shape[1:]
    num_heads, head_dim = q.shape[1:]
    group = num_heads // num_kv_heads

    bounds, lengths = one.cu_seqlens_q.tolist(), one.cache_seqlens.tolist()
    rows = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
    tails = rows if one.tail_seqlens is None else one.tail_seqlens.tolist()
    table, (left, right) = one.page_table.to("cpu"), one.window_size
    requests = [
        _Request(
            row=bounds[r],
            rows=rows[r],
            keys=lengths[r],
            pages=table[r, : -(-lengths[r] // page_size)],
            left=left,
            right=right,
            tree=None if one.tree_mask is None else one.tree_mask[bounds[r] : bounds[r + 1]],
            tail=tails[r],
        )
        for r in range(len(lengths))
        if rows[r] > 0
    ]
    block_shapes = [_block_shape(request, group, num_kv_heads, max(head_dim, value_dim)) for request in requests]
    max_tokens = max((keys for _, keys in block_shapes), default=0)
    capped = softcap > 0
    scale = softmax_scale if k_scale is None else softmax_scale * k_scale.to(dtype)[:, None, None]
    return _Plan(
        q=q.unflatten(1, (num_kv_heads, group)),
        keys=_Cache(one.k_cache, max_tokens, dtype),
        values=_Cache(one.v_cache, max_tokens, dtype),
        requests=requests,
        block_shapes=block_shapes,
        dtype=dtype,
        softmax_scale=scale,
        q_factor=scale / softcap if capped else scale * LOG2E,
        cap=softcap * LOG2E if capped else None,
        k_factor=softcap if capped else 1 / LOG2E,
    )


def _block_shape(request: _Request, group: int, num_kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Query rows and keys per block: few rows take many keys at a time, so that the products stay large."""
    rows = max(1, min(request.rows, BLOCK_ROWS // group))
    keys = min(BLOCK_SCORES // (num_kv_heads * rows * group), BLOCK_TOKENS // (num_kv_heads * head_dim))
    return rows, max(1, min(request.keys, max(MIN_BLOCK_KEYS, keys)))
