"""The same algebra over ranks: each rank attends to the keys it holds, and claim 1 puts the answer together.

Rank r holds the key set K_r and returns (o_r, lse_r) for the same rows; the global state is

    lse = log sum_r e^lse_r,    o = sum_r e^(lse_r - lse) o_r.

n = T H_q states of D + 1 float32 numbers are exchanged, whatever the number of keys. What each of W ranks sends:

    gather      everybody gets all parts, then a W-way merge              (W - 1) n (D + 1)
    reduce      all-reduce of the maximum, then of [w o, w]               2 (W - 1)/W n (D + 2)
    exchange    all-to-all of W slices, a W-way merge of one slice by
                each, then the merged slices are gathered                 2 (W - 1)/W n (D + 1)

Sending each state once to whoever merges it and once back is least for more than two ranks, has no maximum to agree on
first, merges every row on one rank alone, so that all ranks hold equal bits, and its second half travels in the dtype
of the output. With mode "scatter" that half falls away. For two ranks whose output is as wide as what they send,
`gather` sends no more and takes one step. The transport is torch.distributed's own: gloo on CPU, NCCL on GPU.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from cascade_lab import _checks, _wire, paging, runtime
from cascade_lab._passes import check_heads
from cascade_lab.backends import Call
from cascade_lab.levels import Level, _attend_levels, _checked_plan
from cascade_lab.sharding import (
    Shard,
    TokenLayout,
    _check_counted_once,
    _check_rank,
    _check_replicated,
    _deal_level,
    _key_rectangles,
    held_tokens,
    ring_levels,
)
from cascade_lab.states import _OUT_DTYPES, State, _check_state, merge_state, merge_states

__all__ = [
    "ALGORITHMS",
    "LocalCache",
    "MODES",
    "WIRE_DTYPES",
    "merge_across_ranks",
    "merge_bytes",
    "ring_attention",
    "sharded_attention",
]

Mode = Literal["all", "scatter"]
Algorithm = Literal["auto", "gather", "reduce", "exchange"]
MODES: tuple[Mode, ...] = ("all", "scatter")
"""Where the merged rows go: all of them to all ranks, or to each rank its share."""
ALGORITHMS: tuple[Algorithm, ...] = ("auto", "gather", "reduce", "exchange")
"""How states travel in `merge_across_ranks`; "auto" takes the one that sends least."""
WIRE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""What partial outputs may be sent as."""
# bytes in which a rank tells the others of its arguments, blanks included: one size, whatever the call
_MESSAGE_BYTES = 512
# letters of one argument, so that all of a call find room
_VALUE_LETTERS = 64
_MERGE = "merge_across_ranks"


def merge_across_ranks(
    state: State,
    group: dist.ProcessGroup | None = None,
    mode: Mode = "all",
    *,
    algorithm: Algorithm = "auto",
    wire_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    backend: runtime.Backend = "auto",
) -> State:
    """Merge the states of all ranks, over disjoint key sets, into the state over their union.

    Args:
        state: this rank's o `[T, H_q, D]` and lse `[T, H_q]`, as `merge_state` takes them, of one shape on all ranks.
            A rank without keys gives o = 0 (or anything) and lse = -inf.
        group: the process group; the default group when absent. gloo on CPU, NCCL on GPU.
        mode: "all", every rank gets the whole state. "scatter", rank r gets heads r H_q/W to (r + 1) H_q/W - 1, as
            tensor parallel layers want them.
        algorithm: "gather", "reduce" or "exchange" as in this module's text; "auto" takes the one that sends fewest
            bytes (`merge_bytes` of rank 0), and among equals the one with fewer steps. "scatter" knows "exchange"
            alone.
        wire_dtype: of o on its way; when absent its own, which loses nothing: float32 for partial states. lse travels
            as it is. bfloat16 and float16 round each part once; "reduce" adds on the wire and takes neither.
        out_dtype: dtype of o; default that of state.o.
        backend: of the local merge, as in `merge_states`.

    Returns:
        State `[T, H_q, D]`, `[T, H_q]` ("scatter": `[T, H_q/W, D]`, `[T, H_q/W]`). Differentiable once: the gradient of
        a rank's state is that of the sum of all ranks' losses, so every rank runs its backward pass.

    Raises:
        TypeError, ValueError: a bad argument on this rank or, naming the rank, on another; shapes, dtypes, options or
            the need of a gradient that differ between ranks. Every rank raises, none waits. Under `unchecked()` and
            torch.compile ranks do not compare notes first.
        RuntimeError: no process group, or a rank was lost on the way.

    Under torch.compile a call is one operator.

    Example:
        >>> import torch.distributed as dist
        >>> alone = dict(store=dist.HashStore(), rank=0, world_size=1)  # torchrun says who is who: leave it out
        >>> dist.init_process_group("gloo", **alone)
        >>> state = cl.State(torch.randn(3, 2, 8), torch.randn(3, 2))  # over the keys that this rank holds
        >>> merged = cl.distributed.merge_across_ranks(state)
        >>> merged.o.shape, torch.allclose(merged.lse, state.lse)  # a rank alone has all there is
        (torch.Size([3, 2, 8]), True)
        >>> dist.destroy_process_group()
    """
    return _merge(lambda: state, _MERGE, group, mode, algorithm, wire_dtype, out_dtype, backend)


