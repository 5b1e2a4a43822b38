"""What surrounds a call changes no bit of it, and the ledger refuses the levels that a call refuses."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from cascade_lab import Level, cascade_attention, ledger, merge_state
from tests.cases import AttentionCase, run
from tests.properties.budget import cases
from tests.properties.strategies import Batch, batches, needs_triton

CONTEXTS = {
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
FLOATS = ("q", "k_cache", "v_cache")
LEVEL_RULES = ("all keys", "causal", "tree", "tails")
# what may be wrong with a level without its queries and its cache: the last of cu_seqlens_q belongs to the queries
INDICES = ("cu_seqlens_q", "cache_seqlens", "page_table", "tail_seqlens")


def check_surroundings(batch: Batch, names: frozenset[str], negated: frozenset[str], backend: str) -> None:
    """Attention and a merge of its states inside `names`, with `negated` inputs as views with a negative bit."""

    def both(case: AttentionCase) -> list[torch.Tensor]:
        state = run(case, backend)
        merged = merge_state(state.o, state.lse, state.o, state.lse, backend=backend)
        return [state.o, state.lse, merged.o, merged.lse]

    case = batch.case()
    expected = both(case)
    views = replace(case, **{name: torch._neg_view(-getattr(case, name)) for name in negated})
    with contextlib.ExitStack() as around:
        for name in sorted(names):
            around.enter_context(CONTEXTS[name]())
        found = both(views)
    for a, b in zip(found, expected, strict=True):
        assert (a.device, a.dtype) == (b.device, b.dtype)
        assert torch.equal(a, b)


surroundings = st.frozensets(st.sampled_from(sorted(CONTEXTS)))
views = st.frozensets(st.sampled_from(FLOATS))


@cases(80)
@given(batches(dtypes=("float32", "float16", "bfloat16")), surroundings, views)
def test_surroundings_and_views_change_no_bit(batch, names, negated):
    check_surroundings(batch, names, negated, "torch")


@needs_triton
@cases(20)
@given(batches(max_requests=2, max_keys=20), surroundings, views)
def test_surroundings_and_views_change_no_bit_on_triton(batch, names, negated):
    check_surroundings(batch, names, negated, "triton")


def broken(level: Level, name: str, place: int, value: int | float, dtype: torch.dtype) -> Level:
    """A level with one number of one of its index tensors replaced, in `dtype`; a rule instead where it has none."""
    old = getattr(level, name)
    if old is None:
        return replace(level, causal=not level.causal, max_seqlen_q=value if isinstance(value, int) else None)
    changed = old.clone()
    last = changed.numel() - (name == "cu_seqlens_q")
    if last > 0:
        changed.view(-1)[place % last] = value
    return replace(level, **{name: changed.to(dtype)})


@cases(200)
@given(
    batches(rules=LEVEL_RULES, dims=st.just(16)),
    st.sampled_from(INDICES),
    st.integers(0, 40),
    st.sampled_from([0, 1, 2, 3, 5, 9, 40, 500, -1, -3, 2**31 - 1]),
    st.sampled_from([torch.int32] * 6 + [torch.int64, torch.float32]),
)
def test_the_ledger_refuses_what_a_call_refuses(batch, name, place, value, dtype):
    case = batch.case()
    pages = case.k_cache.shape[0]
    # a ledger sees no cache, so every entry names a page that there is, or no page of any cache
    good = replace(batch.level(case), page_table=case.page_table.clamp(0, pages - 1).contiguous())
    value = min(value, pages - 1) if name == "page_table" else value
    drawn = broken(good, name, place, value, dtype)
    verdicts = []
    for call in (
        lambda: cascade_attention(case.q, case.k_cache, case.v_cache, [drawn], backend="torch"),
        lambda: ledger([drawn], num_q_heads=batch.heads[0], num_kv_heads=batch.heads[1]),
    ):
        try:
            call()
            verdicts.append(None)
        except (TypeError, ValueError) as error:
            verdicts.append((type(error), str(error)[:40]))
    assert verdicts[0] == verdicts[1]
