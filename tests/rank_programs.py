"""What each rank runs in the tests of `distributed`: inputs made from seeds, results saved by rank.

Nothing is judged here. The tests make the same inputs again and hold what the ranks saved to one process's answer.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from cascade_lab import Level, State, _wire, distributed, runtime
from cascade_lab.distributed import LocalCache, merge_across_ranks, ring_attention, sharded_attention
from cascade_lab.evidence.ranks import bytes_sent
from cascade_lab.sharding import PAGE_LAYOUTS, TOKEN_LAYOUTS, held_rows, held_tokens, shard_levels
from tests.cases import AttentionCase, attention_case, bytes_of, int32, offsets, random
from tests.verify import FORK, SHUFFLED, STAR, VerifyCase, verify_case

GOOD = "returned"
EXCHANGES = ("gather", "reduce", "exchange")
MOVED = (64, 8, 64)  # T, H, D of the merges whose bytes are counted
RINGS = {"ragged": [0, 1, 7, 30], "even": [24, 16], "tiny": [1, 2]}
RING_SHAPE = dict(num_heads=4, num_kv_heads=2, dim=16, value_dim=12)


@dataclass(frozen=True)
class MergeCase:
    """States of all ranks and the options of one `merge_across_ranks` call.

    `kind` says what the rows hold: "hostile" or "hollow" as in `states`, "absent" where the last rank has no keys, or
    "plain". With `views` each rank's tensors lie differently in memory.
    """

    name: str
    kind: str = "plain"
    shape: tuple[int, int, int] = (9, 4, 8)
    dtype: torch.dtype = torch.float32
    lse_dtype: torch.dtype = torch.float32
    options: dict = field(default_factory=dict)
    views: bool = False

    @property
    def mode(self) -> str:
        return self.options.get("mode", "all")


def _merge_cases() -> list[MergeCase]:
    odd = (9, 3, 8)  # 27 states: neither 2 nor 4 ranks divide them
    cases = []
    for algorithm in EXCHANGES:
        own = {"algorithm": algorithm}
        cases += [MergeCase(f"{algorithm} {kind}", kind, odd, options=own) for kind in ("hostile", "absent")]
        cases += [MergeCase(f"{algorithm} views", shape=odd, options=own, views=True)]
        cases += [MergeCase(f"{algorithm} one head of many", shape=(5, 1, 8), options=own, views=True)]
        cases += [MergeCase(f"{algorithm} fewer states than ranks", shape=(1, 1, 5), options=own)]
        cases += [MergeCase(f"{algorithm} no rows", shape=(0, 4, 8), options=own)]
        cases += [MergeCase(f"{algorithm} bfloat16", dtype=torch.bfloat16, options=own)]
        half = own | {"out_dtype": torch.float16}
        cases += [MergeCase(f"{algorithm} float16 out", "hostile", odd, options=half)]
        wide = MergeCase(f"{algorithm} float64", "hostile", odd, torch.float64, torch.float64, own)
        cases += [wide, replace(wide, name=f"{algorithm} float64 of float32 lse", lse_dtype=torch.float32)]
    for kind in ("hostile", "absent"):
        cases += [MergeCase(f"scatter {kind}", kind, options={"mode": "scatter"})]
    cases += [
        MergeCase("auto", "hostile", odd),
        MergeCase("scatter views", options={"mode": "scatter"}, views=True),
        MergeCase("scatter no rows", shape=(0, 4, 8), options={"mode": "scatter"}),
        MergeCase("scatter bfloat16 wire", options={"mode": "scatter", "wire_dtype": torch.bfloat16}),
        MergeCase("float16", "absent", dtype=torch.float16),
        MergeCase(
            "exchange bfloat16 wire", "absent", odd, options=dict(algorithm="exchange", wire_dtype=torch.bfloat16)
        ),
        MergeCase("gather float16 wire", options=dict(algorithm="gather", wire_dtype=torch.float16)),
        MergeCase("float64 wire", dtype=torch.float32, options=dict(algorithm="reduce", wire_dtype=torch.float64)),
        MergeCase("exchange triton", "hostile", (6, 2, 8), options=dict(algorithm="exchange", backend="triton")),
        MergeCase("scatter triton", "absent", (3, 4, 8), options=dict(mode="scatter", backend="triton")),
    ]
    return cases


MERGES = {case.name: case for case in _merge_cases()}


def states(case: MergeCase, world_size: int) -> tuple[Tensor, Tensor]:
    """o `[T, W, H, D]` and lse `[T, W, H]` of all ranks.

    "hostile" rows: 0 is empty everywhere, 1 has a NaN lse, 2 and 3 hold lse near 1e5 and -1e5, 4 mixes both, in 5
    rank 0 says "no keys" by +inf and its o is Inf, in 6 rank 1 has no keys and its o is NaN. "hollow" rows are
    the same without the NaN lse.
    """
    T, H, D = case.shape
    o = random(T, world_size, H, D, seed=3, dtype=case.dtype)
    lse = 3 * random(T, world_size, H, seed=4, dtype=case.lse_dtype)
    if case.kind == "absent":
        lse[:, -1], o[:, -1] = -torch.inf, torch.nan
        o[:, -1, 0], o[:, -1, -1, 0] = torch.inf, -torch.inf
    if case.kind in ("hostile", "hollow"):
        lse[0] = -torch.inf
        if case.kind == "hostile":
            lse[1, 1, 0] = torch.nan
        lse[2] += 1e5
        lse[3] -= 1e5
        lse[4, 0], lse[4, 1] = 1e5, -1e5
        lse[5, 0], o[5, 0] = torch.inf, torch.inf
        if T > 6:
            lse[6, 1], o[6, 1] = -torch.inf, torch.nan
    return o, lse


def own_state(case: MergeCase, rank: int, world_size: int) -> State:
    o, lse = (x[:, rank].contiguous() for x in states(case, world_size))
    T, H, D = case.shape
    if not case.views:
        return State(o, lse)
    # the same numbers among NaN, in another order on every rank
    if rank % 4 == 0:
        o, lse = _within(o, (T, H, D + 5)), lse.t().contiguous().t()
    elif rank % 4 == 1:
        o, lse = o.transpose(0, 1).contiguous().transpose(0, 1), _within(lse, (T, H + 2))
    elif rank % 4 == 2:
        o, lse = _within(o, (T, H + 3, D)), _within(lse, (2 * T, H), step=2)
    return State(o, lse)


def _within(x: Tensor, shape: tuple[int, ...], step: int = 1) -> Tensor:
    """x as a view of a larger NaN-filled tensor."""
    view = x.new_full(shape, torch.nan)[::step][tuple(slice(n) for n in x.shape)]
    return view.copy_(x)


def weights(case: MergeCase, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """What rank's loss multiplies its o and lse by."""
    T, H, D = case.shape
    H = H // world_size if case.mode == "scatter" else H
    return random(T, H, D, seed=100 + rank), random(T, H, seed=200 + rank)


