"""One attention pass in one launch: paged, ragged, GQA packed, keys optionally split, state output.

A program owns BLOCK_M packed rows (query row x head of the group) of one KV head and one split of the keys. Packing is
what makes the group share a tile: a K row is loaded once per KV head and row tile, not once per query head. Keys go by
in three runs of tiles: those that only some rows see on the left (a window), those that all rows see (no mask at all),
and those that only some rows see on the right (the diagonal, a tree's tail, the last partial tile).

    s = scale q k^T,  m' = max(m, max s),  l' = l e^(m - m') + sum e^(s - m'),  acc' = acc e^(m - m') + e^(s - m') v

in powers of two; at the end o = acc / l and lse = ln 2 (m + log2 l). A row's first part begins with the sink instead of
nothing, m = sink / ln 2 and l = 1: it is a score that brings no value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from cascade_lab import runtime
from cascade_lab.backends import Call, Pass
from cascade_lab.backends.triton.config import Tile, converts_float8, head_blocks, rows_of, splits_for, tile_for
from cascade_lab.backends.triton.merge import NEG_INF, POS_INF, merge_many, round_to
from cascade_lab.backends.triton.mode import jit, run_kernel

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@jit
def _tanh(x):
    """tanh from exp alone; near 0, where 1 - e cancels, its Taylor polynomial (error below 1e-8 for |x| < 1/4)."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    x2 = x * x
    near = x * (1.0 + x2 * (-1.0 / 3 + x2 * (2.0 / 15 + x2 * (-17.0 / 315 + x2 * (62.0 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))


@jit
def _dot_operand(x, INTERPRETED: tl.constexpr):
    """The interpreter multiplies bfloat16 as 16-bit integers, so it gets float32 operands."""
    return x.to(tl.float32) if INTERPRETED else x


@jit
def _visible_span(i_lo, i_hi, Q, K, tail, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, TREE: tl.constexpr):
    """Keys [lo, hi) that some row of i_lo..i_hi sees, and [all_lo, all_hi) that every one of them sees."""
    lo = 0
    hi = K
    all_lo = 0
    all_hi = K
    if TREE:
        all_hi = K - tail
    if LEFT:
        lo = tl.maximum(0, i_lo + K - Q - left)
        all_lo = tl.maximum(0, i_hi + K - Q - left)
    if RIGHT:
        hi = tl.maximum(0, tl.minimum(K, i_hi + K - Q + right + 1))
        all_hi = tl.maximum(0, tl.minimum(K, i_lo + K - Q + right + 1))
    return lo, hi, all_lo, all_hi


@jit
def _tree_visible(mask_ptr, o_mask, stride_mask_word, m_row, first, WORDS: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_M, BLOCK_N] visibility of the keys from tail position `first` on; keys before the tail are visible.

    The 64 mask bits are aligned to the tile once per row, then tested in 32 bits.
    """
    tl.static_assert(BLOCK_N <= 64)
    # a block of one number, for versions differ in what a scalar does to a block of truth values
    i_word = tl.zeros_like(m_row.to(tl.int32)) + tl.maximum(first, 0) // 64
    shift = (tl.maximum(first, 0) % 64).to(tl.uint64)
    p_word = mask_ptr + o_mask + i_word.to(tl.int64) * stride_mask_word
    low = tl.load(p_word, mask=m_row & (i_word < WORDS), other=0).to(tl.uint64, bitcast=True)
    high = tl.load(p_word + stride_mask_word, mask=m_row & (i_word + 1 < WORDS), other=0).to(tl.uint64, bitcast=True)
    # two shifts each, for a shift by 64 is undefined; ones come in for the keys before the tail
    bits = (low >> shift) | ((high << (63 - shift)) << 1)
    before = tl.minimum(tl.maximum(-first, 0), 64)
    half, rest = (before // 2).to(tl.uint64), (before - before // 2).to(tl.uint64)
    bits = ((bits << half) << rest) | (((tl.full([1], 1, tl.uint64) << half) << rest) - 1)
    column = tl.arange(0, BLOCK_N)[None, :]
    word = bits.to(tl.uint32)[:, None]
    if BLOCK_N == 64:
        word = tl.where(column < 32, word, (bits >> 32).to(tl.uint32)[:, None])
    return ((word >> (column % 32).to(tl.uint32)) & 1) != 0


@jit
def _load_rows(p_rows, m_rows, m_columns, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """Rows of a cache; a mask only where a row or a column may be beyond the end, so that full tiles have none."""
    if MASKED:
        return tl.load(p_rows, mask=m_rows[:, None] & m_columns, other=0.0)
    elif PADDED:
        return tl.load(p_rows, mask=m_columns, other=0.0)
    else:
        return tl.load(p_rows)


@jit
def _widen(x, dtype: tl.constexpr, CODES: tl.constexpr):
    """Keys or values in the dtype of queries, which holds every number of float8 exactly.

    CODES 4 or 5 are the exponent bits of float8 in bytes. e5m2 is the upper half of a float16. e4m3, put behind the
    sign of one, is 2^-8 of its value, subnormal numbers included, and its one NaN comes out as 480.
    """
    if CODES == 5:
        x = (x.to(tl.int16) << 8).to(tl.float16, bitcast=True)
    if CODES == 4:
        # the sign goes to bit 15 and its copy in bit 14 goes out
        bits = ((x.to(tl.int16) << 8) >> 1) & -16512
        half = bits.to(tl.float16, bitcast=True) * 256.0
        x = tl.where(tl.abs(half) > 448.0, float("nan"), half)
    return x.to(dtype)


@jit
def _load_queries(q_ptr, o_row, o_d, m_row, sign, D: tl.constexpr, INTERPRETED: tl.constexpr):
    """Columns o_d of the packed query rows. The scale's sign goes in here, exactly, so that the largest raw score is
    the largest scaled one."""
    b_q = tl.load(q_ptr + o_row[:, None] + o_d, mask=m_row[:, None] & (o_d < D), other=0.0)
    return _dot_operand((b_q.to(tl.float32) * sign).to(b_q.dtype), INTERPRETED)


@jit
def _first_state(sinks_ptr, i_h, m_row, i_part, SINKS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Running maximum and sum of rows that have seen no key; the first part of a row has its head's sink in them."""
    b_max = tl.full([BLOCK_M], NEG_INF, tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        b_sink = tl.load(sinks_ptr + i_h, mask=m_row & (i_part == 0), other=NEG_INF).to(tl.float32)
        b_max = tl.where(b_sink == POS_INF, NEG_INF, b_sink * LOG2_E)
        b_sum = tl.where(b_max == NEG_INF, 0.0, 1.0)
    return b_max, b_sum


@jit
def _attend_tile(
    b_q, b_q2, b_acc, b_max, b_sum,
    k_ptr, v_ptr, page_ptr, mask_ptr, o_mask, stride_mask_word, m_row, i_pos,
    n_start, lo, hi, K, tail, left, right, scale, softcap,
    stride_k_page, stride_k_slot, stride_v_page, stride_v_slot, stride_table_page, page_size,
    D: tl.constexpr, D_V: tl.constexpr, LATENT: tl.constexpr, WORDS: tl.constexpr, PAGE: tl.constexpr,
    MASKED: tl.constexpr, CODES: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, TREE: tl.constexpr, SOFTCAP: tl.constexpr, INTERPRETED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One online-softmax step over the keys n_start .. n_start + BLOCK_N; MASKED adds bounds and visibility."""
    o_d = tl.arange(0, BLOCK_D)[None, :]
    o_v = tl.arange(0, BLOCK_V)[None, :]
    # [BLOCK_N]
    o_n = n_start + tl.arange(0, BLOCK_N)
    m_n = (o_n >= lo) & (o_n < hi)
    # n_start is a multiple of BLOCK_N: a tile lies in one page, or a key's slot in its page is the same in every tile
    if PAGE >= BLOCK_N:
        i_page = n_start // PAGE
        i_first = n_start % PAGE
        i_slot = tl.arange(0, BLOCK_N)
    elif PAGE > 0:
        i_page = n_start // PAGE + tl.arange(0, BLOCK_N) // PAGE
        i_first = 0
        i_slot = tl.arange(0, BLOCK_N) % PAGE
    else:
        i_page = o_n // page_size
        i_first = 0
        i_slot = o_n % page_size
    p_page = page_ptr + i_page.to(tl.int64) * stride_table_page
    if MASKED and PAGE < BLOCK_N:
        page = tl.load(p_page, mask=m_n, other=0).to(tl.int64)
    else:
        page = tl.load(p_page).to(tl.int64)
    # what is the same in every tile apart, so that it is computed before the loop
    p_k = k_ptr + ((page * stride_k_page + i_first * stride_k_slot) + i_slot * stride_k_slot)[:, None]
    p_v = v_ptr + ((page * stride_v_page + i_first * stride_v_slot) + i_slot * stride_v_slot)[:, None]
    # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_D2], [BLOCK_N, BLOCK_V]; V is K's own columns when it is a view of the latent
    b_k = _widen(_load_rows(p_k + o_d, m_n, o_d < D, MASKED, BLOCK_D > D), b_q.dtype, CODES)
    if BLOCK_D2 > 0:
        o_d2 = BLOCK_D + tl.arange(0, BLOCK_D2)[None, :]
        b_k2 = _widen(_load_rows(p_k + o_d2, m_n, o_d2 < D, MASKED, BLOCK_D + BLOCK_D2 > D), b_q.dtype, CODES)
    if LATENT:
        b_v = b_k
    else:
        b_v = _widen(_load_rows(p_v + o_v, m_n, o_v < D_V, MASKED, BLOCK_V > D_V), b_q.dtype, CODES)

    # [BLOCK_M, BLOCK_N] raw scores; exponents in powers of two are s * to_log2, scaled inside one multiply-add
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    if BLOCK_D2 > 0:
        b_s = tl.dot(b_q2, tl.trans(b_k2), b_s, input_precision="ieee")
    to_log2 = scale * LOG2_E
    if SOFTCAP:
        b_s = softcap * _tanh(b_s * scale / softcap)
        to_log2 = LOG2_E
    if MASKED:
        visible = m_n[None, :] & m_row[:, None]
        if TREE:
            visible = visible & _tree_visible(
                mask_ptr, o_mask, stride_mask_word, m_row, n_start - (K - tail), WORDS, BLOCK_N
            )
        if LEFT:
            visible = visible & (o_n[None, :] >= i_pos[:, None] - left)
        if RIGHT:
            visible = visible & (o_n[None, :] <= i_pos[:, None] + right)
        b_s = tl.where(visible, b_s, NEG_INF)

    new_max = tl.maximum(b_max, tl.max(b_s, 1) * to_log2)
    shift = tl.where(new_max == NEG_INF, 0.0, new_max)
    keep = tl.exp2(b_max - shift)
    b_p = tl.exp2(b_s * to_log2 - shift[:, None])
    b_sum = b_sum * keep + tl.sum(b_p, 1)
    b_acc = b_acc * keep[:, None]
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")
    return b_acc, new_max, b_sum


@jit
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, page_table_ptr, lengths_ptr, rows_ptr, mask_ptr, tails_ptr, o_ptr, lse_ptr, reads_ptr,
    sinks_ptr, k_scale_ptr, v_scale_ptr, sign, scale, softcap, left, right, page_size, tiles_per_request, num_splits,
    stride_q_t, stride_q_h, stride_k_page, stride_k_slot, stride_k_h, stride_v_page, stride_v_slot, stride_v_h,
    stride_table, stride_table_page, stride_mask, stride_mask_word,
    stride_o_t, stride_o_s, stride_o_h, stride_l_t, stride_l_s, stride_l_h,
    D: tl.constexpr, D_V: tl.constexpr, LATENT: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    PAGE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, TREE: tl.constexpr,
    TAILS: tl.constexpr, SOFTCAP: tl.constexpr, READS: tl.constexpr, SINKS: tl.constexpr, INTERPRETED: tl.constexpr,
    CODES: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr,
    BLOCK_V: tl.constexpr, TAIL_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # the last row tile of a request reads the most keys when causal, so it starts first
    i_r = tl.program_id(0) // tiles_per_request
    i_tile = tiles_per_request - 1 - tl.program_id(0) % tiles_per_request
    i_kv = tl.program_id(1)
    i_split = tl.program_id(2)
    first = tl.load(rows_ptr + i_r)
    Q = tl.load(rows_ptr + i_r + 1) - first
    K = tl.load(lengths_ptr + i_r)
    if i_tile * BLOCK_M < Q * GROUP:
        # [BLOCK_M] packed rows: query row m // GROUP, head m % GROUP of the group
        o_m = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        m_row = o_m < Q * GROUP
        i_q = o_m // GROUP
        i_pos = i_q + K - Q
        i_t = (first + i_q).to(tl.int64)
        i_h = (i_kv * GROUP + o_m % GROUP).to(tl.int64)
        o_row = i_t * stride_q_t + i_h * stride_q_h
        b_q = _load_queries(q_ptr, o_row, tl.arange(0, BLOCK_D)[None, :], m_row, sign, D, INTERPRETED)
        b_q2 = b_q
        if BLOCK_D2 > 0:
            o_d2 = BLOCK_D + tl.arange(0, BLOCK_D2)[None, :]
            b_q2 = _load_queries(q_ptr, o_row, o_d2, m_row, sign, D, INTERPRETED)

        tail = Q
        if TAILS:
            tail = tl.load(tails_ptr + i_r)
        i_lo = i_tile * BLOCK_M // GROUP
        i_hi = tl.minimum(Q - 1, (i_tile * BLOCK_M + BLOCK_M - 1) // GROUP)
        lo, hi, all_lo, all_hi = _visible_span(i_lo, i_hi, Q, K, tail, left, right, LEFT, RIGHT, TREE)

        # tiles [t_lo, t_hi) hold [lo, hi); this split takes an equal share; tiles [f_lo, f_hi) of it need no mask
        t_lo = lo // BLOCK_N
        t_hi = tl.maximum(t_lo, (hi + BLOCK_N - 1) // BLOCK_N)
        share = (t_hi - t_lo + num_splits - 1) // num_splits
        t_lo = tl.minimum(t_hi, t_lo + i_split * share)
        t_hi = tl.minimum(t_hi, t_lo + share)
        f_lo = tl.minimum(t_hi, tl.maximum(t_lo, (all_lo + BLOCK_N - 1) // BLOCK_N))
        f_hi = tl.maximum(f_lo, tl.minimum(t_hi, all_hi // BLOCK_N))

        b_max, b_sum = _first_state(sinks_ptr, i_h, m_row, i_split, SINKS, BLOCK_M)
        b_acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        # strides come in units that keep rows 16-byte aligned, which is what wide loads are proved from
        k_page = tl.cast(stride_k_page, tl.int64) * UNIT
        k_slot = tl.cast(stride_k_slot, tl.int64) * UNIT
        v_page = tl.cast(stride_v_page, tl.int64) * UNIT
        v_slot = tl.cast(stride_v_slot, tl.int64) * UNIT
        p_k = k_ptr + i_kv * (tl.cast(stride_k_h, tl.int64) * UNIT)
        p_v = v_ptr + i_kv * (tl.cast(stride_v_h, tl.int64) * UNIT)
        if K_SCALE:
            scale *= tl.load(k_scale_ptr + i_kv)
        page_ptr = page_table_ptr + i_r.to(tl.int64) * stride_table
        o_mask = i_t * stride_mask
        if LEFT:
            for n in tl.range(t_lo * BLOCK_N, f_lo * BLOCK_N, TAIL_N, num_stages=1):
                b_acc, b_max, b_sum = _attend_tile(
                    b_q, b_q2, b_acc, b_max, b_sum, p_k, p_v, page_ptr, mask_ptr, o_mask, stride_mask_word,
                    m_row, i_pos, n, lo, hi, K, tail, left, right, scale, softcap,
                    k_page, k_slot, v_page, v_slot, stride_table_page, page_size,
                    D, D_V, LATENT, WORDS, PAGE, True, CODES, LEFT, RIGHT, TREE, SOFTCAP, INTERPRETED,
                    TAIL_N, BLOCK_D, BLOCK_D2, BLOCK_V,
                )  # fmt: skip
        for n in tl.range(f_lo * BLOCK_N, f_hi * BLOCK_N, BLOCK_N, num_stages=STAGES):
            b_acc, b_max, b_sum = _attend_tile(
                b_q, b_q2, b_acc, b_max, b_sum, p_k, p_v, page_ptr, mask_ptr, o_mask, stride_mask_word,
                m_row, i_pos, n, lo, hi, K, tail, left, right, scale, softcap,
                k_page, k_slot, v_page, v_slot, stride_table_page, page_size,
                D, D_V, LATENT, WORDS, PAGE, False, CODES, LEFT, RIGHT, TREE, SOFTCAP, INTERPRETED,
                BLOCK_N, BLOCK_D, BLOCK_D2, BLOCK_V,
            )  # fmt: skip
        for n in tl.range(f_hi * BLOCK_N, tl.minimum(hi, t_hi * BLOCK_N), TAIL_N, num_stages=1):
            b_acc, b_max, b_sum = _attend_tile(
                b_q, b_q2, b_acc, b_max, b_sum, p_k, p_v, page_ptr, mask_ptr, o_mask, stride_mask_word,
                m_row, i_pos, n, lo, hi, K, tail, left, right, scale, softcap,
                k_page, k_slot, v_page, v_slot, stride_table_page, page_size,
                D, D_V, LATENT, WORDS, PAGE, True, CODES, LEFT, RIGHT, TREE, SOFTCAP, INTERPRETED,
                TAIL_N, BLOCK_D, BLOCK_D2, BLOCK_V,
            )  # fmt: skip

        # a sum of 0 rather than a maximum of -inf: a NaN score is lost in the maximum, not in the sum
        empty = b_sum == 0.0
        b_o = b_acc / tl.where(empty, 1.0, b_sum)[:, None]
        if V_SCALE:
            b_o *= tl.load(v_scale_ptr + i_kv)
        b_lse = tl.where(empty, NEG_INF, (b_max + tl.log2(tl.where(empty, 1.0, b_sum))) * LN_2)
        o_v = tl.arange(0, BLOCK_V)[None, :]
        i_s = i_split.to(tl.int64)
        o_o = (i_t * stride_o_t + i_s * stride_o_s + i_h * stride_o_h)[:, None] + o_v
        tl.store(o_ptr + o_o, round_to(b_o, o_ptr.dtype.element_ty, INTERPRETED), mask=m_row[:, None] & (o_v < D_V))
        tl.store(lse_ptr + i_t * stride_l_t + i_s * stride_l_s + i_h * stride_l_h, b_lse, mask=m_row)
        if READS:
            loaded = tl.minimum(hi, t_hi * BLOCK_N) - tl.maximum(lo, t_lo * BLOCK_N)
            tl.atomic_add(reads_ptr + i_kv, tl.maximum(loaded, 0).to(tl.int64))


def attend(q: torch.Tensor, passes: Sequence[Pass], call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch per pass; arguments as checked and filled in by `cascade_lab.attention`. Returns (o, lse).

    Several partial states per row, from several passes or several splits of one, are kept in float32
    `[T, parts, H_q, D_v]` and go through one merge launch.
    """
    T, H_q, D = q.shape
    D_v = passes[0].v_cache.shape[-1]
    o = torch.empty((T, H_q, D_v), dtype=call.out_dtype, device=q.device)
    lse = torch.empty((T, H_q), dtype=torch.float32, device=q.device)
    if T == 0:
        return o, lse
    target = runtime.device_target(q.device)
    # the interpreter has no device, and no limit
    limit = target.shared_bytes if target.multiprocessors else None
    tiles = [
        tile_for(_packed_rows(q, one), D, q.dtype, rows_of(target.name), limit, D_v, _is_latent(one)) for one in passes
    ]
    if call.num_splits is None:
        splits = [_splits(q, one, tile, target.multiprocessors) for one, tile in zip(passes, tiles, strict=True)]
    else:
        splits = [call.num_splits] * len(passes)
    parts = sum(splits)
    if parts == 1:
        part_o, part_lse = o[:, None], lse[:, None]
    else:
        part_o = torch.empty((T, parts, H_q, D_v), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((T, parts, H_q), dtype=torch.float32, device=q.device)
    at = 0
    for one, tile, n in zip(passes, tiles, splits, strict=True):
        # each row is in every pass, so the first one's first split takes the sinks
        sinks = call.sinks if at == 0 else None
        _launch(q, one, call, sinks, tile, n, part_o[:, at : at + n], part_lse[:, at : at + n])
        at += n
    if parts > 1:
        merge_many(part_o, part_lse, o, lse)
    return o, lse


def _packed_rows(q: torch.Tensor, one: Pass) -> int:
    """Rows of the longest request: query rows x heads of the group."""
    return one.max_seqlen_q * (q.shape[1] // one.k_cache.shape[2])


def _splits(q: torch.Tensor, one: Pass, tile: Tile, num_sms: int) -> int:
    page_size, H_kv, D = one.k_cache.shape[1:]
    D_v = one.v_cache.shape[-1]
    rows = _packed_rows(q, one)
    return splits_for(
        programs=one.page_table.shape[0] * triton.cdiv(rows, tile.block_m) * H_kv,
        rows=rows,
        max_keys=one.page_table.shape[1] * page_size,
        kv_width=(D + D_v) * one.k_cache.element_size(),
        out_width=D_v * 4,
        tile=tile,
        num_sms=num_sms,
    )


def _launch(q, one: Pass, call: Call, sinks: torch.Tensor | None, tile: Tile, splits: int, o, lse) -> None:
    """One pass into o [T, splits, H_q, D_v] and lse [T, splits, H_q]."""
    H_q, D = q.shape[1:]
    softmax_scale, softcap, reads, k_scale, v_scale = (
        call.softmax_scale, call.softcap, call.reads, call.k_scale, call.v_scale,
    )  # fmt: skip
    page_size, H_kv = one.k_cache.shape[1:3]
    D_v = one.v_cache.shape[-1]
    tiles = triton.cdiv(_packed_rows(q, one), tile.block_m)
    lengths, rows = one.cache_seqlens.contiguous(), one.cu_seqlens_q.contiguous()
    # lengths stand in for an argument that a constexpr switches off
    mask = one.tree_mask if one.tree_mask is not None else lengths[:, None]
    tails = one.tail_seqlens.contiguous() if one.tail_seqlens is not None else lengths
    block_d, block_d2 = head_blocks(D)
    interpreted = runtime.triton_mode() == "interpreted"
    unit, cache_strides = _stride_units(one.k_cache, one.v_cache)
    k_cache, v_cache = one.k_cache, one.v_cache
    codes = _codes(k_cache.dtype, q.dtype, "" if interpreted else runtime.device_target(q.device).name)
    if codes:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    sign = (softmax_scale > 0) - (softmax_scale < 0)
    run_kernel(
        _attention_kernel, (len(lengths) * tiles, H_kv, splits),
        q, k_cache, v_cache, one.page_table, lengths, rows, mask, tails, o, lse,
        reads if reads is not None else lengths, sinks.contiguous() if sinks is not None else lengths,
        k_scale if k_scale is not None else lengths, v_scale if v_scale is not None else lengths,
        float(sign), abs(softmax_scale) if sign else 1.0, softcap, *one.window_size, page_size, tiles, splits,
        *q.stride()[:2], *cache_strides,
        *one.page_table.stride(), *mask.stride(), *o.stride()[:3], *lse.stride(),
        D=D, D_V=D_v, LATENT=_is_latent(one), UNIT=unit,
        GROUP=H_q // H_kv, WORDS=mask.shape[1],
        PAGE=_page_constant(one),
        LEFT=one.window_size[0] >= 0, RIGHT=one.window_size[1] >= 0,
        TREE=one.tree_mask is not None, TAILS=one.tail_seqlens is not None,
        SOFTCAP=softcap > 0, READS=reads is not None, SINKS=sinks is not None,
        CODES=codes, K_SCALE=k_scale is not None, V_SCALE=v_scale is not None,
        INTERPRETED=interpreted,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        BLOCK_D=block_d, BLOCK_D2=block_d2, BLOCK_V=max(16, triton.next_power_of_2(D_v)),
        TAIL_N=tile.tail_n, STAGES=tile.num_stages, num_warps=tile.num_warps,
        **({} if tile.max_registers is None else {"maxnreg": tile.max_registers}),
    )  # fmt: skip


def _page_constant(one: Pass) -> int:
    """What is known of the page size when compiling: itself if a power of two, else 0.

    Where each request has a single page, as in a dense cache, any power of two will do that no key is beyond.
    """
    page_size = one.k_cache.shape[1]
    if one.page_table.shape[1] == 1:
        return 1 << 30
    return page_size if page_size & (page_size - 1) == 0 else 0


def _codes(dtype: torch.dtype, q_dtype: torch.dtype, target: str) -> int:
    """Exponent bits of a cache that the kernel takes as bytes, 0 for one in a type of Triton's.

    That is float8 where the machine converts it to the dtype of q. What Triton does elsewhere, in the interpreter and
    from e5m2 to bfloat16, makes numbers of NaN and infinities.
    """
    exponent_bits = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}.get(dtype, 0)
    converted = converts_float8(target) and (exponent_bits == 4 or q_dtype == torch.float16)
    return 0 if converted else exponent_bits


def _is_latent(one: Pass) -> bool:
    """Whether V is a view of K's first block of columns, as in absorbed MLA: one load then serves both."""
    k_cache, v_cache = one.k_cache, one.v_cache
    same = k_cache.data_ptr() == v_cache.data_ptr() and k_cache.stride() == v_cache.stride()
    return same and v_cache.shape[-1] == head_blocks(k_cache.shape[-1])[0]


def _stride_units(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[int, list[int]]:
    """Cache strides in units of 16 bytes where rows are aligned to that, else in elements.

    A stride argument alone proves alignment only when it is a multiple of 16 elements; a row of 264 is not.
    """
    strides = [*k_cache.stride()[:3], *v_cache.stride()[:3]]
    unit = 16 // k_cache.element_size()
    if any(s % unit for s in strides) or k_cache.data_ptr() % 16 or v_cache.data_ptr() % 16:
        unit = 1
    return unit, [s // unit for s in strides]
