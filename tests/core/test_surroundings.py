"""What surrounds a call changes nothing of it: threads, modes and settings of torch, copies and views.

The public callables that take or give tensors stand in one table, `CALLS`, and every surrounding is tried on all of it:
the results are those of the call alone, or a message names what works instead.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from functools import partial
from threading import Barrier

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cascade_lab import (
    DraftTree,
    Level,
    State,
    VerifyBatch,
    applicability,
    attention,
    calibration,
    cascade_attention,
    distributed,
    drafts,
    ledger,
    merge_state,
    merge_states,
    paging,
    prefix,
    prefix_hit_levels,
    regions,
    runtime,
    sharding,
    states,
    traces,
    trigger,
)
from tests.cases import attention_case, int32, random, run

needs_triton = pytest.mark.skipif(runtime.triton_mode() == "absent", reason="Triton is not installed")
BACKENDS = ["torch", pytest.param("triton", marks=needs_triton)]
TREE = DraftTree([-1, 0, 0, 1, -1])


def where(kind: str) -> torch.device:
    """Where a backend's tensors are."""
    return runtime.device() if kind == "triton" else torch.device("cpu")


def states_of(kind: str, seed: int = 0) -> list[torch.Tensor]:
    """(o_a, lse_a, o_b, lse_b) of 5 rows and 3 heads; row 1 of a and row 2 of b are empty."""
    o_a, o_b = random(2, 5, 3, 16, seed=seed, device=where(kind))
    lse_a, lse_b = 4 * random(2, 5, 3, seed=seed + 1, device=where(kind))
    lse_a[1], lse_b[2] = -torch.inf, -torch.inf
    return [o_a, lse_a, o_b, lse_b]


def batch_on(kind: str, **options) -> VerifyBatch:
    return VerifyBatch([9, 6], [TREE, DraftTree.chain(3)], 4, device=where(kind), **options)


def verification(kind: str) -> Callable:
    batch = batch_on(kind)
    q = random(batch.num_rows, 4, 16, seed=2, device=where(kind))
    k, v = random(2, batch.num_pages, 4, 2, 16, seed=3, device=where(kind))
    return lambda: [cascade_attention(q, k, v, batch.levels(plan), backend=kind) for plan in drafts.PLANS]


def prefill(kind: str) -> Callable:
    q = random(12, 4, 16, seed=4, device=where(kind))
    k, v = random(2, 7, 4, 2, 16, seed=5, device=where(kind))
    lens = [9, 14], [4, 7], 4
    return lambda: [
        cascade_attention(q, k, v, prefix_hit_levels(*lens, split=split, device=where(kind)), backend=kind)
        for split in (False, True)
    ]


def ragged(kind: str, **options) -> Callable:
    case = attention_case([2, 3], [9, 6], device=where(kind), **options)
    return partial(run, case, kind)


def tree(kind: str) -> Callable:
    return ragged(kind, tree_mask=torch.tensor([[1], [3], [1], [2], [7]], device=where(kind)), softcap=3.0)


def long_keys(kind: str) -> Callable:
    """More keys than one block of the torch backend takes, over which its products add up in place."""
    q = random(1, 8, 128, seed=6, device=where(kind))
    k, v = random(2, 1, 1025, 8, 128, seed=7, device=where(kind))
    return partial(attention, q, k, v, int32([[0]], where(kind)), int32([1025], where(kind)), backend=kind)


def into(kind: str) -> Callable:
    o_a, lse_a, o_b, lse_b = states_of(kind)
    out, out_lse = torch.empty_like(o_a), lse_a.clone()
    return lambda: State(
        *(x.clone() for x in merge_state(o_a, lse_a, o_b, lse_b, out=out, out_lse=out_lse, backend=kind))
    )


def across_ranks(kind: str) -> Callable:
    """A group of one rank: the same code, and no other process."""
    state = State(*states_of(kind)[:2])
    q, k, v = random(3, 11, 2, 16, seed=8, device=where(kind))
    cache = distributed.LocalCache(k[:, None], v[:, None], torch.arange(11, device=where(kind)))
    plan = [Level(int32([0, 11], where(kind)), int32([list(range(11))], where(kind)), int32([11], where(kind)), 1)]
    return lambda: [
        distributed.merge_across_ranks(state, backend=kind),
        distributed.ring_attention(q, k, v, [4, 7], backend=kind),
        distributed.sharded_attention(q, cache, plan, backend=kind),
    ]