GRADIENTS = {
    case.name: case
    for mode in ("all", "scatter")
    for case in (
        MergeCase(f"{mode} absent", "absent", options={"mode": mode}),
        MergeCase(f"{mode} hollow", "hollow", options={"mode": mode}),
        MergeCase(f"{mode} views", options={"mode": mode}, views=True),
        MergeCase(f"{mode} no rows", shape=(0, 4, 8), options={"mode": mode}),
        MergeCase(f"{mode} bfloat16", dtype=torch.bfloat16, options={"mode": mode}),
        MergeCase(f"{mode} float64", "absent", (9, 4, 8), torch.float64, torch.float64, {"mode": mode}),
    )
} | {f"{name} absent": MergeCase(f"{name} absent", "absent", options={"algorithm": name}) for name in EXCHANGES}


def attempt(call: Callable) -> str:
    """How the call ends: "returned", or the error in one line."""
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return GOOD


def merges(rank: int, world_size: int) -> dict:
    found = {}
    for name, case in MERGES.items():
        if case.options.get("backend") == "triton" and runtime.triton_mode() == "absent":
            continue
        state = own_state(case, rank, world_size)
        before = [bytes_of(x) for x in state]
        merged = merge_across_ranks(state, **case.options)
        untouched = all(torch.equal(bytes_of(x), bits) for x, bits in zip(state, before, strict=True))
        found[name] = {"o": merged.o, "lse": merged.lse, "untouched": untouched}
    return found


