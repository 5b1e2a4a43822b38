"""Calls that are made again and again: arguments checked once, launches prepared once.

A decoding engine attends in every layer with the same lengths and page tables, and with queries and caches of the same
shapes. `plan` checks such a call, runs it once and keeps what it launched; a `Plan` then only compares shapes, puts the
new tensors in and launches. It holds no cached state and decides nothing: its answers are those of `cascade_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from cascade_lab import _checks, ops
from cascade_lab._passes import check_call
from cascade_lab.backends import Call, Pass
from cascade_lab.levels import Level, passes_of
from cascade_lab.paging import Layout
from cascade_lab.runtime import Backend
from cascade_lab.states import State

__all__ = ["Plan", "plan"]


def plan(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    levels: Sequence[Level],
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    num_splits: int | None = None,
    out_dtype: torch.dtype | None = None,
    layout: Layout = "NHD",
    backend: Backend = "auto",
) -> Plan:
    """Check a `cascade_attention` once, for calls with other queries and caches of the same shapes.

    `attention` of plain requests is one level. Everything is as in `cascade_attention`, which also says what is raised.

    A plan keeps the levels' tensors. It holds for the lengths and page tables that stand in them when it is made. Made
    under `runtime.unchecked()`, with max_seqlen_q given in the levels, its launches have room for all lengths that the
    tables can hold, and it follows what is written into those tensors later, as a captured graph does.

    Args:
        q: `[T, H_q, D]`, an example of the queries to come.
        k_cache, v_cache: `[num_pages, page_size, H_kv, D]` and `[..., D_v]`, or as `layout` says; examples too.
        levels, softmax_scale, softcap, sinks, k_scale, v_scale, num_splits, out_dtype, layout, backend: as in
            `cascade_attention`.

    Returns:
        Plan, to be called with (q, k_cache, v_cache).

    Example:
        >>> batch = cl.VerifyBatch([5, 3], [cl.DraftTree.branches(2, 2), None], page_size=4)
        >>> q, cache = torch.zeros(batch.num_rows, 2, 8), torch.zeros(batch.num_pages, 4, 1, 8)
        >>> attend = cl.plan(q, cache, cache, batch.levels("cascade"))
        >>> o, lse = attend(q, cache, cache)  # in every layer, with its queries and its cache
        >>> tuple(o.shape)
        (4, 2, 8)
    """
    call = Call(softmax_scale, softcap, num_splits, out_dtype, None, backend, sinks, k_scale, v_scale)
    passes, backend = passes_of(q, k_cache, v_cache, levels, backend, layout)
    call = check_call(q, passes, call._replace(backend=backend))
    return Plan(q, k_cache, v_cache, tuple(passes), call)


@dataclass(frozen=True)
class _Shape:
    """What two tensors must share for one to take the place of the other in a prepared launch."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    misaligned: int

    @classmethod
    def of(cls, x: torch.Tensor) -> _Shape:
        return cls(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16)