def drafted(kind: str) -> Callable:
    slots, mask = torch.arange(5, device=where(kind)), TREE.dense_mask()
    return lambda: [
        *(TREE.positions(3), TREE.dense_mask(2), TREE.packed_mask(2), *TREE.ancestor_page_table(slots)),
        *(DraftTree(TREE.parents).mask, DraftTree.from_dense_mask(mask).parents),
    ]


def planned(kind: str) -> list:
    return [batch_on(kind, rows=rows).levels(plan) for rows in drafts.ROWS[:2] for plan in drafts.PLANS[:2]]


def tables(kind: str) -> Callable:
    table, lens = paging.build_page_table([5, 9], 4).to(where(kind)), int32([5, 9], where(kind))
    csr = paging.page_table_to_csr(table, lens, 4)
    cache = random(3, 2, 4, 2, 8, seed=1, device=where(kind))
    return lambda: [
        *(paging.build_page_table([5, 0, 9], 4, first_page=2), paging.dense_page_table(3, device=where(kind))),
        *(paging.token_slots(table, 1, 7, 4), paging.page_table_to_csr(table, lens, 4)),
        *(paging.page_table_from_csr(*csr, 4), paging.shared_prefix_len(table, lens, lens, 4)),
        *(paging.split_kv_cache(cache), paging.read(cache[:, 0], torch.arange(3, device=where(kind)))),
    ]


def dealt(kind: str) -> Callable:
    plan = batch_on(kind).levels("cascade")
    return lambda: [
        *((each.levels, each.page_ids) for each in (sharding.shard_levels(plan, r, 2, replicated=[1]) for r in (0, 1))),
        *(sharding.ring_levels([8, 12], 0, holder, 2) for holder in (0, 1)),
        sharding.held_rows([8, 12], 1, 2),
    ]


def conversions(kind: str) -> Callable:
    lse, padded, offsets = (
        states_of(kind)[1],
        random(2, 3, 4, seed=1, device=where(kind)),
        int32([0, 4, 6], where(kind)),
    )
    plain = (states.lse_from_base2, states.lse_to_base2, states.lse_from_heads_first, states.lse_to_heads_first)
    return lambda: [*(convert(lse) for convert in plain), states.lse_from_padded(padded, offsets)]


# a call by its name: made ready, with its tensors, for a backend
CALLS: dict[str, Callable[[str], Callable]] = {
    "attention, causal": partial(ragged, causal=True),
    "attention, window": partial(ragged, window_size=(3, 1)),
    "attention, tree": tree,
    "attention, long": long_keys,
    "cascade_attention, drafts": verification,
    "cascade_attention, prefix": prefill,
    "merge_state": lambda kind: partial(merge_state, *states_of(kind), backend=kind),
    "merge_state, out": into,
    "merge_states": lambda kind: partial(
        merge_states, random(5, 4, 3, 16, seed=1, device=where(kind)), random(5, 4, 3, seed=2, device=where(kind)),
        backend=kind),
    "distributed": across_ranks,
    "conversions": conversions,
    "ledger": lambda kind: lambda: [ledger(batch_on(kind).levels(plan)).tile_tokens(4) for plan in drafts.PLANS],
    "DraftTree": drafted,
    "VerifyBatch": lambda kind: partial(planned, kind),
    "paging": tables,
    "sharding": dealt,
}  # fmt: skip
KERNELS = [name for name in CALLS if name.startswith(("att", "casc", "merge", "dist"))]


@pytest.fixture(scope="module", autouse=True)
def _a_group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def leaves(x) -> list:
    """Tensors and numbers of a result, in order; a level is its fields."""
    if isinstance(x, torch.Tensor | int | float | str | None):
        return [x]
    if is_dataclass(x):
        return [leaf for f in fields(x) for leaf in leaves(getattr(x, f.name))]
    return [leaf for each in x for leaf in leaves(each)]


