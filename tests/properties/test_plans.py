"""Every plan of a verify batch gives one answer, the one of its unrolled paths, for a price that only the plan sets."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from cascade_lab import cascade_attention, ledger, runtime
from cascade_lab.drafts import PLANS
from cascade_lab.evidence.reference import assert_state_close
from tests.properties.budget import cases
from tests.properties.strategies import Verification, filled, needs_triton, verifications, watched
from tests.verify import path_to, row_ends, run_levels, virtual_paths

scorings = st.fixed_dictionaries(
    {},
    optional={"softmax_scale": st.sampled_from([0.0, 0.3, -1.0]), "softcap": st.sampled_from([0.5, 20.0])},
)
launches = st.fixed_dictionaries({}, optional={"num_splits": st.sampled_from([1, 2, 5])})


def check_plans(drawn: Verification, backend: str, dtype: torch.dtype, scoring: dict, launch: dict, loads=None) -> None:
    case = filled(drawn, runtime.device() if backend == "triton" else "cpu", dtype)
    expected, plain = case.oracle(**scoring), case.oracle(dtype, **scoring)
    states = {plan: run_levels(case, case.batch.levels(plan), backend, loads, **scoring, **launch) for plan in PLANS}
    for state in states.values():
        assert_state_close(state, expected, plain=plain, factor=4.0)
    for one, other in pairwise(states.values()):
        assert_state_close(one, other, plain=plain, factor=8.0)


@cases(150)
@given(
    verifications(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]), scorings, launches
)
def test_every_plan_equals_the_unrolled_paths(drawn, dtype, scoring, launch):
    check_plans(drawn, "torch", dtype, scoring, launch)


@needs_triton
@cases(10)
@given(
    verifications(max_requests=2, max_nodes=4, max_prefix=16),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    scorings,
    launches,
)
def test_every_plan_equals_the_unrolled_paths_on_triton(drawn, dtype, scoring, launch):
    with watched() as loads:
        check_plans(drawn, "triton", dtype, scoring, launch, loads)


@cases(40)
@given(verifications(), st.sampled_from(["naive", "cascade"]))
def test_copied_tails_give_the_same_state_in_whole_pages(drawn, plan):
    case = filled(drawn)
    copies = case.batch.copied_tails(plan)
    caches = []
    for cache in (case.k_cache, case.v_cache):
        grown = torch.full((copies.num_pages, *cache.shape[1:]), math.nan)
        grown[: case.batch.num_pages] = cache[: case.batch.num_pages]
        flat = grown.view(-1, *cache.shape[2:])
        flat[copies.dst] = flat[copies.src]
        caches.append(grown)
    state = cascade_attention(case.q, *caches, copies.levels, backend="torch")
    assert_state_close(state, case.oracle(), plain=case.oracle(torch.float32), factor=4.0)


def paths(drawn: Verification) -> list[tuple[int, int, int]]:
    """Per row its request, its prefix and the nodes on its path."""
    return [
        (r, prefix, len(path_to(parents, node)))
        for r, (prefix, parents) in enumerate(zip(drawn.prefix_lens, drawn.forests, strict=True))
        for node in row_ends(parents, drawn.rows)
    ]


@cases(200)
@given(verifications(max_requests=6, max_prefix=100, max_nodes=12))
def test_plans_have_equal_pairs_and_their_own_reads(drawn):
    """Pairs sum prefix and path over rows, naive reads that over virtual requests, and none undercuts unique."""
    batch = drawn.batch()
    naive, cascade, fused = (ledger(batch.levels(plan)) for plan in PLANS)
    rows = paths(drawn)
    active = {r for r, *_ in rows}
    assert naive.pairs == cascade.pairs == fused.pairs == sum(prefix + path for _, prefix, path in rows)

    prefixes = sum(drawn.prefix_lens[r] for r in active)
    nodes = sum(len(drawn.trees[r]) for r in active)
    repeated = drawn.shared * max(0, len(active) - 1)
    virtual = [(r, len(path)) for r, tree in enumerate(drawn.forests) for path in virtual_paths(tree, drawn.rows)]
    assert naive.kv_tokens == sum(drawn.prefix_lens[r] + path for r, path in virtual)
    assert fused.kv_tokens == prefixes + nodes
    # a shared level reads its tokens once, and each prefix level only what is behind them
    once = drawn.shared if active else 0
    behind = sum(drawn.prefix_lens[r] - drawn.shared for r in active)
    assert cascade.kv_tokens == once + behind + sum(path for _, path in virtual)
    unique = prefixes + nodes - repeated
    assert naive.kv_tokens_unique == cascade.kv_tokens_unique == fused.kv_tokens_unique == unique
    assert naive.kv_tokens >= cascade.kv_tokens >= unique
    assert naive.kv_tokens >= fused.kv_tokens >= unique
    assert cascade.kv_tokens + repeated >= fused.kv_tokens