def merge_bytes(
    T: int,
    H: int,
    D: int,
    world_size: int,
    *,
    mode: Mode = "all",
    wire_dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype = torch.float32,
    lse_dtype: torch.dtype = torch.float32,
    rank: int = 0,
) -> dict[str, int]:
    """Payload bytes that a rank sends to merge `[T, H_q, D]` states, by algorithm, those with fewer steps first.

    Exact; ranks differ only where W does not divide T H_q, and an all-reduce counts as a ring of 2 (W - 1) equal steps.
    Transport headers and the 512 bytes by which ranks compare their arguments are not counted.

    Raises:
        TypeError, ValueError: a size that is no number of states, a rank outside the group, an unknown mode, or
            "scatter" with heads that W does not divide.

    Example:
        >>> cl.distributed.merge_bytes(T=4, H=8, D=128, world_size=4)  # per rank; 32 states of 129 numbers of 4 bytes
        {'gather': 49536, 'exchange': 24768, 'reduce': 24960}
    """
    rank, world_size = _check_rank(rank, world_size)
    T, H, D = _checks.integer("T", T, 0), _checks.integer("H", H, 0), _checks.integer("D", D, 1)
    dtypes = (("wire_dtype", wire_dtype), ("out_dtype", out_dtype), ("lse_dtype", lse_dtype))
    wire_dtype, out_dtype, lse_dtype = (_checks.dtype(name, x) for name, x in dtypes)
    return _merge_bytes(T, H, D, world_size, mode, wire_dtype, out_dtype, lse_dtype, rank)