def same(a, b) -> bool:
    """Equal to the last bit, in dtype and on the same device."""
    pairs = list(zip(leaves(a), leaves(b), strict=True))
    return all(
        x.dtype == y.dtype and x.device == y.device and torch.equal(x.nan_to_num(7e7), y.nan_to_num(7e7))
        if isinstance(x, torch.Tensor)
        else x == y
        for x, y in pairs
    )


@pytest.mark.parametrize("kind", BACKENDS)
def test_threads_give_what_each_gives_alone(kind):
    """F2 (tests/known_faults.md): four threads at once, three calls each, against the same calls one by one.

    The launches take turns under one lock, so an exception in one thread leaves nothing for the others.
    """

    def calls(seed: int) -> list:
        case = attention_case([2 + seed, 1], [9, 4 + seed], seed=seed, device=where(kind))
        state = run(case, kind)
        other = run(case.with_options(causal=True), kind)
        both = torch.stack([state.o, other.o], 1), torch.stack([state.lse, other.lse], 1)
        bad = random(2, 1, 8, seed=seed, device=where(kind))
        with pytest.raises(ValueError, match="lse_b"):
            merge_state(bad, bad[..., 0], bad, bad[:1, :, 0], backend=kind)
        return [*state, *merge_state(*state, *other, backend=kind), *merge_states(*both, backend=kind)]

    alone = [calls(seed) for seed in range(4)]
    barrier = Barrier(4)

    def together(seed: int) -> list:
        barrier.wait()
        return calls(seed)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(together, range(4)))
    assert all(same(a, b) for a, b in zip(found, alone, strict=True))


@contextlib.contextmanager
def default_device(name: str):
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


SURROUNDINGS = {
    "bfloat16 autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16 autocast": lambda: torch.autocast("cpu", torch.float16),
    "inference mode": torch.inference_mode,
    "default device": lambda: default_device("meta"),
    "device context": lambda: torch.device("meta"),
    "deterministic": lambda: deterministic(),
}


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@pytest.mark.parametrize("kind", BACKENDS)
def test_no_surrounding_changes_a_result(kind, surrounding):
    """F1, F3: every public call inside, to the last bit what it is outside; inputs are made outside.

    What a call makes lies on the device of its tensors, or the CPU where it has none, whatever the default device is.
    """
    for name in CALLS if kind == "torch" else KERNELS:
        call = CALLS[name](kind)
        outside = call()
        with SURROUNDINGS[surrounding]():
            inside = call()
        assert same(inside, outside), name