def groups(rank: int, world_size: int) -> dict:
    case = MERGES["auto"]
    state = own_state(case, rank, world_size)
    every = [dist.new_group([r]) for r in range(world_size)]
    some = dist.new_group(list(range(1, world_size, 2)))
    alone = merge_across_ranks(state, every[rank])
    found = {"alone": tuple(alone), "outside": attempt(lambda: merge_across_ranks(state, every[rank - 1]))}
    found["scatter alone"] = tuple(merge_across_ranks(state, every[rank], "scatter"))
    if rank % 2:
        found["some"] = tuple(merge_across_ranks(state, some))
        ring = _ring_inputs("ragged")
        mine = held_rows(RINGS["ragged"], rank // 2, world_size // 2)
        found["some ring"] = tuple(ring_attention(*(x[mine] for x in ring), RINGS["ragged"], group=some))
    return found


def gradients(rank: int, world_size: int) -> dict:
    found = {}
    for name, case in GRADIENTS.items():
        found[name] = _gradients(case, rank, world_size, merge_across_ranks)
    case = GRADIENTS["all views"]
    o, lse = (x.clone().requires_grad_() for x in own_state(case, rank, world_size))
    (first,) = torch.autograd.grad(merge_across_ranks(State(o, lse)).o.square().sum(), o, create_graph=True)
    found["twice"] = attempt(lambda: first.square().sum().backward())
    return found


def _gradients(case: MergeCase, rank: int, world_size: int, merge: Callable) -> tuple[Tensor, Tensor]:
    o, lse = (x.detach().requires_grad_() for x in own_state(case, rank, world_size))
    merged = merge(State(o, lse), **case.options)
    by_o, by_lse = weights(case, rank, world_size)
    loss = (merged.o * by_o).sum() + torch.where(merged.lse.isfinite(), merged.lse * by_lse, 0.0).sum()
    loss.backward()
    return o.grad, lse.grad


def compiled(rank: int, world_size: int) -> dict:
    """Whole graphs, their results and gradients, and those of the same calls uncompiled."""
    found = {}

    def merge(state: State, **options) -> State:
        return merge_across_ranks(state, **options)

    for name in ("all absent", "scatter absent"):
        case = GRADIENTS[name]
        state = own_state(case, rank, world_size)
        whole = torch.compile(merge, fullgraph=True, backend="aot_eager")
        found[name] = {
            "compiled": (*whole(state, **case.options), *_gradients(case, rank, world_size, whole)),
            "eager": (*merge(state, **case.options), *_gradients(case, rank, world_size, merge)),
        }
    # the second number of rows makes a graph for any number
    o, lse = own_state(MERGES["auto"], rank, world_size)
    whole = torch.compile(merge, fullgraph=True, backend="aot_eager")
    rows = [State(o[:n], lse[:n]) for n in (9, 4, 7, 1)]
    found["any number of rows"] = {
        "compiled": [x for state in rows for x in whole(state)],
        "eager": [x for state in rows for x in merge(state)],
    }
    return found


def moved(rank: int, world_size: int) -> dict:
    """Bytes that this rank's TCP connections sent for merges and rings; nothing where the system does not count."""
    try:
        bytes_sent()
    except NotImplementedError:
        return {}
    T, H, D = MOVED
    state = State(random(T, H, D, seed=rank), random(T, H, seed=9 + rank))
    found = {}
    calls = {name: (lambda name=name: merge_across_ranks(state, algorithm=name)) for name in EXCHANGES}
    calls["half wire"] = lambda: merge_across_ranks(state, algorithm="exchange", wire_dtype=torch.bfloat16)
    calls["half out"] = lambda: merge_across_ranks(state, algorithm="exchange", out_dtype=torch.bfloat16)
    calls["scatter"] = lambda: merge_across_ranks(state, mode="scatter")
    for layout in TOKEN_LAYOUTS:
        held = held_tokens([300, 41], world_size, layout)[rank]
        q, k, v = random(held, 4, 32, seed=1), random(held, 2, 32, seed=2), random(held, 2, 16, seed=3)
        calls[f"ring {layout}"] = lambda q=q, k=k, v=v, layout=layout: ring_attention(q, k, v, [300, 41], layout=layout)
    for name, call in calls.items():
        call()
        dist.barrier()
        before = bytes_sent()
        with runtime.unchecked():
            call()
        dist.barrier()  # what others have received was sent
        found[name] = bytes_sent() - before
    with_checks = bytes_sent()
    merge_across_ranks(state, algorithm="gather")
    dist.barrier()
    found["gather with checks"] = bytes_sent() - with_checks
    return found


def decode_case(name: str) -> AttentionCase:
    lengths = {"ragged": [37, 0, 16, 5, 64], "one page": [3, 0], "no keys": [0, 0]}[name]
    return attention_case([1] * len(lengths), lengths, page=4, value_dim=12)


def level_of(case: AttentionCase) -> Level:
    return Level(case.cu_seqlens_q, case.page_table, case.cache_seqlens, case.k_cache.shape[1], name="decode")


VERIFIES = {
    "node": dict(rows="node"),
    "branch": dict(rows="branch", value_dim=12),
    "leaf": dict(rows="leaf"),
    "three levels": dict(shared=8, rows="node"),
    "half": dict(dtype=torch.bfloat16),
}


def verify_of(name: str) -> VerifyCase:
    shared = VERIFIES[name].get("shared", 0)
    return verify_case([shared + n for n in (13, 0, 5, 16)], [FORK, SHUFFLED, None, STAR], **VERIFIES[name])


def attentions(rank: int, world_size: int) -> dict:
    found = {}
    for name in ("ragged", "one page", "no keys"):
        case = decode_case(name)
        for layout in PAGE_LAYOUTS:
            shard = shard_levels([level_of(case)], rank, world_size, layout=layout)
            cache = LocalCache.of(case.k_cache, case.v_cache, shard)
            found[f"decode {name} {layout}"] = _attend(case.q, cache, shard.levels)
    case = decode_case("ragged")
    shard = shard_levels([level_of(case)], rank, world_size)
    cache = LocalCache.of(case.k_cache, case.v_cache, shard)
    found["decode scatter"] = _attend(case.q, cache, shard.levels, mode="scatter")
    found["decode options"] = _attend(case.q, cache, shard.levels, softmax_scale=0.7, softcap=1.5, num_splits=3)
    if runtime.triton_mode() != "absent":
        found["decode triton"] = _attend(case.q, cache, shard.levels, backend="triton")
    with runtime.unchecked():
        found["decode unchecked"] = _attend(case.q, cache, shard.levels)
    no_rows = [Level(offsets([0] * 5), level.page_table, level.cache_seqlens, 4) for level in shard.levels]
    found["no rows"] = _attend(case.q[:0], cache, no_rows)
    nobody = Level(offsets([]), int32([]).view(0, 0), int32([]), 4)
    found["no requests"] = _attend(case.q[:0], cache, [nobody])
    for name in VERIFIES:
        case = verify_of(name)
        levels = case.batch.levels("cascade")
        drafts = [len(levels) - 1]
        shard = shard_levels(levels, rank, world_size, layout="interleaved", replicated=drafts)
        cache = LocalCache.of(case.k_cache, case.v_cache, shard)
        found[f"verify {name}"] = _attend(case.q, cache, shard.levels, replicated=drafts)
        if name == "node":
            found["counted twice"] = attempt(lambda: sharded_attention(case.q, cache, shard.levels))  # noqa: B023
            found["after it"] = _attend(case.q, cache, shard.levels, replicated=drafts)
            (fused,) = case.batch.levels("fused")
            whole = LocalCache(case.k_cache, case.v_cache, torch.arange(len(case.k_cache)))
            found["fused everywhere"] = _attend(case.q, whole, [fused], replicated=[0])
    q = decode_case("ragged").q.clone().requires_grad_()
    case = decode_case("ragged")
    shard = shard_levels([level_of(case)], rank, world_size)
    # keys of nobody are NaN in the cache, and a slot that nobody reads has no gradient either way
    cache = LocalCache.of(case.k_cache.nan_to_num(0.0), case.v_cache.nan_to_num(0.0), shard)
    state = sharded_attention(q, cache, shard.levels)
    by_o = random(*state.o.shape, seed=300 + rank)
    (state.o * by_o).sum().backward()
    found["gradient of q"] = q.grad
    return found


def _attend(q: Tensor, cache: LocalCache, levels: Sequence[Level], **options) -> dict:
    reads = torch.zeros(cache.k_cache.shape[2], dtype=torch.int64)
    state = sharded_attention(q, cache, levels, reads=reads, **options)
    return {"o": state.o, "lse": state.lse, "reads": reads}


def _ring_inputs(name: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of all tokens of all prompts, packed."""
    total, shape = sum(RINGS[name]), RING_SHAPE
    return (
        random(total, shape["num_heads"], shape["dim"], seed=21, dtype=dtype),
        random(total, shape["num_kv_heads"], shape["dim"], seed=22, dtype=dtype),
        random(total, shape["num_kv_heads"], shape["value_dim"], seed=23, dtype=dtype),
    )


RING_OPTIONS = {
    "": {},
    " options": dict(softmax_scale=0.4, softcap=2.0, num_splits=2),
    " bfloat16": {},
    " float64": {},
    " float32 out": dict(out_dtype=torch.float32),
    " triton": dict(backend="triton"),
}
RING_DTYPES = {" bfloat16": torch.bfloat16, " float64": torch.float64, " float32 out": torch.bfloat16}
RING_CASES = [(name, layout, "") for name in RINGS for layout in TOKEN_LAYOUTS] + [
    ("ragged", "zigzag", kind) for kind in RING_OPTIONS if kind
]


def rings(rank: int, world_size: int) -> dict:
    found = {}
    for name, layout, kind in RING_CASES:
        if kind == " triton" and runtime.triton_mode() == "absent":
            continue
        mine = held_rows(RINGS[name], rank, world_size, layout)
        own = [x[mine] for x in _ring_inputs(name, RING_DTYPES.get(kind, torch.float32))]
        before = [bytes_of(x) for x in own]
        reads = torch.zeros(RING_SHAPE["num_kv_heads"], dtype=torch.int64)
        state = ring_attention(*own, RINGS[name], layout=layout, reads=reads, **RING_OPTIONS[kind])
        untouched = all(torch.equal(bytes_of(x), bits) for x, bits in zip(own, before, strict=True))
        found[name + " " + layout + kind] = {"o": state.o, "lse": state.lse, "reads": reads, "untouched": untouched}
    return found


def refusals(rank: int, world_size: int) -> dict:
    """Calls in which one rank, number 1, differs; after each, whether the group still merges."""
    odd = rank == 1
    case = MergeCase("good")
    o, lse = own_state(case, rank, world_size)

    def merge(state=None, other=None, **changed):
        """The good call, but on rank 1."""
        return lambda: merge_across_ranks(
            other if odd and other is not None else State(o, lse), **changed if odd else {}
        )

    calls = {
        "T": merge(other=State(o[:-1], lse[:-1])),
        "H": merge(other=State(o[:, 1:], lse[:, 1:])),
        "D": merge(other=State(o[..., 1:].contiguous(), lse)),
        "dtype of o": merge(other=State(o.bfloat16(), lse)),
        "dtype of lse": merge(other=State(o, lse.double())),
        "wire_dtype": merge(wire_dtype=torch.bfloat16),
        "out_dtype": merge(out_dtype=torch.float16),
        "mode": merge(mode="scatter"),
        "algorithm": merge(algorithm="reduce"),
        "requires_grad": merge(other=State(o.clone().requires_grad_(), lse)),
        "local: lse in half": merge(other=State(o, lse.bfloat16())),
        "local: transposed lse": merge(other=State(o, lse.t())),
        "local: no state": merge(other=(o,)),
        "local: text": merge(other="ab"),
        "local: unknown mode": merge(mode="some"),
        "local: unknown algorithm": merge(algorithm="tree"),
        "local: unknown wire": merge(wire_dtype=torch.int8),
        "local: half wire that adds": merge(algorithm="reduce", wire_dtype=torch.bfloat16),
        "local: unknown out": merge(out_dtype=torch.int32),
        "local: unknown backend": merge(backend="cuda"),
    }
    if runtime.triton_mode() != "absent":
        calls["local: float64 for triton"] = merge(other=State(o.double(), lse), backend="triton", algorithm="exchange")
    calls |= {f"sharded: {name}": call for name, call in _sharded_refusals(rank, world_size).items()}
    calls |= {f"ring: {name}": call for name, call in _ring_refusals(rank, world_size).items()}
    ring = _ring_refusals(rank, world_size)["good"]
    calls["call"] = ring if odd else merge()
    found = {}
    for name, call in calls.items():
        ended = attempt(call)
        merged = merge_across_ranks(State(o, lse))
        found[name] = {"ended": ended, "o": merged.o, "lse": merged.lse}
    # all ranks alike
    three = State(o[:, :3], lse[:, :3])
    found["everywhere: heads"] = {"ended": attempt(lambda: merge_across_ranks(three, mode="scatter"))}
    found["everywhere: scatter by gather"] = {
        "ended": attempt(lambda: merge_across_ranks(State(o, lse), mode="scatter", algorithm="gather"))
    }
    return found


def _sharded_refusals(rank: int, world_size: int) -> dict[str, Callable]:
    odd = rank == 1
    case = verify_of("node")
    levels = case.batch.levels("cascade")
    shard = shard_levels(levels, rank, world_size, replicated=[1])
    cache = LocalCache.of(case.k_cache, case.v_cache, shard)
    prefix, draft = shard.levels

    def call(levels=(prefix, draft), cache=cache, q=case.q, replicated=(1,), **options):
        changed = (q, cache, levels, replicated, options)
        plain = (case.q, good_cache, (prefix, draft), (1,), {})
        q, cache, levels, replicated, options = changed if odd else plain
        return lambda: sharded_attention(q, cache, levels, replicated=replicated, **options)

    good_cache = cache
    pages_of_two = (x.view(-1, 2, *x.shape[2:]) for x in (cache.k_cache, cache.v_cache))
    two_page = LocalCache(*pages_of_two, torch.arange(2 * len(cache.k_cache)))
    (fused,) = case.batch.levels("fused")
    whole = LocalCache(case.k_cache, case.v_cache, torch.arange(len(case.k_cache)))
    sibling = fused.tree_mask.clone()
    sibling[1, 0] ^= 1 << 2  # node 1 sees node 2
    fine = replace(prefix, page_table=_halved(prefix.page_table), page_size=2)
    heads = LocalCache(*(torch.cat((x, x), 2) for x in (cache.k_cache, cache.v_cache)), cache.page_ids)
    shorter = replace(draft, cache_seqlens=draft.cache_seqlens.clamp(max=1))
    nobody = replace(draft, cache_seqlens=torch.zeros_like(draft.cache_seqlens))
    rows = replace(draft, cu_seqlens_q=torch.cat((draft.cu_seqlens_q[:1], draft.cu_seqlens_q[:-1])))
    return {
        "number of levels": call((prefix,), replicated=()),
        "page size": call((fine, draft), two_page),
        "H_kv": call(cache=heads),
        "replicated": call(replicated=(0, 1)),
        "replicated levels": call((prefix, shorter)),
        "causal: replicated levels": call((prefix, replace(draft, causal=True))),
        "many: replicated": lambda: sharded_attention(
            case.q, cache, [prefix, draft, *[nobody] * 70], replicated=[*range(1, 66), 69 if odd else 67]
        ),
        "mask: replicated levels": lambda: sharded_attention(
            case.q, whole, [replace(fused, tree_mask=sibling) if odd else fused], replicated=[0]
        ),
        "T": call(
            tuple(replace(x, cu_seqlens_q=x.cu_seqlens_q.clamp(max=len(case.q) - 1)) for x in (prefix, draft)),
            q=case.q[:-1],
        ),
        "softmax_scale": call(softmax_scale=0.3),
        "softcap": call(softcap=3.0),
        "local: rows": call((prefix, rows)),
        "local: levels": call(levels=prefix),
        "local: no Level": call(levels=(prefix, 3)),
        "local: replicated": call(replicated=(2,)),
        "local: page": call((replace(prefix, page_size=3), draft)),
        "local: lengths": call((replace(prefix, cache_seqlens=prefix.cache_seqlens + 99), draft)),
        "local: pages": call((replace(prefix, page_table=prefix.page_table + 99), draft)),
        "local: table": call((replace(prefix, page_table=prefix.page_table[0]), draft)),
        "local: float table": call((replace(prefix, page_table=prefix.page_table.float()), draft)),
        "local: cache": call(cache=(cache.k_cache, cache.v_cache)),
        "local: page_ids": call(cache=replace(cache, page_ids=cache.page_ids.int())),
        "local: page_ids list": call(cache=replace(cache, page_ids=cache.page_ids.tolist())),
        "local: k_cache": call(cache=replace(cache, k_cache=cache.k_cache[0])),
        "local: q": call(q=case.q.tolist()),
        "local: scale": call(softmax_scale="half"),
        "local: reads": call(reads=torch.zeros(3)),
    }


def _halved(table: Tensor) -> Tensor:
    """A table of pages in pages of half the size."""
    parts = torch.stack((2 * table, 2 * table + 1), -1).flatten(1)
    return torch.where(table.repeat_interleave(2, 1) < 0, -1, parts).to(torch.int32)


def _ring_refusals(rank: int, world_size: int) -> dict[str, Callable]:
    odd, prompts = rank == 1, RINGS["even"]
    mine = held_rows(prompts, rank, world_size)
    q, k, v = (x[mine] for x in _ring_inputs("even"))

    def call(q=q, k=k, v=v, prompts=prompts, **options):
        changed = (q, k, v, prompts)
        return lambda: ring_attention(*(changed if odd else plain), **options if odd else {})

    plain = (q, k, v, prompts)
    return {
        "good": call(),
        "prompt_lens": call(prompts=prompts[::-1]),
        "many: prompt_lens": lambda: ring_attention(q, k, v, [0] * 500 + (prompts[::-1] if odd else prompts)),
        "layout": call(layout="contiguous"),
        "dtype": call(*(x.double() for x in (q, k, v))),
        "H_q": call(q=q[:, :2].contiguous()),
        "H_kv": call(k=k[:, :1].contiguous(), v=v[:, :1].contiguous()),
        "D_v": call(v=v[..., 1:].contiguous()),
        "softmax_scale": call(softmax_scale=0.3),
        "softcap": call(softcap=3.0),
        "local: tokens": call(k=k[1:]),
        "local: dtype of k": call(k=k.double()),
        "local: float8": call(v=v.to(torch.float8_e4m3fn)),
        "local: prompts": call(prompts=24),
        "local: negative prompt": call(prompts=[24, -16]),
        "local: unknown layout": call(layout="striped"),
        "local: strides": call(k=k.transpose(0, 1).contiguous().transpose(0, 1)),
        "local: heads": call(q=q[:, :3].contiguous()),
        "local: gradient": call(v=v.clone().requires_grad_()),
        "local: reads": call(reads=torch.zeros(3, dtype=torch.int64)),
        "local: splits": call(num_splits=0),
        "local: out_dtype": call(out_dtype=torch.int32),
        "local: backend": call(backend="cuda"),
        "local: cap": call(softcap=-1.0),
    }


def late(rank: int, world_size: int) -> dict:
    """Rank 1 comes to a merge only after the others have given up."""
    state = own_state(MERGES["auto"], rank, world_size)
    dist.barrier()  # connections are made under the same short timeout
    impatient = dist.new_group(timeout=timedelta(seconds=4))
    store = dist.distributed_c10d._get_default_store()
    started = time.monotonic()
    if rank == 1:
        for other in set(range(world_size)) - {1}:
            store.wait([f"gave up {other}"], timedelta(seconds=100))
        started = time.monotonic()
    ended = attempt(lambda: merge_across_ranks(state, impatient))
    seconds = time.monotonic() - started
    store.set(f"gave up {rank}", "")
    dist.destroy_process_group(impatient)  # what is left of it is in nobody's way
    merged = merge_across_ranks(state)
    return {"ended": ended, "seconds": seconds, "o": merged.o, "lse": merged.lse}


def deaths(rank: int, note: Callable[[str, object], None]) -> None:
    """Of four, ranks 3, 2 and 1 die in turn: in the middle of a ring, in the middle of a merge, and before a call."""
    four, three, two = dist.new_group(), dist.new_group([0, 1, 2]), dist.new_group([0, 1])
    state = own_state(MERGES["auto"], rank, 4)
    mine = held_rows([80], rank, 4)
    q, k, v = (random(len(mine), 2, 16, seed=seed) for seed in (1, 2, 3))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the others when one died; they have more to say
    dist.barrier()

    def lose(name: str, call: Callable) -> None:
        started = time.monotonic()
        ended = attempt(call)
        note(name, {"ended": ended, "seconds": time.monotonic() - started})

    if rank == 3:
        # it has taken and handed on one share of the keys, and owes the next to rank 0
        _wire.pass_on = _killed_on_second(_wire.pass_on)
    lose("ring", lambda: ring_attention(q, k, v, [80], group=four))
    note("merge of three", tuple(merge_across_ranks(state, three)))
    if rank == 2:
        # the first half has gone out, the others wait for this rank's merged slice
        distributed._merge_parts = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    lose("merge", lambda: merge_across_ranks(state, three, algorithm="exchange"))
    note("merge of two", tuple(merge_across_ranks(state, two)))
    if rank == 1:
        os._exit(1)
    lose("call", lambda: merge_across_ranks(state, two))


def _killed_on_second(call: Callable) -> Callable:
    calls = []

    def wrapped(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments)

    return wrapped


def run_all(folder: Path) -> None:
    """Every program in turn over the default group; what this rank found goes to a file of its number."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    programs = [merges, groups, gradients, attentions, rings, moved, refusals, late]
    if world_size == 2:
        programs.append(compiled)
    torch.save({program.__name__: program(rank, world_size) for program in programs}, folder / f"{rank}.pt")


def main(folder: Path) -> None:
    """All programs, and then the deaths, on a rank that torchrun started."""
    torch.set_num_threads(1)
    dist.init_process_group(timeout=timedelta(seconds=120))  # the choice of the backend is left to torch
    run_all(folder)
    rank, last = dist.get_rank(), {}

    def note(name: str, value: object) -> None:
        last[name] = value
        torch.save(last, folder / f"unfinished.{rank}")
        os.replace(folder / f"unfinished.{rank}", folder / f"last.{rank}.pt")

    deaths(rank, note)
    os._exit(0)  # nobody is left to close connections with


if __name__ == "__main__":
    main(Path(sys.argv[1]))