def _merge_bytes(T, H, D, world_size, mode, wire_dtype, out_dtype, lse_dtype, rank=0) -> dict[str, int]:
    W, n = world_size, T * H
    full, back = (D * dtype.itemsize + lse_dtype.itemsize for dtype in (wire_dtype, out_dtype))
    if mode == "scatter":
        _check_scatter(H, W)
        return {"exchange": (n - n // W) * full}
    if mode != "all":
        raise ValueError(f"mode: expected one of {MODES}, given {mode!r}")
    own = (rank + 1) * n // W - rank * n // W
    sent = {"gather": (W - 1) * n * full, "exchange": (n - own) * full + (W - 1) * own * back}
    if wire_dtype in (torch.float32, torch.float64):
        sent["reduce"] = -(-2 * (W - 1) * n * (D * wire_dtype.itemsize + 2 * lse_dtype.itemsize) // W)
    return sent


@dataclass(frozen=True, eq=False)
class LocalCache:
    """The pages of a cache that this rank holds.

    Attributes:
        k_cache, v_cache: `[num_pages, page_size, H_kv, D]` and `[..., D_v]`, as in `attention`.
        page_ids: `[num_pages]` int64, for each page the one of the whole cache that it is; a page that several ranks
            hold has one id. It says which keys are the same, so that none is counted twice.

    Example:
        >>> batch = cl.VerifyBatch([64], [cl.DraftTree.branches(2, 3)])
        >>> shard = cl.sharding.shard_levels(batch.levels("cascade"), rank=1, world_size=2, replicated=[1])
        >>> k, v = torch.randn(2, batch.num_pages, 16, 1, 8)
        >>> cache = cl.distributed.LocalCache.of(k, v, shard)
        >>> len(k), len(cache.k_cache), cache.page_ids.tolist()
        (5, 3, [2, 3, 4])
    """

    k_cache: Tensor
    v_cache: Tensor
    page_ids: Tensor

    @classmethod
    def of(cls, k_cache: Tensor, v_cache: Tensor, shard: Shard, *, layout: paging.Layout = "NHD") -> LocalCache:
        """This rank's pages, copied out of a whole cache of either layout of `paging.LAYOUTS`.

        Raises:
            ValueError: a cache in other pages than the plan's, or without some of them.
        """
        k_cache, v_cache = paging.as_nhd("k_cache", k_cache, layout), paging.as_nhd("v_cache", v_cache, layout, "D_v")
        for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
            if len(shard.page_ids) and x.shape[1] != shard.page_size:
                raise ValueError(
                    f"{name}: expected [num_pages, page_size, H_kv, D] in the plan's pages of {shard.page_size}, "
                    f"given {tuple(x.shape)}"
                )
            if len(shard.page_ids) and int(shard.page_ids.max()) >= len(x):
                raise ValueError(f"{name}: expected page {int(shard.page_ids.max())} of the plan, given {len(x)} pages")
        pages = shard.page_ids.to(k_cache.device)
        return cls(k_cache[pages], v_cache[pages], pages)


torch.serialization.add_safe_globals([LocalCache])


def sharded_attention(
    q: Tensor,
    local_cache: LocalCache,
    levels: Sequence[Level],
    *,
    replicated: Collection[int] = (),
    group: dist.ProcessGroup | None = None,
    mode: Mode = "all",
    algorithm: Algorithm = "auto",
    wire_dtype: torch.dtype | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    num_splits: int | None = None,
    out_dtype: torch.dtype | None = None,
    reads: Tensor | None = None,
    backend: runtime.Backend = "auto",
) -> State:
    """Attention of the same rows on every rank over keys that are sharded by sequence: decode and verify.

    Each rank reads its own pages, and the partial states are merged. Drafts are few and written everywhere: a level in
    `replicated` is held whole by each rank, and its requests are dealt out, so that no key is read or counted twice.
    Attention sinks belong to no rank: one `merge_state` with the state of no value (o = 0, lse = sink) adds them to the
    global state.

    Args:
        q: `[T, H_q, D]`, the same rows on every rank.
        local_cache: this rank's pages.
        levels: this rank's plan over its own pages, as many levels and rows as on every other rank: see
            `sharding.shard_levels`. A rank without keys has lengths 0.
        replicated: indices of the levels that are equal on all ranks.
        group, mode, algorithm, wire_dtype: as in `merge_across_ranks`.
        softmax_scale, softcap, num_splits, out_dtype, reads, backend: as in `cascade_attention`; reads counts this
            rank's.

    Returns:
        The global state, as `merge_across_ranks` gives it. Differentiable on the torch backend; the gradient of q is
        that through this rank's keys, to be summed over ranks.

    Raises:
        TypeError, ValueError, RuntimeError: as in `cascade_attention` and `merge_across_ranks`; ValueError on all ranks
            for a key that a row would see twice, on one rank or on two. That check gathers every rank's plan: run
            a plan once with it, then under `runtime.unchecked()`.

    Example:
        >>> import torch.distributed as dist
        >>> alone = dict(store=dist.HashStore(), rank=0, world_size=1)  # torchrun says who is who: leave it out
        >>> dist.init_process_group("gloo", **alone)
        >>> batch = cl.VerifyBatch([64], [cl.DraftTree.branches(2, 3)])
        >>> q, (k, v) = torch.randn(6, 2, 8), torch.randn(2, batch.num_pages, 16, 1, 8)
        >>> plan, rank, size = batch.levels("cascade"), dist.get_rank(), dist.get_world_size()
        >>> shard = cl.sharding.shard_levels(plan, rank, size, replicated=[1])
        >>> cache = cl.distributed.LocalCache.of(k, v, shard)
        >>> o, lse = cl.distributed.sharded_attention(q, cache, shard.levels, replicated=[1])
        >>> torch.allclose(o, cl.cascade_attention(q, k, v, plan).o, atol=1e-6)
        True
        >>> dist.destroy_process_group()
    """
    where = "sharded_attention"

    def plan() -> list[Level]:
        if not isinstance(local_cache, LocalCache):
            raise TypeError(f"local_cache: expected a LocalCache, given {type(local_cache).__name__}")
        if not isinstance(levels, Sequence):
            raise TypeError(f"levels: expected a sequence of Level, given {type(levels).__name__}")
        for i, level in enumerate(levels):
            if not isinstance(level, Level):
                raise TypeError(f"levels[{i}]: expected a Level, given {type(level).__name__}")
        shared = _check_replicated(replicated, len(levels))
        rank, world_size = _wire.place(group)
        return [_deal_level(level, rank, world_size) if i in shared else level for i, level in enumerate(levels)]

    def attend() -> State:
        own = plan()
        wide = torch.promote_types(torch.float32, q.dtype) if isinstance(q, Tensor) else None
        call = Call(softmax_scale, softcap, num_splits, wide, reads, backend)
        return _attend_levels(q, local_cache.k_cache, local_cache.v_cache, own, call, whole=False)

    if runtime.checks_enabled():
        _check_each_key_once(plan, q, local_cache, levels, replicated, group, where, backend)
    out_dtype = out_dtype if out_dtype is not None or not isinstance(q, Tensor) else q.dtype
    scale = q.shape[-1] ** -0.5 if softmax_scale is None and isinstance(q, Tensor) and q.dim() else softmax_scale
    options = group, mode, algorithm, wire_dtype, out_dtype, backend
    return _merge(attend, where, *options, softmax_scale=scale, softcap=softcap)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prompt_lens: Sequence[int],
    *,
    group: dist.ProcessGroup | None = None,
    layout: TokenLayout = "zigzag",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    num_splits: int | None = None,
    out_dtype: torch.dtype | None = None,
    reads: Tensor | None = None,
    backend: runtime.Backend = "auto",
) -> State:
    """Causal prefill with rows and keys sliced over ranks; keys pass round in a ring and meet every row once.

    Args:
        q: `[T, H_q, D]`, this rank's rows: of each request its slices of `sharding.split_tokens`, packed by request.
        k, v: `[T, H_kv, D]` and `[T, H_kv, D_v]`, the same tokens, contiguous.
        prompt_lens: tokens per request, equal on all ranks.
        group: as in `merge_across_ranks`.
        layout: "zigzag" balances the triangle's area over ranks, "contiguous" does not.
        softmax_scale, softcap, num_splits, out_dtype, reads, backend: as in `attention`.

    Returns:
        The state of this rank's rows, o `[T, H_q, D_v]` and lse `[T, H_q]`.

    Raises:
        TypeError, ValueError: as in `attention`, tokens that are not this rank's share, or arguments that differ
            between ranks. RuntimeError: a gradient is required, no process group, or a rank was lost.

    Ring attention is Liu et al. (2023), arXiv:2310.01889; the zigzag split is that of Llama 3 (2024), arXiv:2407.21783.

    Example:
        >>> import torch.distributed as dist
        >>> alone = dict(store=dist.HashStore(), rank=0, world_size=1)  # torchrun says who is who: leave it out
        >>> dist.init_process_group("gloo", **alone)
        >>> q, k, v = torch.randn(8, 2, 8), torch.randn(8, 1, 8), torch.randn(8, 1, 8)  # prompts of 5 and 3 tokens
        >>> o, lse = cl.distributed.ring_attention(q, k, v, [5, 3])
        >>> torch.allclose(o[0], v[0].expand(2, 8), atol=1e-6)  # the first row sees its own key alone
        True
        >>> dist.destroy_process_group()
    """
    where = "ring_attention"

    def check() -> dict[str, object]:
        for name, x, heads in (("q", q, "H_q, D"), ("k", k, "H_kv, D"), ("v", v, "H_kv, D_v")):
            _checks.tensor(name, x)
            if x.dim() != 3 or not x.is_contiguous():
                raise ValueError(f"{name}: expected a contiguous [T, {heads}], given {tuple(x.shape)}, {x.stride()}")
        rank, world_size = _wire.place(group)
        held = held_tokens(prompt_lens, world_size, layout)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if len(x) != held[rank]:
                raise ValueError(
                    f"{name}: expected the {held[rank]} tokens that rank {rank} of {world_size} holds under layout "
                    f"{layout!r}, given {len(x)}"
                )
            if x.dtype != q.dtype:
                raise TypeError(f"{name}: expected dtype {q.dtype} as q, given {x.dtype}")
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            raise RuntimeError("ring_attention has no gradient: call it under torch.no_grad()")
        # no rows: what is left are the checks of all other arguments, before anything is sent
        nothing = torch.zeros(0, dtype=torch.int32, device=q.device)
        level = _on(Level(torch.zeros(1, dtype=torch.int32, device=q.device), nothing[:, None], nothing, 1), q.device)
        out = q.dtype if out_dtype is None else out_dtype
        _attend_to(q[:0], k, v, [level], out, softmax_scale, softcap, num_splits, reads, backend)
        scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
        return {
            "dtype": q.dtype,
            "H_q": q.shape[1],
            "D": q.shape[2],
            "H_kv": k.shape[1],
            "D_v": v.shape[2],
            "layout": layout,
            "prompt_lens": [int(n) for n in prompt_lens],
            "softmax_scale": float(scale),
            "softcap": float(softcap),
        }

    _agree(check, group, where)
    rank, world_size = _wire.place(group)
    held = held_tokens(prompt_lens, world_size, layout)
    wide = torch.promote_types(torch.float32, q.dtype)
    state = None
    with _wire.others_released(group):
        for step in range(world_size):
            holder = (rank - step) % world_size
            if step + 1 < world_size:
                taken = [x.new_empty((held[holder - 1], *x.shape[1:])) for x in (k, v)]
                arrive = _wire.pass_on((k, v), taken, group, where)
            levels = ring_levels(prompt_lens, rank, holder, world_size, layout)
            if levels or state is None:
                part = _attend_to(q, k, v, levels, wide, softmax_scale, softcap, num_splits, reads, backend)
                state = part if state is None else merge_state(*state, *part, backend=backend)
            if step + 1 < world_size:
                arrive()
                k, v = taken
    return State(state.o.to(q.dtype if out_dtype is None else out_dtype), state.lse)


def _attend_to(q, k, v, levels, wide, softmax_scale, softcap, num_splits, reads, backend) -> State:
    """This rank's rows over the keys at hand, viewed in the pages of `levels`."""
    if not levels:
        return State(
            q.new_zeros((*q.shape[:2], v.shape[2]), dtype=wide), q.new_full(q.shape[:2], -torch.inf, dtype=wide)
        )
    page_size = levels[0].page_size
    k_cache, v_cache = (x.view(len(x) // page_size, page_size, *x.shape[1:]) for x in (k, v))
    call = Call(softmax_scale, softcap, num_splits, wide, reads, backend)
    return _attend_levels(q, k_cache, v_cache, [_on(level, q.device) for level in levels], call, whole=False)


def _on(level: Level, device: torch.device) -> Level:
    moved = {name: getattr(level, name).to(device) for name in ("cu_seqlens_q", "page_table", "cache_seqlens")}
    return Level(**(vars(level) | moved))


def _merge(make, where: str, group, mode, algorithm, wire_dtype, out_dtype, backend, **numbers: float) -> State:
    """Make this rank's state, agree with the others, merge; an error of one rank is raised by all.

    `numbers` are further arguments that `make` has checked and that have to be the same on all ranks.
    """
    made: list[tuple[State, torch.dtype, torch.dtype, str]] = []

    def check() -> dict[str, object]:
        state = make()
        if not isinstance(state, (tuple, list)) or len(state) != 2:
            raise TypeError(f"state: expected State(o, lse), given {type(state).__name__}")
        made.append((State(*state), *_check_options(State(*state), group, mode, algorithm, wire_dtype, out_dtype)))
        (o, lse), wire, out, chosen = made[0]
        if runtime._pick_backend(backend, o) == "triton" and torch.float64 in (o.dtype, lse.dtype, wire, out):
            raise TypeError(
                f"state: expected no float64 with backend='triton', given o {o.dtype}, lse {lse.dtype}, "
                f"wire_dtype {wire}, out_dtype {out}"
            )
        said = dict(zip("THD", o.shape, strict=True))
        said |= {"dtype of o": o.dtype, "dtype of lse": lse.dtype, "wire_dtype": wire, "out_dtype": out}
        said |= {"mode": mode, "algorithm": chosen}
        said |= {"requires_grad": torch.is_grad_enabled() and (o.requires_grad or lse.requires_grad)}
        return said | {name: float(x) for name, x in numbers.items()}

    _agree(check, group, where)
    (o, lse), wire, out, chosen = made[0]
    backend = runtime._pick_backend(backend, o)
    name = (group or dist.group.WORLD).group_name
    if torch.compiler.is_compiling():
        return State(*_merge_op(o, lse, name, mode, chosen, wire, out, backend))
    return State(*_MergeAcross.apply(o, lse, name, mode, chosen, wire, out, backend))


def _check_options(state: State, group, mode, algorithm, wire_dtype, out_dtype) -> tuple[torch.dtype, torch.dtype, str]:
    """(wire dtype, output dtype, algorithm) with the defaults filled in."""
    o, lse = state
    _check_state("o", o, "lse", lse)
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {MODES}, given {mode!r}")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: expected one of {ALGORITHMS}, given {algorithm!r}")
    if wire_dtype is None:
        wire_dtype = torch.promote_types(o.dtype, torch.float32) if algorithm == "reduce" else o.dtype
    out_dtype = o.dtype if out_dtype is None else out_dtype
    for name, dtype, known in (("wire_dtype", wire_dtype, WIRE_DTYPES), ("out_dtype", out_dtype, _OUT_DTYPES)):
        if dtype not in known:
            raise TypeError(f"{name}: expected one of {known}, given {dtype}")
    (T, H, D), world_size = o.shape, _wire.place(group)[1]
    sent = _merge_bytes(T, H, D, world_size, mode, wire_dtype, out_dtype, lse.dtype)
    if algorithm == "auto":
        for name in sent:  # the first of equals has fewest steps; a compiler cannot trace min() over its own sizes
            if algorithm == "auto" or sent[name] < sent[algorithm]:
                algorithm = name
        return wire_dtype, out_dtype, algorithm
    if algorithm not in sent:
        given = f"mode={mode!r} and wire_dtype={wire_dtype}"
        raise ValueError(f"algorithm: expected one of {('auto', *sent)} with {given}, given {algorithm!r}")
    return wire_dtype, out_dtype, algorithm


def _check_scatter(H: int, world_size: int) -> None:
    if H % world_size:
        raise ValueError(f"mode: expected heads that {world_size} ranks divide for 'scatter', given H = {H}")


def _check_each_key_once(plan, q, local_cache: LocalCache, levels, replicated, group, where: str, backend: str) -> None:
    rectangles = np.zeros((0, 5), np.int64)

    def describe() -> dict[str, object]:
        nonlocal rectangles
        own = plan()
        k_cache, page_ids = local_cache.k_cache, local_cache.page_ids
        check_heads(q, k_cache, local_cache.v_cache, backend)
        num_pages, page_size, num_kv_heads = k_cache.shape[:3]
        _checks.tensor("local_cache.page_ids", page_ids)
        if page_ids.shape != (num_pages,) or page_ids.dtype != torch.int64:
            raise ValueError(
                f"local_cache.page_ids: expected [num_pages] = [{num_pages}] int64, given "
                f"{tuple(page_ids.shape)} {page_ids.dtype}"
            )
        _checked_plan(levels)
        for i, level in enumerate(levels):
            try:
                if page_size % level.page_size:
                    raise ValueError(f"page_size: expected a divisor of {page_size}, given {level.page_size}")
                fine_pages = num_pages * page_size // level.page_size
                paging.check_page_table(level.page_table, level.cache_seqlens, fine_pages, level.page_size)
            except (TypeError, ValueError) as error:
                raise type(error)(f"levels[{i}] {level.name!r}: {error}") from None
        rectangles = _key_rectangles(own, page_ids, page_size)
        return {
            "T": len(q),
            "number of levels": len(own),
            "page size": page_size,
            "H_kv": num_kv_heads,
            "replicated": [int(i) for i in sorted(replicated)],
            "replicated levels": _digest([levels[i] for i in sorted(replicated)], page_ids, page_size),
        }

    _agree(describe, group, where)
    rank, _ = _wire.place(group)
    _check_counted_once(_wire.gather_rows(np.insert(rectangles, 5, rank, axis=1), group, where))


def _digest(levels: Sequence[Level], page_ids: Tensor, page_size: int) -> str:
    """A text that changes with the levels' rows, the slots of the whole cache that they read, and their masks."""
    told = _key_rectangles(levels, page_ids, page_size).tobytes()
    for level in levels:
        told += repr(level.causal).encode()
        for name in ("tree_mask", "tail_seqlens"):
            x = getattr(level, name)
            if x is not None:
                _checks.tensor(name, x)
                told += x.cpu().numpy().tobytes()
    return f"digest {zlib.crc32(told):08x}"


def _agree(check: Callable[[], dict[str, object]], group, where: str) -> None:
    """Run `check` on every rank and compare the named values that it returns.

    They travel as a JSON object of their texts, null from a rank that refuses its arguments: it says so before it
    raises, so that the others raise too instead of waiting.
    """
    if not runtime.checks_enabled():
        check()
        return
    rank, world_size = _wire.place(group)
    try:
        said = {name: _text(value) for name, value in ({"call": where} | check()).items()}
        problem = None
    except Exception as error:
        said, problem = None, error
    if world_size > 1:
        message = bytearray(json.dumps(said).encode().ljust(_MESSAGE_BYTES))
        own = torch.frombuffer(message, dtype=torch.uint8).to(_wire.device_of(group))
        told = own.new_empty((world_size, _MESSAGE_BYTES))
        _wire.swap([[own]] * world_size, [[x] for x in told], group or dist.group.WORLD, where)
    if problem is not None:
        raise problem
    if world_size == 1:
        return
    everyone = [json.loads(bytes(x)) for x in told.tolist()]
    for r, theirs in enumerate(everyone):
        if theirs is None:
            raise ValueError(f"{where}: rank {r} refused its arguments, its own error says why (this is rank {rank})")
    for r, theirs in enumerate(everyone):
        for name, value in said.items():
            if value != theirs[name]:  # the call itself comes first, and tells which names follow
                raise ValueError(
                    f"{where}: expected the same {name} on all ranks, given {value} on rank {rank} and "
                    f"{theirs[name]} on rank {r}"
                )


def _text(value: object) -> str:
    """The value in `_VALUE_LETTERS` letters at most; of a longer one the start, and a digest of it all."""
    text = repr(value)
    if len(text) <= _VALUE_LETTERS:
        return text
    end = f"... (digest {zlib.crc32(text.encode()):08x})"
    return text[: _VALUE_LETTERS - len(end)] + end


def _merge_over_group(
    o: Tensor,
    lse: Tensor,
    group_name: str,
    mode: str,
    algorithm: str,
    wire_dtype: torch.dtype,
    out_dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, Tensor]:
    group = _wire.group_of_name(group_name)
    rank, W = _wire.place(group)
    T, H, D = o.shape
    o, lse = o.detach(), lse.detach()
    if o.numel() == 0 or W == 1:
        heads = H // W if mode == "scatter" else H
        alone = merge_states(o[:, None, :heads], lse[:, None, :heads], out_dtype=out_dtype, backend=backend)
        return alone.o, alone.lse
    with _wire.others_released(group):
        if algorithm == "reduce":
            return _reduce(o, lse, group, wire_dtype, out_dtype)
        o = o.to(wire_dtype)
        if mode == "scatter":
            slices = [tuple(x.contiguous() for x in own) for own in zip(o.chunk(W, 1), lse.chunk(W, 1), strict=True)]
            return _merge_parts(*_parts_of_all(slices, rank, group), (T, H // W), out_dtype, backend)
        # a slice of columns or heads may be viewed as rows and still not be one piece of memory
        o, lse = o.reshape(T * H, D).contiguous(), lse.reshape(T * H).contiguous()
        if algorithm == "gather":
            return _merge_parts(*_parts_of_all([(o, lse)] * W, rank, group), (T, H), out_dtype, backend)
        return tuple(x.view(T, H, *x.shape[1:]) for x in _exchange(o, lse, rank, group, out_dtype, backend))


def _exchange(o: Tensor, lse: Tensor, rank: int, group, out_dtype: torch.dtype, backend: str) -> tuple[Tensor, Tensor]:
    """o `[n, D]` and lse `[n]` merged over ranks, slice r of them on rank r."""
    n, W = len(lse), dist.get_world_size(group)
    bounds = [(r * n // W, (r + 1) * n // W) for r in range(W)]
    start, stop = bounds[rank]
    # parts and result have one size, and the parts are read before the result arrives
    room = [x.new_empty((max(n, W * (stop - start)), *x.shape[1:])) for x in (o, lse)]
    parts = [x[: W * (stop - start)].unflatten(0, (W, stop - start)) for x in room]
    _wire.swap([(o[i:j], lse[i:j]) for i, j in bounds], zip(*parts, strict=True), group, _MERGE)
    own = _merge_parts(*parts, (stop - start,), out_dtype, backend)
    if out_dtype != o.dtype:
        room[0] = o.new_empty((n, o.shape[1]), dtype=out_dtype)
    whole = [x[:n] for x in room]
    _wire.swap([own] * W, [[x[i:j] for x in whole] for i, j in bounds], group, _MERGE)
    return whole[0], whole[1]


def _parts_of_all(leaving, rank: int, group) -> list[Tensor]:
    """What `_wire.swap` brings, stacked: o `[W, ..., D]` and lse `[W, ...]`."""
    stacked = [x.new_empty((len(leaving), *x.shape)) for x in leaving[rank]]
    _wire.swap(leaving, zip(*stacked, strict=True), group, _MERGE)
    return stacked


def _merge_parts(
    o: Tensor, lse: Tensor, shape: Sequence[int], out_dtype: torch.dtype, backend: str
) -> tuple[Tensor, Tensor]:
    """Parts o `[W, ..., D]` and lse `[W, ...]` merged over W, as states of `shape`."""
    W, D = len(lse), o.shape[-1]
    o, lse = o.view(W, -1, 1, D).transpose(0, 1), lse.view(W, -1, 1).transpose(0, 1)
    merged = merge_states(o, lse, out_dtype=out_dtype, backend=backend)
    return merged.o.view(*shape, D), merged.lse.view(*shape)


def _reduce(o, lse, group, wire_dtype, out_dtype) -> tuple[Tensor, Tensor]:
    # what is added has to lie alike on all ranks
    lse = torch.where(lse == torch.inf, -torch.inf, lse).contiguous()
    # a maximum may lose a NaN on the way, a sum does not
    peak = lse.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    _wire.all_reduce(peak, group, _MERGE, dist.ReduceOp.MAX)
    shift = torch.where(peak == -torch.inf, 0.0, peak)
    weight = torch.exp(lse - shift)
    total = weight.clone()
    _wire.all_reduce(total, group, _MERGE)
    share = (weight / torch.where(total == 0, 1.0, total)).to(wire_dtype)
    o = torch.where((lse == -torch.inf)[..., None], 0.0, o.to(wire_dtype)).mul_(share[..., None]).contiguous()
    _wire.all_reduce(o, group, _MERGE)
    return o.to(out_dtype), shift + total.log()


def _keep(ctx, inputs, output) -> None:
    o, lse, group_name, mode, *_ = inputs
    ctx.save_for_backward(o, lse, *output)
    ctx.place = group_name, mode


def _merge_backward(ctx, grad_o, grad_lse):
    """Gradients of this rank's state: of the merged one they need the sum over ranks, or the slices of all ranks."""
    o_s, lse_s, o, lse = ctx.saved_tensors
    group_name, mode = ctx.place
    grads = _merge_backward_op if torch.compiler.is_compiling() else _merge_over_group_backward
    return *grads(o_s, lse_s, o, lse, grad_o, grad_lse, group_name, mode), None, None, None, None, None, None


def _merge_over_group_backward(
    o_s: Tensor, lse_s: Tensor, o: Tensor, lse: Tensor, grad_o: Tensor, grad_lse: Tensor, group_name: str, mode: str
) -> tuple[Tensor, Tensor]:
    """With p = e^(lse_s - lse): do_s = p do, dlse_s = p (do . o_s + c), where c = dlse - do . o."""
    group = _wire.group_of_name(group_name)
    W = dist.get_world_size(group)
    wide = torch.promote_types(lse_s.dtype, torch.promote_types(o_s.dtype, torch.float32))
    grad_o, grad_lse, lse = grad_o.to(wide), grad_lse.to(wide), lse.to(wide)
    terms = torch.cat((grad_o, (grad_lse - (grad_o * o.to(wide)).sum(-1))[..., None]), dim=-1)
    if W > 1 and mode == "all":
        terms = terms.contiguous()
        _wire.all_reduce(terms, group, _MERGE)
    elif W > 1:
        own = torch.cat((terms, lse[..., None]), dim=-1).contiguous()
        whole = _wire.all_gather(own, group, _MERGE).transpose(0, 1).flatten(1, 2)
        terms, lse = whole[..., :-1], whole[..., -1]
    empty = lse_s.isinf()
    p = torch.where(empty, 0.0, torch.exp(torch.where(empty, 0.0, lse_s.to(wide) - lse)))
    grad_o, rest = terms[..., :-1], terms[..., -1]
    ahead = (grad_o * torch.where(empty[..., None], 0.0, o_s.to(wide))).sum(-1) + rest
    d_lse = torch.where(empty, 0.0, p * ahead)
    return (p[..., None] * grad_o).to(o_s.dtype), d_lse.to(lse_s.dtype)


class _MergeAcross(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        output = _merge_over_group(*inputs)
        _keep(ctx, inputs, output)
        return output

    backward = staticmethod(once_differentiable(_merge_backward))


_merge_op = torch.library.custom_op("cascade_lab::merge_across_ranks", _merge_over_group, mutates_args=())
_merge_op.register_autograd(_merge_backward, setup_context=_keep)
_merge_backward_op = torch.library.custom_op(
    "cascade_lab::merge_across_ranks_backward", _merge_over_group_backward, mutates_args=()
)


@_merge_op.register_fake
def _(o, lse, group_name, mode, algorithm, wire_dtype, out_dtype, backend):
    T, H, D = o.shape
    if mode == "scatter":
        H = H // dist.get_world_size(_wire.group_of_name(group_name))
    return o.new_empty((T, H, D), dtype=out_dtype), lse.new_empty((T, H))


@_merge_backward_op.register_fake
def _(o_s, lse_s, o, lse, grad_o, grad_lse, group_name, mode):
    return torch.empty_like(o_s, memory_format=torch.contiguous_format), lse_s.new_empty(lse_s.shape)