def trained(inputs: list[torch.Tensor], compute: Callable) -> list[torch.Tensor]:
    """Gradients of a loss over o and lse in the inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    o, lse = compute(*leaves)
    loss = (o * random(*o.shape, seed=9)).sum() + (lse.clamp(min=-99) * random(*lse.shape, seed=10)).sum()
    return list(torch.autograd.grad(loss, leaves))


def differentiable(name: str) -> tuple[list[torch.Tensor], Callable]:
    """Float32 inputs on the CPU and what is computed of them on the torch backend."""
    if name == "merge_state":
        return states_of("torch"), merge_state
    if name == "merge_states":
        return [random(5, 4, 3, 16, seed=1), random(5, 4, 3, seed=2)], merge_states
    if name == "attention":
        case = attention_case([2, 3], [9, 6], causal=True)
        index = case.page_table, case.cache_seqlens
        k, v = random(2, *case.k_cache.shape, seed=3)
        return [case.q, k, v], lambda q, k, v: attention(
            q, k, v, *index, cu_seqlens_q=case.cu_seqlens_q, causal=True, backend="torch"
        )
    batch = batch_on("torch")
    inputs = [random(batch.num_rows, 4, 16, seed=2), *random(2, batch.num_pages, 4, 2, 16, seed=3)]
    return inputs, lambda q, k, v: cascade_attention(q, k, v, batch.levels("cascade"), backend="torch")


DIFFERENTIABLE = ("attention", "cascade_attention", "merge_state", "merge_states")


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_under_autocast_are_those_without(name, dtype):
    """F1: backward inside the block, or outside of it, or in a checkpoint that computes again, equals that of float32,
    to the last bit, which is near that of float64."""
    inputs, compute = differentiable(name)
    expected = trained(inputs, compute)
    exact = trained([x.double() for x in inputs], compute)
    for a, b in zip(expected, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)

    def inside(*leaves):
        with torch.autocast("cpu", dtype):
            return compute(*leaves)

    assert same(trained(inputs, inside), expected)
    with torch.autocast("cpu", dtype):
        assert same(trained(inputs, compute), expected)
        assert same(trained(inputs, lambda *x: checkpoint(compute, *x, use_reentrant=False)), expected)


@pytest.mark.parametrize("name", ["attention", "merge_state"])
def test_compiled_calls_under_autocast_are_those_without(name):
    """F1: forward and backward through AOT autograd."""
    inputs, compute = differentiable(name)
    compiled = torch.compile(compute, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert same(compiled(*inputs), compute(*inputs))
        assert same(trained(inputs, compiled), trained(inputs, compute))
    torch.compiler.reset()


class Operations(TorchDispatchMode):
    """Counts the operations of torch that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_an_output_beside_its_inputs_in_one_buffer_is_found_apart_by_strides(monkeypatch):
    """F5: `[T, 2, H, D]` merged in place, half by half; nothing is allocated to find out, and the search is bounded."""
    both, lses = random(700, 2, 4, 32, seed=1), random(700, 2, 4, seed=2)
    o_a, o_b, lse_a, lse_b = both[:, 0], both[:, 1], lses[:, 0], lses[:, 1]
    expected = merge_state(o_a.clone(), lse_a.clone(), o_b.clone(), lse_b.clone())
    some, one = both[3:5, 0], both[4]
    with Operations() as seen:
        assert not states._overlap(o_a, o_b)
        assert states._overlap(some, one)
    assert seen.names == []
    merge_state(o_a, lse_a, o_b, lse_b, out=o_a, out_lse=lse_a)
    assert same(State(o_a, lse_a), expected)
    # without an answer after a bounded number of steps, on the safe side
    monkeypatch.setattr(states, "MOST_STEPS", 0)
    assert states._overlap(o_a, o_b)


def test_overlap_of_small_views_is_exact():
    """F5: against the bytes themselves, on random strides, offsets and itemsizes."""
    memory = torch.zeros(4000, dtype=torch.uint8)
    draw = np.random.default_rng(1)

    def view() -> torch.Tensor:
        dims = draw.integers(1, 4)
        dtype = (torch.float32, torch.float16, torch.uint8)[draw.integers(3)]
        strides = draw.choice([1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 40], dims).tolist()
        return memory.view(dtype).as_strided(draw.integers(1, 5, dims).tolist(), strides, int(draw.integers(60)))

    def touched(x: torch.Tensor) -> set[int]:
        starts = np.add.outer(0, sum(np.ix_(*(np.arange(n) * s for n, s in zip(x.shape, x.stride(), strict=True)))))
        first = x.data_ptr() + starts.ravel() * x.element_size()
        return {int(at) + byte for at in first for byte in range(x.element_size())}

    found = []
    for _ in range(400):
        x, y = view(), view()
        found.append(states._overlap(x, y))
        assert found[-1] == bool(touched(x) & touched(y)), (x.stride(), y.stride())
    assert 0 < sum(found) < len(found)


def test_unchecked_looks_for_no_overlap():
    """F5: inside `unchecked()` nothing compares memory; outside the same call is refused."""
    o_a, lse_a, o_b, lse_b = states_of("torch")
    shifted = torch.zeros(o_a.numel() + 1)[1:].view(o_a.shape)
    o_a = shifted.as_strided(o_a.shape, o_a.stride(), 0).copy_(o_a)
    with pytest.raises(ValueError, match="out: expected memory apart from o_a"):
        merge_state(o_a, lse_a, o_b, lse_b, out=shifted)
    with runtime.unchecked():
        merge_state(o_a, lse_a, o_b, lse_b, out=shifted)


