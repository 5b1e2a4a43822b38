"""The yardstick: every state in float64, straight from the definition, one query row at a time.

Row t of head h sees a set of keys S and returns `lse = ln sum_{j in S} exp(s_j)` and `o = sum_{j in S}
exp(s_j - lse) v_j` with `s_j = softmax_scale * <q, k_j>`; an empty S returns `o = 0, lse = -inf`. It is slow,
holds whole score rows, and shares no code with anything it judges. The comparison helpers live here too,
because an oracle is only as strict as its comparison.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Reference",
    "StateError",
    "assert_state_close",
    "attention_oracle",
    "merge_oracle",
    "state_error",
    "visible_keys",
]


class Reference(NamedTuple):
    """`o` [T, H_q, D_v] and natural-log `lse` [T, H_q], both float64 unless another dtype was asked for.

    Example:
        >>> from cascade_lab.evidence.reference import merge_oracle
        >>> merge_oracle(torch.ones(2, 3, 1, 4), torch.zeros(2, 3, 1)).o.dtype
        torch.float64
    """

    o: torch.Tensor
    lse: torch.Tensor


class StateError(NamedTuple):
    """Largest absolute differences of `o` and `lse`; NaN if a side holds NaN, inf if only one is infinite.

    Example:
        >>> from cascade_lab.evidence.reference import state_error
        >>> one = (torch.zeros(1, 1, 2), torch.zeros(1, 1))
        >>> state_error(one, (one[0] + 0.5, one[1]))
        StateError(o=0.5, lse=0.0)
    """

    o: float
    lse: float


def visible_keys(
    cu_seqlens_q: Tensor,
    cache_seqlens: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    tree_mask: Tensor | None = None,
    tail_seqlens: Tensor | None = None,
) -> list[Tensor]:
    """Which key each query row sees, written out.

    `cu_seqlens_q` [R+1] and `cache_seqlens` [R] are integers. Returns one bool matrix [Q_r, K_r] per request;
    its sum is the request's exact number of query-key pairs. Row i of Q sits at key position `p = i + K - Q`
    (bottom-right). `causal` hides keys after p, a window `(left, right)` hides keys before `p - left` and
    after `p + right`, -1 being no limit. Bit b of row t of `tree_mask` (int64 [T, words]) shows key `K - tail
    + b`; keys before the tail are visible to every row.

    Example:
        >>> from cascade_lab.evidence.reference import visible_keys
        >>> (seen,) = visible_keys(torch.tensor([0, 2]), torch.tensor([4]), causal=True)  # 2 rows at the end of 4 keys
        >>> seen.int().tolist()
        [[1, 1, 1, 0], [1, 1, 1, 1]]
    """
    starts = cu_seqlens_q.tolist()
    tails = None if tail_seqlens is None else tail_seqlens.tolist()
    left, right = window_size
    matrices = []
    for r, num_keys in enumerate(cache_seqlens.tolist()):
        num_rows = starts[r + 1] - starts[r]
        position = torch.arange(num_rows, device="cpu").unsqueeze(1) + num_keys - num_rows
        key = torch.arange(num_keys, device="cpu").unsqueeze(0)
        visible = torch.ones(num_rows, num_keys, dtype=torch.bool, device="cpu")
        if causal:
            visible &= key <= position
        if left >= 0:
            visible &= key >= position - left
        if right >= 0:
            visible &= key <= position + right
        if tree_mask is not None:
            bit = torch.arange(num_rows if tails is None else tails[r], device="cpu")
            words = tree_mask[starts[r] : starts[r + 1]].cpu()
            visible[:, num_keys - len(bit) :] &= (words[:, bit // 64] >> (bit % 64) & 1).bool()
        matrices.append(visible)
    return matrices


def attention_oracle(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    tree_mask: Tensor | None = None,
    tail_seqlens: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Reference:
    """Paged, ragged attention from its definition; arguments and shapes as in `cascade_lab.attention`.

    q [T, H_q, D]; k_cache [P, page, H_kv, D]; v_cache [P, page, H_kv, D_v]; page_table [R, max_pages];
    cache_seqlens [R]. Query head h reads KV head `h // (H_q // H_kv)`. `dtype` is the precision of every
    step. With `dtype=torch.float64` this is the oracle. With `dtype=q.dtype` it is the plain run an ordinary
    user would write: scores, probabilities and output are each rounded to that dtype, only the lse is taken
    in float32 (from the rounded scores), because a half-precision lse would loosen the bound that it has to
    give. Keys and values are the caches' elements times their head's scale, formed in float64 and rounded to `dtype`;
    a sink is one more score with the value 0. Differentiable through o and lse; rows without keys have zero gradients.

    Example:
        >>> from cascade_lab.evidence.reference import assert_state_close, attention_oracle
        >>> q, (k, v) = torch.randn(2, 2, 8), torch.randn(2, 2, 4, 1, 8)
        >>> pages, lens = torch.tensor([[1], [0]], dtype=torch.int32), torch.tensor([4, 2], dtype=torch.int32)
        >>> assert_state_close(cl.attention(q, k, v, pages, lens), attention_oracle(q, k, v, pages, lens))
    """
    num_rows, num_heads, head_dim = q.shape
    page_size, num_kv_heads = k_cache.shape[1:3]
    if cu_seqlens_q is None:
        cu_seqlens_q = torch.arange(num_rows + 1, device="cpu")
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    visible = visible_keys(
        cu_seqlens_q,
        cache_seqlens,
        causal=causal,
        window_size=window_size,
        tree_mask=tree_mask,
        tail_seqlens=tail_seqlens,
    )
    kv_head = torch.arange(num_heads, device=q.device) // (num_heads // num_kv_heads)
    lse_dtype = torch.promote_types(dtype, torch.float32)
    scales = [torch.as_tensor(x, dtype=torch.float64, device=q.device).expand(num_kv_heads) for x in (k_scale, v_scale)]
    empty_o = torch.zeros(num_heads, v_cache.shape[-1], dtype=dtype, device=q.device)
    empty_lse = torch.full((num_heads,), -math.inf, dtype=lse_dtype, device=q.device)

    starts = cu_seqlens_q.tolist()
    o_rows, lse_rows = [], []
    for r, seen in enumerate(visible):
        tokens = torch.arange(seen.shape[1], device=q.device)
        pages = page_table[r, tokens // page_size].long()
        keys, values = (
            (cache[pages, tokens % page_size].double() * scale[:, None]).to(dtype)
            for cache, scale in zip((k_cache, v_cache), scales, strict=True)
        )
        for i in range(seen.shape[0]):
            mine = seen[i].nonzero()[:, 0].to(q.device)
            if len(mine) == 0 and sinks is None:
                o_rows.append(empty_o)
                lse_rows.append(empty_lse)
                continue
            k = keys[mine][:, kv_head].transpose(0, 1)
            v = values[mine][:, kv_head].transpose(0, 1)
            scores = (k @ q[starts[r] + i].to(dtype).unsqueeze(-1)).squeeze(-1) * scale
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks.masked_fill(sinks.isinf(), -math.inf).to(dtype)[:, None]), -1)
                v = torch.cat((v, v.new_zeros(num_heads, 1, v.shape[-1])), 1)
            weights = scores.softmax(-1).masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
            o_rows.append((weights.unsqueeze(1) @ v).squeeze(1))
            lse_rows.append(scores.to(lse_dtype).logsumexp(-1))
    if not o_rows:
        return Reference(empty_o.expand(0, -1, -1), empty_lse.expand(0, -1))
    return Reference(torch.stack(o_rows), torch.stack(lse_rows))


def merge_oracle(o: Tensor, lse: Tensor) -> Reference:
    """Merge S states per row in float64: `lse = ln sum_s exp(lse_s)`, `o = sum_s exp(lse_s - lse) o_s`.

    o [T, S, H_q, D], lse [T, S, H_q] in natural log, any float dtype; returns o [T, H_q, D], lse [T, H_q]. A state
    with lse -inf or +inf is empty, whatever its o holds; a NaN lse makes its row NaN.

    Example:
        >>> from cascade_lab.evidence.reference import merge_oracle
        >>> o, lse = torch.tensor([1.0, 4.0]).view(1, 2, 1, 1), torch.tensor([2.0, 1.0]).log().view(1, 2, 1)
        >>> round(merge_oracle(o, lse).o.item(), 6)  # (2 x 1 + 4) / 3
        2.0
    """
    o, lse = o.double(), lse.double()
    empty = lse.isinf()
    lse = lse.masked_fill(empty, -math.inf)
    top = lse.amax(1) if lse.shape[1] else torch.full_like(lse.sum(1), -math.inf)
    shift = top.masked_fill(top == -math.inf, 0.0)
    weight = (lse - shift.unsqueeze(1)).exp()
    total = weight.sum(1)
    nothing = total == 0
    share = (weight / total.masked_fill(nothing, 1.0).unsqueeze(1)).unsqueeze(-1)
    merged = (share * o.masked_fill(empty.unsqueeze(-1), 0.0)).sum(1)
    merged_lse = shift + total.masked_fill(nothing, 1.0).log()
    return Reference(merged, merged_lse.masked_fill(nothing, -math.inf))


def _difference(actual: Tensor, expected: Tensor) -> Tensor:
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    return torch.where(actual == expected, 0.0, (actual - expected).abs())


def state_error(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> StateError:
    """Largest absolute error of o and lse, compared in float64. Equal infinities differ by 0; NaN anywhere
    gives NaN.

    Both are `(o, lse)` pairs of equal shapes, else ValueError.

    Example:
        >>> from cascade_lab.evidence.reference import state_error
        >>> one = (torch.zeros(1, 1, 2), torch.full((1, 1), -torch.inf))
        >>> state_error(one, one)
        StateError(o=0.0, lse=0.0)
    """
    for name, left, right in zip(("o", "lse"), actual, expected, strict=True):
        if left.shape != right.shape:
            raise ValueError(f"{name}: shapes differ, {list(left.shape)} against {list(right.shape)}")
    errors = [_difference(a, e) for a, e in zip(actual, expected, strict=True)]
    return StateError(*(float(e.max()) if e.numel() else 0.0 for e in errors))


_FLOOR = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_state_close(
    actual: tuple[Tensor, Tensor],
    expected: tuple[Tensor, Tensor],
    *,
    plain: tuple[Tensor, Tensor] | None = None,
    factor: float = 2.0,
    atol: float | None = None,
    nan_rows: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
) -> None:
    """Assert that a state equals the reference; AssertionError names the worst request, row and head.

    Shapes and the -inf pattern of lse must agree, o must be exactly 0 in empty rows, and NaN fails on either
    side except in `nan_rows` (bool [T, H_q]), where actual lse and o must both be NaN. o and lse are bounded
    separately by `factor * error of plain + floor`, `plain` being a run of ordinary torch in the kernel's
    input dtype. The floor is `atol` if given, else per dtype of the compared tensor (float64 1e-12, float32
    5e-6, float16 2e-3, bfloat16 1.6e-2, the last two being two units in the last place), times the largest
    magnitude expected, but at least 1 for lse.

    Example:
        >>> from cascade_lab.evidence.reference import assert_state_close
        >>> one = (torch.ones(1, 1, 2), torch.zeros(1, 1))
        >>> assert_state_close(one, one)
        >>> assert_state_close((one[0] + 0.5, one[1]), one)
        Traceback (most recent call last):
            ...
        AssertionError: o differs by 0.5 > 5e-06 (floor 5e-06) at row 0, head 0: actual 1.5, expected 1
    """
    actual, expected = Reference(*actual), Reference(*expected)
    state_error(actual, expected)
    skipped = torch.zeros(actual.lse.shape, dtype=torch.bool, device="cpu") if nan_rows is None else nan_rows.cpu()
    a_o, a_lse = actual.o.detach().cpu().double(), actual.lse.detach().cpu().double()
    e_o, e_lse = expected.o.detach().cpu().double(), expected.lse.detach().cpu().double()

    def where(bad: Tensor) -> str:
        index = [int(x) for x in bad.nonzero()[0][:2]]
        place = f"row {index[0]}, head {index[1]}"
        if cu_seqlens_q is not None:
            request = sum(int(start) <= index[0] for start in cu_seqlens_q[1:].tolist())
            place = f"request {request}, {place}"
        return place

    def refuse(bad: Tensor, what: str) -> None:
        if bad.any():
            raise AssertionError(f"{what} at {where(bad)} ({int(bad.sum())} of {bad.numel()} places)")

    kept = ~skipped
    for name, o, lse in (("expected", e_o, e_lse), ("actual", a_o, a_lse)):
        refuse(lse.isnan() & kept, f"NaN in {name} lse")
        refuse(o.isnan().any(-1) & kept, f"NaN in {name} o")
    refuse(skipped & ~(a_lse.isnan() & a_o.isnan().any(-1)), "NaN expected, but actual is a number")
    empty = (e_lse == -math.inf) & kept
    refuse(((a_lse == -math.inf) & kept) != empty, "empty rows (lse -inf) differ")
    refuse((a_o != 0).any(-1) & empty, "o is not exactly 0 in an empty row")

    for name, a, e, given in (("o", a_o, e_o, actual.o), ("lse", a_lse, e_lse, actual.lse)):
        keep = kept if name == "lse" else kept.unsqueeze(-1)
        error = _difference(a, e).masked_fill(~keep, 0.0)
        if not error.numel():
            continue
        size = e.abs().masked_fill(~keep | e.isinf(), 0.0).max().item()
        bound = atol if atol is not None else _FLOOR[given.dtype] * (max(1.0, size) if name == "lse" else size)
        origin = f"floor {bound:.3g}"
        if plain is not None:
            other = _difference(plain[0] if name == "o" else plain[1], e).masked_fill(~keep, 0.0).max().item()
            if not math.isfinite(other):
                raise AssertionError(f"the plain run's {name} is not finite where the reference is: it bounds nothing")
            bound += factor * other
            origin += f" + {factor:g} x plain error {other:.3g}"
        worst = error.max().item()
        if not worst <= bound:
            at = error == worst
            raise AssertionError(
                f"{name} differs by {worst:.3g} > {bound:.3g} ({origin}) at {where(at)}: "
                f"actual {a[at][0].item():.9g}, expected {e[at][0].item():.9g}"
            )
