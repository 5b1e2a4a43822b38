"""What must not be read may hold anything: NaN and both infinities there leave every bit of a result as it was."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cascade_lab import State, cascade_attention, merge_state, merge_states
from tests.cases import INT32_MAX, AttentionCase, attention_case, bytes_of, int32, random, run, tree_mask
from tests.verify import CHAIN, FORK, SHUFFLED, STAR, VerifyCase, run_levels, verify_case

INF, NAN = math.inf, math.nan
POISON = [NAN, INF, -INF]
TREES = [FORK, [-1], CHAIN, SHUFFLED]
# the third request has rows and no keys
ROWS, LENGTHS = [5, 1, 3, 7], [9, 4, 0, 41]
RULES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (4, 2)},
    "tree": {"tail_seqlens": int32([5, 0, 0, 7])},
}


def assert_same_bits(actual: State, expected: State) -> None:
    for name, a, e in zip(State._fields, actual, expected, strict=True):
        assert not e.isnan().any()
        assert torch.equal(bytes_of(a), bytes_of(e)), f"{name} changed in {int((a != e).sum())} places"


def fill(value: float, *tensors: Tensor) -> int:
    """Write `value` over every NaN of the memory behind these views; returns over how many."""
    count = 0
    for x in tensors:
        memory = x if x._base is None else x._base
        unread = memory.isnan()
        count += int(unread.sum())
        memory[unread] = value
    return count


def forest(device, beyond: int) -> Tensor:
    """Masks of TREES in three words, with `beyond` in the bits after each tail and in the words that none reaches."""
    mask = tree_mask(TREES, device)
    used = torch.tensor([2 ** len(parents) - 1 for parents in TREES for _ in parents], device=device)[:, None]
    return torch.cat((mask | beyond & ~used, torch.full((len(mask), 2), beyond, device=device)), dim=1)


def case_with(value: float, rule: str, device, **options) -> AttentionCase:
    """A ragged batch whose gaps, spare pages, slots after the last token and rows without keys hold `value`.

    Head dims are no powers of two, so that blocks of columns end in the gaps.
    """
    shape = dict(dim=12, value_dim=20, layout="padded") | options
    case = attention_case(ROWS, LENGTHS, device=device, **RULES[rule], **shape)
    case = case.with_options(**{name: x.to(device) for name, x in case.options.items() if isinstance(x, Tensor)})
    if rule == "tree":
        case = case.with_options(tree_mask=forest(device, 0 if value == 0 else -1))
    case.q[6:9] = NAN
    assert fill(value, case.q, case.k_cache, case.v_cache) > 2000
    return case


@pytest.mark.parametrize(("rule", "num_splits"), [("full", 1), ("causal", 3), ("window", 1), ("tree", 3)])
def test_attention(backend, device, loads, rule, num_splits):
    """Gaps between heads, rows and columns, slots after a length, pages of nobody, rows without keys, spare bits."""
    clean = run(case_with(0.0, rule, device), backend, loads, prefix="clean_", num_splits=num_splits)
    for poison in POISON:
        case = case_with(poison, rule, device)
        state = run(case, backend, loads, prefix=f"{poison}_", num_splits=num_splits)
        assert_same_bits(state, clean)
        assert (state.o[6:9] == 0).all()
        assert (state.lse[6:9] == -INF).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_attention_in_half_precision(backend, device, loads, dtype):
    options = dict(dtype=dtype, dim=20, value_dim=24, page=3)
    clean = run(case_with(0.0, "causal", device, **options), backend, loads, prefix="clean_")
    for poison in POISON:
        case = case_with(poison, "causal", device, **options)
        assert_same_bits(run(case, backend, loads, prefix=f"{poison}_"), clean)


@pytest.mark.parametrize("junk", [INT32_MAX, -1, -INT32_MAX - 1, "a page of another request"])
def test_page_table_entries_after_the_last_page(backend, device, loads, junk):
    case = case_with(NAN, "causal", device)
    pages = -(-case.cache_seqlens // 4)
    after = torch.arange(case.page_table.shape[1], device=device) >= pages[:, None]
    table = case.page_table.masked_fill(after, 0)
    other = table.roll(1, 0)[:, :1] if isinstance(junk, str) else int32([[junk]], device)
    clean = run(replace(case, page_table=table), backend, loads, prefix="clean_")
    given = replace(case, page_table=torch.where(after, other, table))
    assert not torch.equal(given.page_table, table)
    assert_same_bits(run(given, backend, loads), clean)


@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
def test_keys_outside_every_window(backend, device, loads, which):
    """Rows 38 to 40 of 41 and 7 to 8 of 9, windows of 4: keys up to 33 and up to 2 are not read, K or V."""
    case = attention_case([3, 2], [41, 9], page=1, device=device, window_size=(4, 0))
    clean = run(case, backend, loads, prefix="clean_")
    cache = getattr(case, which).clone()
    given = replace(case, **{which: cache})
    for poison in POISON:
        for r, last in enumerate((33, 2)):
            cache[case.page_table[r, : last + 1].long()] = poison
        assert_same_bits(run(given, backend, loads), clean)
    # the next key is read, so one more bad key does show
    cache[case.page_table[0, 34].long()] = NAN
    assert run(given, backend, loads).o[0].isnan().all()


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
@pytest.mark.parametrize("rule", ["causal", "tree"])
def test_a_bad_key_harms_only_the_rows_that_see_it(backend, device, loads, rule):
    """K of a key that some rows of a tile see and others do not; the others keep their bits, or their last digits."""
    case = case_with(0.0, rule, device)
    clean = run(case, backend, loads, prefix="clean_")
    # key 37 of request 3 is key 3 of its tail: the root of SHUFFLED, and what a causal row sees from position 37 on
    slot = case.page_table[3, 37 // 4].long(), 37 % 4
    sees = torch.zeros(16, dtype=torch.bool, device=device)
    sees[9:] = (forest(device, 0)[9:, 0] >> 3 & 1).bool() if rule == "tree" else torch.arange(34, 41) >= 37
    assert 0 < sees[9:].sum() < 7
    # the torch backend goes through the keys again row by row, in other blocks
    close = dict(rtol=0, atol=0 if backend == "triton" else 1e-6)
    for poison in POISON:
        k_cache = case.k_cache.clone()
        k_cache[slot] = poison
        state = run(replace(case, k_cache=k_cache), backend, loads, prefix=f"{poison}_")
        torch.testing.assert_close(state.o[~sees], clean.o[~sees], **close)
        torch.testing.assert_close(state.lse[~sees], clean.lse[~sees], **close)
        if math.isnan(poison):
            assert state.o[sees].isnan().all()
            assert state.lse[sees].isnan().all()


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
def test_a_bad_value_stays_in_its_request(backend, device, loads):
    """V of a key that a row does not see may spoil that row under Triton when they share a tile, and no other one."""
    case = case_with(0.0, "causal", device)
    clean = run(case, backend, loads, prefix="clean_")
    for poison in POISON:
        v_cache = case.v_cache.clone()
        v_cache[case.page_table[3, 37 // 4].long(), 37 % 4] = poison
        state = run(replace(case, v_cache=v_cache), backend, loads, prefix=f"{poison}_")
        assert_same_bits(State(state.o[:9], state.lse[:9]), State(clean.o[:9], clean.lse[:9]))
        torch.testing.assert_close(state.lse, clean.lse, rtol=0, atol=1e-6)
        assert not state.o[12:].isfinite().any()
        if backend == "torch":
            torch.testing.assert_close(state.o[:12], clean.o[:12], rtol=0, atol=1e-6)


def test_reads_touches_its_own_counters_alone(backend, device, loads):
    memory = torch.full((6,), 7, dtype=torch.int64, device=device)
    case = attention_case([2, 3], [9, 20], device=device)
    if loads is not None:
        loads.register(reads=memory[2:4])
    run(case, backend, loads, reads=memory[2:4])
    assert memory.tolist() == [7, 7, 36, 36, 7, 7]


def plan_with(value: float, plan: str, rows: str, device) -> tuple[VerifyCase, list]:
    """A ragged batch with `value` in all memory that no level names, and its levels with junk in their margins."""
    options = dict(rows=rows, page=4, heads=(2, 1), dim=12, interleaved=True, spare_pages=2, device=device)
    case = verify_case([13, 0, 5, 16], [FORK, CHAIN, None, STAR], **options)
    wide = torch.full((len(case.q) + 1, 2, 24), NAN, device=device)
    q = wide[1:, :, :12].copy_(case.q)
    assert fill(value, q, case.k_cache) > 500
    levels = []
    for level in case.batch.levels(plan):
        clean = value == 0
        held = -(-level.cache_seqlens // level.page_size)
        margin = torch.nn.functional.pad(level.page_table, (0, 2))
        after = torch.arange(margin.shape[1], device=device) >= held[:, None]
        level = replace(level, page_table=margin.masked_fill(after, 0 if clean else INT32_MAX))
        if level.tree_mask is not None:
            mask, tails = level.tree_mask, level.tail_seqlens
            tails = level.cu_seqlens_q.diff() if tails is None else tails
            bits = 2 ** tails.repeat_interleave(level.cu_seqlens_q.diff()).long()[:, None] - 1
            beyond = torch.zeros_like(mask) if clean else ~bits
            level = replace(level, tree_mask=torch.cat((mask | beyond, beyond | (0 if clean else -1)), dim=1))
        levels.append(level)
    return replace(case, q=q), levels


@pytest.mark.parametrize(
    ("plan", "rows"),
    [("naive", "branch"), ("cascade", "branch"), ("fused", "branch"), ("naive", "leaf"), ("fused", "node")],
)
def test_cascade(backend, device, loads, plan, rows):
    """Interleaved caches in pages of 4 and single tokens, a request without rows, one without a prefix."""
    case, levels = plan_with(0.0, plan, rows, device)
    clean = cascade_attention(case.q, case.k_cache, case.v_cache, levels, backend=backend)
    for poison in POISON:
        case, levels = plan_with(poison, plan, rows, device)
        # a recorder keeps one tensor of a name: the first run is held to its views, the others to their memory
        assert_same_bits(run_levels(case, levels, backend, loads if math.isnan(poison) else None), clean)


def spread(x: Tensor, value: float) -> Tensor:
    """The same numbers as a view of memory that is twice as long in every dimension but a tensor's last, and wider."""
    shape = [2 * n for n in x.shape[:-1]] + [x.shape[-1] + 5]
    memory = torch.full(shape, value, dtype=x.dtype, device=x.device)
    return memory[(*(slice(1, None, 2) for _ in x.shape[:-1]), slice(2, 2 + x.shape[-1]))].copy_(x)


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merges(backend, device, loads, dtype, poison):
    """Gaps around o and lse, the o of empty states, and what `out` held before."""
    o = random(7, 3, 2, 20, seed=1, dtype=dtype, device=device)
    lse = random(7, 3, 2, seed=2, device=device)
    lse[1, 0], lse[2, :], lse[3, 1:], lse[4, 2] = -INF, -INF, INF, -INF

    def merged(value: float) -> list[State]:
        strided_o, strided_lse = spread(o, value), spread(lse, value)
        strided_o[lse.isinf()] = value
        if loads is not None:
            loads.register(**{f"o {value}": strided_o, f"lse {value}": strided_lse})
        sides = (strided_o[:, 0], strided_lse[:, 0], strided_o[:, 1], strided_lse[:, 1])
        pair, many = merge_state(*sides, backend=backend), merge_states(strided_o, strided_lse, backend=backend)
        out, out_lse = spread(torch.full_like(o[:, 0], value), 3.0), spread(torch.full_like(lse[:, 0], value), 3.0)
        written = merge_state(*sides, out=out, out_lse=out_lse, backend=backend)
        kept = State(*(x.clone() for x in written))
        assert written.o is out
        out.fill_(3.0), out_lse.fill_(3.0)
        assert all((x._base == 3.0).all() for x in (out, out_lse)), "something was written beside out"
        return [pair, many, kept]

    for state, clean in zip(merged(poison), merged(0.0), strict=True):
        assert_same_bits(state, clean)


@contextlib.contextmanager
def fresh_memory_is_nan():
    """Fill what torch allocates without a value with NaN, and integers with their largest value."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.mark.parametrize("rule", RULES)
def test_the_torch_backend_writes_all_it_allocates(rule):
    """The recorder fills uninitialised memory for Triton; here torch does, for passes, plans, merges and gradients."""

    def results() -> list[Tensor]:
        case = case_with(NAN, rule, "cpu")
        q = case.q.clone().requires_grad_()
        state = run(replace(case, q=q), "torch")
        weight = random(*state.o.shape, seed=4)
        finite = state.lse.isfinite()
        (gradient,) = torch.autograd.grad((state.o * weight)[finite].sum() + state.lse[finite].sum(), q)
        many = merge_states(torch.stack((state.o, weight), 1), torch.stack((state.lse, weight[..., 0]), 1))
        verify, levels = plan_with(NAN, "cascade", "node", "cpu")
        plan = cascade_attention(verify.q, verify.k_cache, verify.v_cache, levels)
        return [x.detach() for x in (*state, gradient, *many, *plan)]

    expected = results()
    with fresh_memory_is_nan():
        found = results()
    for a, e in zip(found, expected, strict=True):
        assert not e.isnan().any()
        assert torch.equal(a, e)