def test_what_holds_tensors_is_equal_to_itself_alone():
    """F7: `in`, `index` and `==` ask for the object, of every public record of tensors, which also goes into sets."""
    plan, again = (batch_on("torch").levels("cascade") for _ in range(2))
    tails = batch_on("torch").copied_tails("cascade")
    shard = sharding.shard_levels(plan, 0, 2, replicated=[1])
    cache = distributed.LocalCache(torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 1, 4), torch.arange(2))
    assert plan[0] in plan
    assert plan.index(plan[1]) == 1
    assert plan[0] not in again
    for one in (plan[0], tails, shard, cache):
        assert one == one
        assert one != copy.copy(one)
        assert len({one, one, copy.copy(one)}) == 2


def traced(call: Callable, inputs: list[torch.Tensor], mode: str):
    return make_fx(call, tracing_mode=mode)(*inputs)


def test_fake_and_meta_tensors_and_traces_ask_for_no_value():
    """F9: shapes and dtypes come out, and a trace of one call runs on other values."""
    merged, rest = states_of("torch"), states_of("torch", seed=5)
    case = attention_case([2, 3], [9, 6], dtype=torch.float16)
    inputs = [case.q, case.k_cache, case.v_cache, case.page_table, case.cache_seqlens, case.cu_seqlens_q]

    def attend(q, k, v, table, lengths, offsets):
        return attention(q, k, v, table, lengths, cu_seqlens_q=offsets, causal=True, max_seqlen_q=3)

    def pair(o_a, lse_a, o_b, lse_b):
        return merge_state(o_a, lse_a, o_b, lse_b)

    def many(o_a, lse_a, o_b, lse_b):
        return merge_states(torch.stack((o_a, o_b), 1), torch.stack((lse_a, lse_b), 1))

    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in merged]
        out, out_lse = torch.empty(5, 3, 16), torch.empty(5, 3)
        for state in (merge_state(*fakes), many(*fakes), merge_state(*fakes, out=out, out_lse=out_lse)):
            assert (state.o.shape, state.lse.shape) == ((5, 3, 16), (5, 3))
        state = attend(*(mode.from_tensor(x) for x in inputs))
        assert (state.o.shape, state.o.dtype, state.lse.dtype) == ((5, 4, 16), torch.float16, torch.float32)
    on_meta = [x.to("meta") for x in merged]
    out, out_lse = torch.empty_like(on_meta[0]), torch.empty_like(on_meta[1])
    assert merge_state(*on_meta, out=out, out_lse=out_lse).o is out
    assert many(*on_meta).o.shape == (5, 3, 16)
    with pytest.raises(ValueError, match="q: expected a tensor with data, given device meta"):
        attend(*(x.to("meta") for x in inputs))
    for mode in ("real", "fake", "symbolic"):
        for call in (pair, many):
            assert same(traced(call, merged, mode)(*rest), call(*rest))
        again = [x + 1 if x.is_floating_point() else x for x in inputs]
        assert same(traced(attend, inputs, mode)(*again), attend(*again))


@pytest.mark.parametrize("kind", BACKENDS)
def test_tensors_without_elements_have_no_strides_that_matter(kind):
    """F12: what NumPy makes of an empty array has strides 0."""

    def empty(*shape: int) -> torch.Tensor:
        made = torch.from_numpy(np.zeros(shape, np.float32))
        assert made.stride(-1) == 0 or 0 not in shape
        return made.to(where(kind)) if where(kind).type == "cuda" else made

    none, o, lse = int32([], where(kind)), empty(0, 2, 16), empty(0, 2)
    for state in (
        merge_state(o, lse, o, lse, backend=kind),
        merge_state(o, lse, o, lse, out=empty(0, 2, 16), out_lse=empty(0, 2), backend=kind),
        merge_states(empty(0, 3, 2, 16), empty(0, 3, 2), backend=kind),
        attention(o, empty(0, 4, 2, 16), empty(0, 4, 2, 16), none.view(0, 0), none, backend=kind),
    ):
        assert (state.o.shape, state.lse.shape) == ((0, 2, 16), (0, 2))
    q = random(3, 2, 16, seed=1, device=where(kind))
    no_keys = [Level(int32([0, 3], where(kind)), none.view(1, 0), int32([0], where(kind)), fine) for fine in (4, 2)]
    state = cascade_attention(q, empty(0, 4, 2, 16), empty(0, 4, 2, 16), no_keys, backend=kind)
    assert not state.o.any()
    assert state.lse.isneginf().all()


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_write_into_a_tensor_counts_as_one(kind):
    """Kernels that write `out`, `out_lse` and `reads` raise their version: autograd refuses what it saved of them."""
    o_a, lse_a, o_b, lse_b = states_of(kind)
    out, out_lse = torch.empty_like(o_a), torch.empty_like(lse_a)
    case = attention_case([2, 3], [9, 6], device=where(kind))
    reads = torch.zeros(2, dtype=torch.int64, device=where(kind))
    versions = [x._version for x in (out, out_lse, reads)]
    merge_state(o_a, lse_a, o_b, lse_b, out=out, out_lse=out_lse, backend=kind)
    run(case, kind, reads=reads)
    assert all(x._version > before for x, before in zip((out, out_lse, reads), versions, strict=True))
    factor = random(5, 3, 16, seed=3, device=where(kind)).requires_grad_()
    product = (factor * out).sum()
    merge_state(o_a, lse_a, o_b, lse_b, out=out, backend=kind)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        made = torch.empty_like(o_a)
        assert merge_state(o_a, lse_a, o_b, lse_b, out=made, backend=kind).o is made


