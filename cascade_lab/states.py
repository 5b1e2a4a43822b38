"""Attention states and their merge (claim 1).

A state is what attention over one key set leaves behind: o = sum_j e^(s_j - lse) v_j and lse = log sum_j e^s_j, the
natural log of the summed exponentials of the scaled scores. States over disjoint key sets A and B merge exactly:

    lse = log(e^lse_A + e^lse_B),    o = e^(lse_A - lse) o_A + e^(lse_B - lse) o_B.

(o = 0, lse = -inf) is the neutral element. Nothing here knows where a state came from: that is `attention`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cascade_lab import _checks, runtime

__all__ = [
    "State",
    "lse_from_base2",
    "lse_from_heads_first",
    "lse_from_padded",
    "lse_to_base2",
    "lse_to_heads_first",
    "merge_state",
    "merge_states",
]

LN2 = math.log(2.0)
_OUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_LSE_DTYPES = (torch.float32, torch.float64)
MOST_STEPS = 10_000
"""Steps that a search for an overlap of two views takes at most."""


class State(NamedTuple):
    """Attention over one key set.

    Attributes:
        o: `[T, H_q, D]`, the normalised output; exactly 0 in a row without keys.
        lse: `[T, H_q]` float32 (float64 if an input is), natural log of the sum of exp(scaled score); exactly -inf in a
            row without keys.

    Example:
        >>> o, lse = cl.State(torch.zeros(2, 1, 4), torch.full((2, 1), -torch.inf))  # two rows without keys
        >>> o.shape, lse.shape
        (torch.Size([2, 1, 4]), torch.Size([2, 1]))
    """

    o: torch.Tensor
    lse: torch.Tensor


# torch.load reads what it knows: with this, states that torch.save wrote too
torch.serialization.add_safe_globals([State])


def merge_state(
    o_a: torch.Tensor,
    lse_a: torch.Tensor,
    o_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_lse: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: runtime.Backend = "auto",
) -> State:
    """Merge two states over disjoint key sets into the state over their union.

    Args:
        o_a, o_b: `[T, H_q, D]` float32, float16 or bfloat16 (float64 on the torch backend), any strides with
            unit last stride.
        lse_a, lse_b: `[T, H_q]` float32 (float64 on the torch backend), natural log, any strides: a transposed
            `[H_q, T]` tensor is read in place. -inf and +inf both mean "no keys"; NaN propagates.
        out, out_lse: where to write, `[T, H_q, D]` and `[T, H_q]`; each may be one of the inputs, whole. Memory of
            inputs is compared by address, so not under torch.compile.
        out_dtype: dtype of o; default the promoted dtype of o_a and o_b, or the dtype of `out`.
        backend: "auto", "triton" or "torch".

    Returns:
        State. Differentiable in all four inputs on every backend.

    Raises:
        TypeError: an argument that is not a tensor, or has an unsupported dtype.
        ValueError: rank, shape, device or stride does not fit, or `out` overlaps an input without being that input.

    On the Triton backend weighted outputs are added up before they are divided, so S states of equal lse hold elements
    up to 3.4e38 / S; beyond that o is infinite. The torch backend divides first. torch.func.grad and vmap go through,
    forward-mode derivatives are refused; inside `runtime.unchecked()` no overlap is looked for.

    The formula is the combination step of blocked softmax: Milakov and Gimelshein (2018), arXiv:1805.02867.

    Example:
        >>> o_a, o_b = torch.tensor([[[1.0]]]), torch.tensor([[[4.0]]])  # one row of one head, D = 1
        >>> lse_a, lse_b = torch.tensor([[2.0]]).log(), torch.tensor([[1.0]]).log()  # exponentials add up to 2 and to 1
        >>> o, lse = cl.merge_state(o_a, lse_a, o_b, lse_b)
        >>> f"{o.item():.3f} of {lse.exp().item():.3f}"  # (2 x 1 + 1 x 4) / 3
        '2.000 of 3.000'
    """
    _check_state("o_a", o_a, "lse_a", lse_a)
    _check_state("o_b", o_b, "lse_b", lse_b)
    _check_same("o_b", o_b, "o_a", o_a)
    out_dtype = _resolve_out_dtype(out, out_dtype, torch.promote_types(o_a.dtype, o_b.dtype))
    lse_dtype = torch.promote_types(lse_a.dtype, lse_b.dtype)
    inputs = {"o_a": o_a, "lse_a": lse_a, "o_b": o_b, "lse_b": lse_b}
    backend = runtime._pick_backend(backend, o_a)
    _check_backend_dtypes(backend, inputs, out_dtype)
    runtime.refuse_forward_mode("merge_state", *inputs.values())
    _check_out("out", out, o_a.shape, out_dtype, o_a.device, inputs, unit_last_stride=True)
    _check_out("out_lse", out_lse, lse_a.shape, lse_dtype, o_a.device, inputs | {"out": out}, unit_last_stride=False)
    if out is None and out_lse is None:
        merge = _way(_MergePair, _MergePairRows, _merge_state_op)
        return State(*merge(o_a, lse_a, o_b, lse_b, out_dtype, backend))
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs.values(), out, out_lse) if x is not None):
        raise ValueError("out, out_lse: expected None when a gradient is required, given a tensor to write into")
    if runtime.is_transformed():
        raise ValueError("out, out_lse: expected None under a transform of torch.func, given a tensor to write into")
    o = out if out is not None else torch.empty(o_a.shape, dtype=out_dtype, device=o_a.device)
    lse = out_lse if out_lse is not None else torch.empty(lse_a.shape, dtype=lse_dtype, device=o_a.device)
    merge_into = _merge_state_out_op if runtime.is_traced() else _merge_pair_into
    merge_into(o_a, lse_a, o_b, lse_b, o, lse, backend)
    return State(o, lse)


def merge_states(
    o: torch.Tensor,
    lse: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    backend: runtime.Backend = "auto",
) -> State:
    """Merge S states over disjoint key sets at once.

    Args:
        o: `[T, S, H_q, D]` float32, float16 or bfloat16 (float64 on the torch backend), any strides with unit last
            stride.
        lse: `[T, S, H_q]` float32 (float64 on the torch backend), natural log; -inf and +inf mean "no keys", NaN
            propagates.
        out_dtype: dtype of the merged o; default that of `o`.
        backend: "auto", "triton" or "torch".

    Returns:
        State `[T, H_q, D]`, `[T, H_q]`. S = 0 gives empty states. Differentiable in both inputs on every backend.

    Raises:
        TypeError, ValueError: as for `merge_state`.

    Example:
        >>> o = torch.tensor([1.0, 4.0, 7.0]).view(1, 3, 1, 1)
        >>> lse = torch.tensor([2.0, 1.0, 1.0]).log().view(1, 3, 1)
        >>> merged = cl.merge_states(o, lse)
        >>> f"{merged.o.item():.3f} of {merged.lse.exp().item():.3f}"  # (2 x 1 + 4 + 7) / 4
        '3.250 of 4.000'
    """
    _check_state("o", o, "lse", lse, layout="T, S, H_q")
    out_dtype = _resolve_out_dtype(None, out_dtype, o.dtype)
    backend = runtime._pick_backend(backend, o)
    _check_backend_dtypes(backend, {"o": o, "lse": lse}, out_dtype)
    runtime.refuse_forward_mode("merge_states", o, lse)
    merge = _way(_MergeMany, _MergeManyRows, _merge_states_op)
    return State(*merge(o, lse, out_dtype, backend))


def lse_from_base2(lse: torch.Tensor) -> torch.Tensor:
    """Natural-log lse from one in base 2 (log2 of the sum of exponentials, as FlashInfer returns it); any shape.

    Example:
        >>> [round(x, 4) for x in cl.lse_from_base2(torch.tensor([1.0, 3.0])).exp().tolist()]
        [2.0, 8.0]
    """
    _checks.tensor("lse", lse, dtypes=_LSE_DTYPES)
    return lse * LN2


def lse_to_base2(lse: torch.Tensor) -> torch.Tensor:
    """Base-2 lse from one in natural log; any shape.

    Example:
        >>> [round(x, 4) for x in cl.lse_to_base2(torch.tensor([2.0, 8.0]).log()).tolist()]
        [1.0, 3.0]
    """
    _checks.tensor("lse", lse, dtypes=_LSE_DTYPES)
    return lse / LN2


def lse_from_heads_first(lse: torch.Tensor) -> torch.Tensor:
    """`[T, H_q]` view of an `[H_q, T]` lse (the layout of flash-attention's packed calls and of vLLM). No copy.

    Example:
        >>> cl.lse_from_heads_first(torch.zeros(8, 5)).shape  # 8 heads, 5 rows
        torch.Size([5, 8])
    """
    _checks.tensor("lse", lse, "[H_q, T]")
    return lse.transpose(0, 1)


def lse_to_heads_first(lse: torch.Tensor) -> torch.Tensor:
    """`[H_q, T]` view of a `[T, H_q]` lse. No copy.

    Example:
        >>> lse = torch.zeros(5, 8)
        >>> heads_first = cl.lse_to_heads_first(lse)
        >>> heads_first.shape, heads_first.data_ptr() == lse.data_ptr()
        (torch.Size([8, 5]), True)
    """
    _checks.tensor("lse", lse, "[T, H_q]")
    return lse.transpose(0, 1)


def lse_from_padded(lse: torch.Tensor, cu_seqlens_q: torch.Tensor) -> torch.Tensor:
    """`[T, H_q]` lse gathered from a padded `[R, H_q, max_T]` one, request r keeping its first rows; this one copies.

    Args:
        lse: `[R, H_q, max_T]`.
        cu_seqlens_q: `[R + 1]` int32 row offsets.

    Raises:
        ValueError: the shapes do not fit, or a request has more than max_T rows.

    Example:
        >>> padded = torch.arange(6.0).view(2, 1, 3)  # 2 requests of at most 3 rows, 1 head
        >>> cl.lse_from_padded(padded, torch.tensor([0, 2, 5], dtype=torch.int32)).flatten().tolist()
        [0.0, 1.0, 3.0, 4.0, 5.0]
    """
    _checks.tensor("lse", lse, "[R, H_q, max_T]")
    _checks.tensor("cu_seqlens_q", cu_seqlens_q, "[R + 1]")
    lengths = cu_seqlens_q.diff()
    if len(lengths) != lse.shape[0] or (lengths > lse.shape[2]).any() or (lengths < 0).any():
        raise ValueError(
            f"cu_seqlens_q: expected {lse.shape[0]} requests of 0 to {lse.shape[2]} rows to match lse "
            f"{tuple(lse.shape)}, given lengths {lengths.tolist()}"
        )
    kept = torch.arange(lse.shape[2], device=lse.device) < lengths[:, None]
    return lse.transpose(1, 2)[kept]


def _way(function, transformable, operator):
    """How a merge is called: by itself, under a transform of torch.func, or traced."""
    if runtime.is_traced():
        return operator
    return transformable.apply if runtime.is_transformed() else function.apply


def _merge_pair_into(
    o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, out: Tensor, out_lse: Tensor, backend: str
) -> None:
    if backend == "triton":
        from cascade_lab.backends.triton import merge

        merge.merge_pair(*_resolved(o_a, lse_a, o_b, lse_b), out, out_lse)
        runtime.count_write(out, out_lse)
    else:
        _merge_torch((o_a, o_b), (lse_a, lse_b), out, out_lse)


def _new_pair(o_a, lse_a, lse_b, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.promote_types(lse_a.dtype, lse_b.dtype)
    return o_a.new_empty(o_a.shape, dtype=out_dtype), lse_a.new_empty(lse_a.shape, dtype=lse_dtype)


def _merge_pair(
    o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, out_dtype: torch.dtype, backend: str
) -> tuple[Tensor, Tensor]:
    o, lse = _new_pair(o_a, lse_a, lse_b, out_dtype)
    _merge_pair_into(o_a, lse_a, o_b, lse_b, o, lse, backend)
    return o, lse


def _keep_pair(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:4], *output)


def _merge_pair_backward(ctx, grad_o, grad_lse):
    o_a, lse_a, o_b, lse_b, *merged = ctx.saved_tensors
    grads = (_merge_backward(*part, *merged, grad_o, grad_lse) for part in ((o_a, lse_a), (o_b, lse_b)))
    return *next(grads), *next(grads), None, None


def _resolved(*tensors: Tensor) -> list[Tensor]:
    """The tensors with memory that holds their values: a copy of a view that only marks them as negated."""
    return [x.resolve_neg() for x in tensors]


def _new_merged(os, lses, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    T, _, H, D = os.shape
    return os.new_empty((T, H, D), dtype=out_dtype), lses.new_empty((T, H))


def _merge_many(o: Tensor, lse: Tensor, out_dtype: torch.dtype, backend: str) -> tuple[Tensor, Tensor]:
    merged_o, merged_lse = _new_merged(o, lse, out_dtype)
    if backend == "triton":
        from cascade_lab.backends.triton import merge

        merge.merge_many(*_resolved(o, lse), merged_o, merged_lse)
    else:
        _merge_torch(o.unbind(1), lse.unbind(1), merged_o, merged_lse)
    return merged_o, merged_lse


def _keep_many(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:2], *output)


def _merge_many_backward(ctx, grad_o, grad_lse):
    os, lses, *merged = ctx.saved_tensors
    # the merged row stands beside each of its S parts
    row = (x.unsqueeze(1) for x in (*merged, grad_o, grad_lse))
    return *_merge_backward(os, lses, *row), None, None


class _MergePair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):  # a separate setup_context would cost as much as a small merge
        output = _merge_pair(*inputs)
        _keep_pair(ctx, inputs, output)
        return output

    backward = staticmethod(_merge_pair_backward)


class _MergeMany(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):  # a separate setup_context would cost as much as a small merge
        output = _merge_many(*inputs)
        _keep_many(ctx, inputs, output)
        return output

    backward = staticmethod(_merge_many_backward)


def _in_one_call(merge, info, in_dims, inputs):
    """torch.vmap over a merge, whose rows do not know each other: the examples are more rows of one call."""
    rows = [
        (x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
        if isinstance(x, Tensor)
        else x
        for x, dim in zip(inputs, in_dims, strict=True)
    ]
    return tuple(x.unflatten(0, (info.batch_size, len(x) // info.batch_size)) for x in merge(*rows)), (0, 0)


class _MergePairRows(torch.autograd.Function):
    """`_MergePair` as torch.func wants it."""

    forward = staticmethod(_merge_pair)
    setup_context = staticmethod(_keep_pair)
    backward = staticmethod(_merge_pair_backward)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return _in_one_call(_MergePairRows.apply, info, in_dims, inputs)


class _MergeManyRows(torch.autograd.Function):
    """`_MergeMany` as torch.func wants it."""

    forward = staticmethod(_merge_many)
    setup_context = staticmethod(_keep_many)
    backward = staticmethod(_merge_many_backward)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        return _in_one_call(_MergeManyRows.apply, info, in_dims, inputs)


# What a compiler sees in place of the functions above. Uncompiled calls do without: dispatch through Python adds about
# 10 us to each, more than a small merge takes on a GPU.
_merge_state_op = torch.library.custom_op("cascade_lab::merge_state", _merge_pair, mutates_args=())
_merge_state_op.register_autograd(_merge_pair_backward, setup_context=_keep_pair)
_merge_states_op = torch.library.custom_op("cascade_lab::merge_states", _merge_many, mutates_args=())
_merge_states_op.register_autograd(_merge_many_backward, setup_context=_keep_many)
_merge_state_out_op = torch.library.custom_op(
    "cascade_lab::merge_state_out", _merge_pair_into, mutates_args=("out", "out_lse")
)


@_merge_state_op.register_fake
def _(o_a, lse_a, o_b, lse_b, out_dtype, backend):
    runtime._require_backend(backend, o_a)
    return _new_pair(o_a, lse_a, lse_b, out_dtype)


@_merge_states_op.register_fake
def _(o, lse, out_dtype, backend):
    runtime._require_backend(backend, o)
    return _new_merged(o, lse, out_dtype)


@_merge_state_out_op.register_fake
def _(o_a, lse_a, o_b, lse_b, out, out_lse, backend):
    runtime._require_backend(backend, o_a)


@runtime.outside_autocast
def _merge_torch(os, lses, o: torch.Tensor, lse: torch.Tensor) -> None:
    """Merge the states (os[s], lses[s]) into (o, lse) with plain torch, in float32 or better."""
    dtype = torch.promote_types(lse.dtype, o.dtype if o.dtype == torch.float64 else torch.float32)
    if any(x.dtype == torch.float64 for x in os):
        dtype = torch.float64
    cleaned = [torch.where(x == math.inf, -math.inf, x).to(dtype) for x in lses]
    peak = torch.full_like(lse, -math.inf, dtype=dtype)
    for x in cleaned:
        peak = torch.maximum(peak, x)
    shift = torch.where(peak == -math.inf, 0.0, peak)
    weights = [torch.exp(x - shift) for x in cleaned]
    total = torch.zeros_like(peak)
    for weight in weights:
        total += weight
    scale = 1 / torch.where(total == 0, 1.0, total)
    # an output of the right dtype takes the sum itself, unless a part still to be read lies there
    in_place = o.dtype == dtype and not any(_spans_meet(o, x) for x in os)
    acc = o.zero_() if in_place else torch.zeros(o.shape, dtype=dtype, device=o.device)
    for o_s, lse_s, weight in zip(os, cleaned, weights, strict=True):
        empty = lse_s == -math.inf
        if o_s.device.type != "cpu" or empty.any():  # asking a GPU would wait for it
            o_s = torch.where(empty[..., None], 0.0, o_s)
        acc.addcmul_(o_s.to(dtype), (weight * scale)[..., None])
    if not in_place:
        o.copy_(acc)
    lse.copy_(shift + total.log())


@runtime.outside_autocast
def _merge_backward(o_s, lse_s, o, lse, grad_o, grad_lse):
    """Gradients of one part of a merge. With p = e^(lse_s - lse): do_s = p do, dlse_s = p (dlse + do . (o_s - o))."""
    empty = lse_s.isinf()
    p = torch.where(empty, 0.0, torch.exp(torch.where(empty, 0.0, lse_s - lse)))
    acc = torch.promote_types(torch.promote_types(o_s.dtype, torch.float32), p.dtype)
    grad_o, p = grad_o.to(acc), p.to(acc)
    ahead = torch.where(empty[..., None], 0.0, o_s.to(acc) - o.to(acc))
    return (p[..., None] * grad_o).to(o_s.dtype), (p * (grad_lse + (grad_o * ahead).sum(-1))).to(lse_s.dtype)


def _check_state(o_name, o, lse_name, lse, layout="T, H_q") -> None:
    _checks.tensor(o_name, o, f"[{layout}, D]", dtypes=_OUT_DTYPES)
    _checks.tensor(lse_name, lse, f"[{layout}]", dtypes=_LSE_DTYPES, like=(o_name, o))
    if lse.shape != o.shape[:-1]:
        raise ValueError(
            f"{lse_name}: expected [{layout}] = {tuple(o.shape[:-1])} to match {o_name} {tuple(o.shape)}, "
            f"given {tuple(lse.shape)}"
        )
    if o.shape[-1] < 1:
        raise ValueError(f"{o_name}: expected a head dim of at least 1, given shape {tuple(o.shape)}")
    _checks.unit_stride(o_name, o)


def _check_same(name, x, other_name, other) -> None:
    if x.shape != other.shape or x.device != other.device:
        raise ValueError(
            f"{name}: expected shape {tuple(other.shape)} on {other.device} as {other_name}, "
            f"given {tuple(x.shape)} on {x.device}"
        )


def _resolve_out_dtype(out, out_dtype, default: torch.dtype) -> torch.dtype:
    if isinstance(out, torch.Tensor):
        if out_dtype not in (None, out.dtype):
            raise TypeError(f"out: expected dtype {out_dtype} as out_dtype says, given {out.dtype}")
        out_dtype = out.dtype
    if out_dtype is None:
        return default
    if out_dtype not in _OUT_DTYPES:
        raise TypeError(f"out_dtype: expected {_checks.dtype_names(_OUT_DTYPES)}, given {out_dtype}")
    return out_dtype


def _check_backend_dtypes(backend, tensors, out_dtype) -> None:
    if backend == "triton":
        dtypes = {name: x.dtype for name, x in tensors.items()} | {"out_dtype": out_dtype}
        for name, dtype in dtypes.items():
            if dtype == torch.float64:
                raise TypeError(f"{name}: float64 is for backend='torch' only, given {dtype} with backend='triton'")


def _check_out(name, out, shape, dtype, device, inputs, unit_last_stride) -> None:
    """`out` has this shape, dtype and device, does not overlap itself, and is apart from each input or all of it."""
    if out is None:
        return
    _checks.tensor(name, out)
    if out.shape != shape or out.device != device:
        raise ValueError(f"{name}: expected shape {tuple(shape)} on {device}, given {tuple(out.shape)} on {out.device}")
    if out.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {dtype}, given {out.dtype}")
    if unit_last_stride:
        _checks.unit_stride(name, out)
    if not _elements_apart(out):
        raise ValueError(f"{name}: expected distinct elements, given strides {out.stride()} that fold them together")
    if not torch.compiler.is_compiling() and out.is_neg():
        raise ValueError(f"{name}: expected memory that holds its values, given a view that marks them as negated")
    # traced tensors have no addresses, and a compiler gives an `out` that meets an input memory of its own
    if out.is_meta or not runtime.checks_enabled():
        return
    for other_name, other in inputs.items():
        if other is None or not _spans_meet(out, other):
            continue
        whole = (out.data_ptr(), out.stride(), out.dtype, out.shape) == (
            other.data_ptr(), other.stride(), other.dtype, other.shape,
        )  # fmt: skip
        if whole and other_name != "out":
            continue
        if _overlap(out, other):
            raise ValueError(
                f"{name}: expected memory apart from {other_name} (or exactly {other_name}), given an overlap"
            )


def _span(x: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _spans_meet(x: torch.Tensor, y: torch.Tensor) -> bool:
    if not (x.numel() and y.numel()):
        return False
    (x0, x1), (y0, y1) = _span(x), _span(y)
    return x0 < y1 and y0 < x1


def _elements_apart(x: torch.Tensor) -> bool:
    """True when, dim by dim from the smallest stride up, no element lies inside the reach of the dims before it."""
    if x.numel() == 0:
        return True
    reach = 0
    for stride, n in sorted((s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1):
        if stride <= reach:
            return False
        reach += (n - 1) * stride
    return True


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two views may share a byte, by their strides; True as well after `MOST_STEPS` steps without an answer.

    Element i of x and j of y share one when d = y.data_ptr() - x.data_ptr() + sum_k (j_k t_k - i_k s_k) lies between
    -itemsize of y and itemsize of x. Terms of one stride are one term; largest strides first, each leaves few numbers
    that what is left can still bring into range.
    """
    reach: dict[int, list[int]] = {}
    for view, side in ((x, 1), (y, 0)):
        for n, s in zip(view.shape, view.stride(), strict=True):
            if n > 1 and s:
                reach.setdefault(s * view.element_size(), [0, 0])[side] += n - 1
    terms = sorted(reach.items(), reverse=True)
    # bounds of the sum of all terms from the i-th on, and their greatest common divisor
    low, high, unit = [0], [0], [0]
    for stride, (up, down) in reversed(terms):
        low.append(low[-1] - down * stride)
        high.append(high[-1] + up * stride)
        unit.append(math.gcd(unit[-1], stride))
    low, high, unit = low[::-1], high[::-1], unit[::-1]
    below, above = -y.element_size(), x.element_size()
    pending, steps = [(0, y.data_ptr() - x.data_ptr())], 0
    while pending:
        i, offset = pending.pop()
        # what is left has to bring `offset` to between `below` and `above`, in steps of unit[i]
        if offset + high[i] <= below or offset + low[i] >= above:
            continue
        if unit[i] and not any((above - 1 - offset - e) % unit[i] == 0 for e in range(min(unit[i], above - below - 1))):
            continue
        if i == len(terms):
            return True
        steps += 1
        if steps > MOST_STEPS:
            return True
        stride, (up, down) = terms[i]
        first = max(-down, -((offset + high[i + 1] - below - 1) // stride))
        last = min(up, (above - 1 - offset - low[i + 1]) // stride)
        pending.extend((i + 1, offset + k * stride) for k in range(first, min(last, first + MOST_STEPS) + 1))
    return False