class Plan:
    """A checked call, ready for other queries and caches: `plan(q, k_cache, v_cache)` gives a State.

    On compiled Triton kernels a call makes two tensors and the launches, and partial states lie in memory of the plan,
    so that calls of one plan belong on one stream, as one layer after another does. Elsewhere it runs the call without
    its checks. Differentiable where the call is.

    Example:
        >>> rows, table, lens = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 2], [[0, 1], [2, 0]], [7, 4]))
        >>> q, cache = torch.zeros(2, 4, 8), torch.zeros(3, 4, 2, 8)
        >>> decode = cl.plan(q, cache, cache, [cl.Level(rows, table, lens, page_size=4)])
        >>> round(float(decode(q, cache, cache).lse[1, 0].exp()), 3)
        4.0
    """

    def __init__(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, passes: tuple[Pass, ...], call: Call
    ) -> None:
        self._passes, self._call = passes, call
        self._given = (q, k_cache, v_cache)
        self._shapes = tuple(map(_Shape.of, self._given))
        self._launches: list[tuple] = []
        self._apart = v_cache.data_ptr() - k_cache.data_ptr()
        # V as a view of K is loaded once, with K
        self._latent = 0 <= self._apart < k_cache.untyped_storage().nbytes()
        if call.backend != "triton":
            return
        from cascade_lab.backends.triton.mode import kept_launches

        with torch.no_grad(), kept_launches() as launches:
            o, lse = ops.dispatch(q.detach(), passes, call)
        self._results = (o.shape, o.dtype), (lse.shape, lse.dtype)
        # kernels take addresses, and shapes and strides beside them: a view stands where its tensor begins
        begins = {x.data_ptr(): i for i, x in reversed(list(enumerate((*self._given, o, lse)))) if x.numel()}
        # of a view with a negative bit they were given a copy, which no later call would fill
        if any(x.is_neg() for x in self._given):
            return
        for run, arguments in launches:
            self._launches.append((run, list(arguments), _places(arguments, begins)))

    def __call__(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> State:
        """Run the planned call.

        Args:
            q: `[T, H_q, D]`; k_cache, v_cache: shapes, strides, dtypes and device of those that were planned for.

        Returns:
            State, as `cascade_attention` does.

        Raises:
            TypeError, ValueError: a tensor of another kind; it is named. Values are not looked at.
        """
        given = (q, k_cache, v_cache)
        for name, x, old, shape in zip(_NAMES, given, self._given, self._shapes, strict=True):
            if x is not old:
                _check_same(name, x, shape)
        if torch.is_grad_enabled() and self._call.backend == "triton" and any(x.requires_grad for x in given):
            raise RuntimeError(ops.NO_TRITON_GRADIENT)
        fits = v_cache.data_ptr() - k_cache.data_ptr() == self._apart or not self._latent
        fits &= all(x.data_ptr() % 16 == shape.misaligned for x, shape in zip(given, self._shapes, strict=True))
        fits &= not any(x.is_neg() for x in given)
        if not self._launches or not fits or torch.compiler.is_compiling():
            return State(*ops.dispatch(q, [self._moved(one, k_cache, v_cache) for one in self._passes], self._call))
        (o_shape, o_dtype), (lse_shape, lse_dtype) = self._results
        o = torch.empty(o_shape, dtype=o_dtype, device=q.device)
        lse = torch.empty(lse_shape, dtype=lse_dtype, device=q.device)
        new = (*given, o, lse)
        for run, arguments, places in self._launches:
            arguments = arguments.copy()
            for i, which in places:
                arguments[i] = new[which] if isinstance(which, int) else _replaced(arguments[i], which, new)
            run(*arguments)
        return State(o, lse)

    def _moved(self, one: Pass, k_cache: torch.Tensor, v_cache: torch.Tensor) -> Pass:
        _, k, v = self._given
        if k_cache is k and v_cache is v:
            return one
        return replace(one, k_cache=_view_like(one.k_cache, k, k_cache), v_cache=_view_like(one.v_cache, v, v_cache))


_NAMES = ("q", "k_cache", "v_cache")


def _places(arguments: Sequence[object], begins: dict[int, int]) -> list[tuple[int, int | list]]:
    """Where arguments of a launch, or parts of one that is a tuple, begin with one of the tensors; and with which."""
    found: list[tuple[int, int | list]] = []
    for i, x in enumerate(arguments):
        if isinstance(x, torch.Tensor) and x.data_ptr() in begins:
            found.append((i, begins[x.data_ptr()]))
        elif isinstance(x, tuple) and (inside := _places(x, begins)):
            found.append((i, inside))
    return found


def _replaced(argument: tuple, places: list[tuple[int, int]], new: Sequence[torch.Tensor]) -> tuple:
    parts = list(argument)
    for i, which in places:
        parts[i] = new[which]
    return type(argument)(*parts)


def _view_like(view: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The view of `new` that `view` is of `old`, which it begins with."""
    return new if view is old else new.as_strided(view.shape, view.stride(), new.storage_offset())


def _check_same(name: str, x: torch.Tensor, planned: _Shape) -> None:
    _checks.tensor(name, x)
    if (x.dtype, x.device) != (planned.dtype, planned.device):
        raise TypeError(
            f"{name}: expected {planned.dtype} on {planned.device} as planned, given {x.dtype} on {x.device}"
        )
    if (x.shape, x.stride()) != (planned.shape, planned.strides):
        raise ValueError(
            f"{name}: expected {tuple(planned.shape)} with strides {planned.strides} as planned, given "
            f"{tuple(x.shape)} with strides {x.stride()}"
        )