@pytest.mark.parametrize("kind", BACKENDS)
def test_views_that_mark_their_values_as_negated_are_read_so(kind):
    """The imaginary part of a conjugate is such a view; a kernel reads memory, where the sign is missing."""

    def negated(x: torch.Tensor) -> torch.Tensor:
        view = torch.complex(torch.zeros_like(x), x.neg()).conj().imag
        view = view if view.stride(-1) == 1 else torch._neg_view(-x)
        assert view.is_neg()
        return view

    inputs = states_of(kind)
    expected = merge_state(*inputs, backend=kind)
    assert same(merge_state(*map(negated, inputs), backend=kind), expected)
    many = random(5, 4, 3, 16, seed=1, device=where(kind)), random(5, 4, 3, seed=2, device=where(kind))
    assert same(merge_states(*map(negated, many), backend=kind), merge_states(*many, backend=kind))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        case = attention_case([2, 3], [9, 6], causal=True, dtype=dtype, device=where(kind))
        marked = negated if dtype == torch.float32 else lambda x: torch._neg_view(-x)
        views = replace(case, **{name: marked(getattr(case, name)) for name in ("q", "k_cache", "v_cache")})
        assert same(run(views, kind), run(case, kind))
    with pytest.raises(ValueError, match="out: expected memory that holds its values, given a view that marks them"):
        merge_state(*inputs, out=negated(inputs[0]), backend=kind)


@pytest.mark.parametrize("kind", BACKENDS)
def test_forward_mode_and_transforms_work_or_name_what_does(kind):
    """`torch.func.grad` and `vmap` go through merges; tangents and transforms of attention are refused by name."""
    inputs = states_of(kind)

    def loss(*x: torch.Tensor) -> torch.Tensor:
        o, lse = merge_state(*x, backend=kind)
        return o.square().sum() + lse.sum()

    def loss_of_many(o: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        return loss(o[:, 0], lse[:, 0], *merge_states(o, lse, backend=kind))

    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    assert same(torch.func.grad(loss, argnums=(0, 1, 2, 3))(*inputs), expected)
    other = states_of(kind, seed=7)
    examples = [torch.stack(pair) for pair in zip(inputs, other, strict=True)]
    merged = torch.vmap(lambda *x: merge_state(*x, backend=kind), in_dims=(0, 0, None, 0))(
        *examples[:2], inputs[2], examples[3]
    )
    for i, one in enumerate((inputs, other)):
        alone = merge_state(one[0], one[1], inputs[2], one[3], backend=kind)
        torch.testing.assert_close(merged.o[i], alone.o)
        torch.testing.assert_close(merged.lse[i], alone.lse)
    both = torch.stack((inputs[0], inputs[2]), 1), torch.stack((inputs[1], inputs[3]), 1)
    grads = torch.func.vmap(torch.func.grad(loss_of_many))(*(x[None].expand(2, *x.shape) for x in both))
    torch.testing.assert_close(grads[1], torch.func.grad(loss_of_many)(*both))

    case = attention_case([2, 3], [9, 6], causal=True, device=where(kind))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(inputs[0], inputs[0])
        q = forward_ad.make_dual(case.q, case.q)
        for call in (lambda: merge_state(dual, *inputs[1:], backend=kind), lambda: run(replace(case, q=q), kind)):
            with pytest.raises(
                RuntimeError, match=r"no forward-mode derivative .*; use reverse mode: torch.autograd.grad"
            ):
                call()
    with pytest.raises(RuntimeError, match="merge_state has no forward-mode"):
        torch.func.jvp(loss, tuple(inputs), tuple(inputs))
    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises(
            RuntimeError, match=r"attention takes no transform of torch.func .* more requests of one call"
        ):
            transform(
                lambda q: attention(
                    q,
                    case.k_cache,
                    case.v_cache,
                    case.page_table,
                    case.cache_seqlens,
                    cu_seqlens_q=case.cu_seqlens_q,
                    backend=kind,
                ).o.sum()
            )(case.q[None].expand(2, -1, -1, -1) if transform is torch.func.vmap else case.q)


def public_objects() -> dict[str, object]:
    """One of every public class that a user may hold between two programs."""
    batch = VerifyBatch([9, 6], [TREE, None], 4, tokens=[5, 6, 7, 8, 9])
    assert TREE.mask.shape == (5, 1)  # what a tree keeps once it is asked for does not hinder it
    plan = batch.levels("cascade")
    case = applicability.Case(8, [True, False], 4)
    samples = [(float(p), float(n), 1 + p * n + n * n / 2) for p in (0, 64, 128, 256) for n in (32, 64, 128, 256)]
    return {
        "State": State(*states_of("torch")[:2]),
        "Level": plan[0],
        "DraftTree": TREE,
        "VerifyBatch": batch,
        "VirtualRequests": batch.virtual_requests,
        "CopiedTails": batch.copied_tails("cascade"),
        "Shard": sharding.shard_levels(plan, 0, 2, replicated=[1]),
        "LocalCache": distributed.LocalCache(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4), torch.arange(1)),
        "Ledger": ledger(plan, num_q_heads=4, num_kv_heads=2),
        "RankLedger": sharding.sharded_ledgers(plan, 2, replicated=[1])[1],
        "Decision": trigger.should_cascade(batch, trigger.H100),
        "DeviceModel": trigger.H100,
        "Case": case,
        "Finding": applicability.check_applicability(case)[1],
        "Calibration": calibration.fit(samples),
        "PrefillTerms": prefix.hand_over(8, 16, 4),
        "Region": regions.CSA(4, 8, 16),
        "Mixture": regions.deepseek_sparse(core_flops=4, indexer_flops=2),
        "Request": traces.Request(0.0, 8, 4, (1, 2), None),
        "TraceSummary": traces.summarize([(8, 4), (16, 8)]),
        "Traffic": traces.CONVERSATION,
    }


def saved(x: object) -> object:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


def everything_of(x: object) -> list:
    if isinstance(x, VerifyBatch):
        return [x.levels(plan) for plan in drafts.PLANS] + [x.num_pages, x.rows, x.page_table, x.tokens]
    if isinstance(x, DraftTree):
        return [x.parents, x.depth, x.mask]
    return [x]


def test_public_objects_are_pickled_copied_and_saved():
    """All come back from `pickle` and `copy`; those that hold tensors or make them from `torch.save` and a default
    `torch.load` as well."""
    objects = public_objects()
    tensors = ["State", "Level", "DraftTree", "VerifyBatch", "VirtualRequests", "CopiedTails", "Shard", "LocalCache"]
    for name, x in objects.items():
        ways = [lambda x: pickle.loads(pickle.dumps(x)), copy.copy, copy.deepcopy]
        for again in [way(x) for way in (*ways, *([saved] if name in tensors else []))]:
            assert type(again) is type(x), name
            if name in tensors:
                assert same(everything_of(again), everything_of(x)), name
            else:
                assert again == x, name
    assert saved(objects["DraftTree"]).ancestors(3) == (0, 1)
