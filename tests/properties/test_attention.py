"""Attention over any ragged, paged batch against the oracle, and what no batch may change."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from cascade_lab import Level, State, cascade_attention, runtime
from cascade_lab.evidence.reference import assert_state_close, visible_keys
from tests.cases import AttentionCase, check, int32, run
from tests.properties.budget import cases
from tests.properties.strategies import Batch, batches, needs_triton, seeds, watched

scorings = st.fixed_dictionaries(
    {},
    optional={
        "softmax_scale": st.sampled_from([0.0, 0.3, 1.0, -0.7, 4.0]),
        "softcap": st.sampled_from([0.5, 5.0, 30.0]),
    },
)
launches = st.fixed_dictionaries(
    {},
    optional={
        "num_splits": st.sampled_from([1, 2, 3, 7]),
        "out_dtype": st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    },
)
# The bound is this many times the error that plain torch makes in the same dtype, which a small batch may make by luck
# with hardly any error at all, plus a few units of rounding.
FACTOR = 4.0
EPS = torch.finfo(torch.float32).eps


def needed_options(case: AttentionCase) -> dict:
    return {name: x for name, x in case.options.items() if name not in ("softmax_scale", "softcap")}


def seen_keys(case: AttentionCase) -> torch.Tensor:
    """[T] int64, keys that each row sees."""
    matrices = visible_keys(case.cu_seqlens_q, case.cache_seqlens, **needed_options(case))
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(matrix.sum(1) for matrix in matrices)])


@cases(300)
@given(batches(dtypes=("float32", "float16", "bfloat16", "float64")), scorings, launches)
def test_any_batch_gives_the_states_of_the_oracle(batch, scoring, launch):
    check(batch.case(**scoring), "torch", factor=FACTOR, **launch)


@needs_triton
@cases(70)
@given(batches(dtypes=("float32", "float16", "bfloat16"), max_requests=3, max_keys=70), scorings, launches)
def test_any_batch_gives_the_states_of_the_oracle_on_triton(batch, scoring, launch):
    case = batch.case(runtime.device(), **scoring)
    with watched() as loads:
        check(case, "triton", loads, factor=FACTOR, **launch)


WIDE = [(576, 512), (192, 128), (128, 128), (100, 36), (256, 64), (320, 320)]


@cases(24)
@given(batches(max_requests=2, max_rows=3, max_keys=20), st.sampled_from(WIDE), scorings)
def test_wide_heads(batch, dims, scoring):
    batch = replace(batch, heads=(2, 1), dim=dims[0], value_dim=dims[1])
    check(batch.case(**scoring), "torch", factor=FACTOR)


@needs_triton
@cases(12)
@given(batches(max_requests=2, max_rows=3, max_keys=20), st.sampled_from(WIDE), scorings)
def test_wide_heads_on_triton(batch, dims, scoring):
    batch = replace(batch, heads=(2, 1), dim=dims[0], value_dim=dims[1])
    case = batch.case(runtime.device(), **scoring)
    with watched() as loads:
        check(case, "triton", loads, factor=FACTOR)


@needs_triton
@cases(10)
@given(st.data())
def test_requests_of_several_row_and_key_tiles_on_triton(data):
    """Tiles have 128 packed rows and 32 or 64 keys at most, so batches are drawn around these edges."""
    edge = st.sampled_from([127, 128, 129, 63, 64, 65, 32, 33])
    batch = data.draw(batches(rules=("all keys", "causal", "window", "causal window"), max_requests=2))
    rows, lengths = (tuple(data.draw(edge) for _ in batch.rows) for _ in range(2))
    batch = replace(batch, rows=rows, lengths=lengths, heads=(2, 1), dim=8, value_dim=8)
    case = batch.case(runtime.device())
    with watched() as loads:
        check(case, "triton", loads, factor=FACTOR)


# (D, D_v): one load of a latent then serves both, where D_v is what the kernel takes of K in its first block
LATENTS = [(16, 16), (24, 16), (32, 32), (17, 16), (48, 1), (192, 128)]


def check_latents(batch: Batch, dims: tuple[int, int], backend: str, loads=None) -> None:
    batch = replace(batch, dim=dims[0], value_dim=dims[1])
    case = batch.case(runtime.device() if backend == "triton" else "cpu")
    check(replace(case, v_cache=case.k_cache[..., : dims[1]]), backend, loads, factor=FACTOR)


@cases(60)
@given(batches(dtypes=("float32", "bfloat16")), st.sampled_from(LATENTS))
def test_values_that_are_the_first_columns_of_the_keys(batch, dims):
    check_latents(batch, dims, "torch")


@needs_triton
@cases(16)
@given(batches(dtypes=("float32", "bfloat16"), max_requests=2), st.sampled_from(LATENTS))
def test_values_that_are_the_first_columns_of_the_keys_on_triton(batch, dims):
    with watched() as loads:
        check_latents(batch, dims, "triton", loads)


def check_same_value(batch: Batch, backend: str, loads=None) -> None:
    case = batch.case(runtime.device() if backend == "triton" else "cpu")
    value = torch.linspace(-2, 3, batch.heads[1] * batch.value_dim, device=case.q.device).view(batch.heads[1], -1)
    # NaN stays where it must not be read
    case.v_cache.copy_(torch.where(case.v_cache.isnan(), case.v_cache, value))
    state = run(case, backend, loads)
    group = batch.heads[0] // batch.heads[1]
    expected = value.repeat_interleave(group, 0) * (seen_keys(case) > 0)[:, None, None].to(value.device)
    assert torch.allclose(state.o, expected, rtol=8 * EPS, atol=0)


@cases(60)
@given(batches())
def test_one_value_everywhere_comes_back(batch):
    check_same_value(batch, "torch")


@needs_triton
@cases(10)
@given(batches(max_requests=2))
def test_one_value_everywhere_comes_back_on_triton(batch):
    with watched() as loads:
        check_same_value(batch, "triton", loads)


def check_counting(batch: Batch, backend: str, loads=None) -> None:
    case = batch.case(runtime.device() if backend == "triton" else "cpu", softmax_scale=0.0)
    state = run(case, backend, loads)
    count = seen_keys(case)[:, None].double().expand(-1, batch.heads[0])
    assert torch.equal(state.lse.cpu() == -math.inf, count == 0)
    assert torch.allclose(state.lse.double().cpu().exp(), count, rtol=16 * EPS, atol=0)


@cases(60)
@given(batches(max_keys=80))
def test_a_scale_of_zero_counts_the_visible_keys(batch):
    check_counting(batch, "torch")


@needs_triton
@cases(10)
@given(batches(max_requests=2, max_keys=80))
def test_a_scale_of_zero_counts_the_visible_keys_on_triton(batch):
    with watched() as loads:
        check_counting(batch, "triton", loads)


def dealt(case: AttentionCase, page: int, parts: int, seed: int) -> list[Level]:
    """The tokens of every request dealt out to `parts` levels at random and in any order, in pages of one token."""
    draw = torch.Generator().manual_seed(seed)
    tables, lengths = [[] for _ in range(parts)], [[] for _ in range(parts)]
    for r, length in enumerate(case.cache_seqlens.tolist()):
        token = torch.randperm(length, generator=draw)
        slots = case.page_table[r].cpu().long()[token // page] * page + token % page
        owner = torch.randint(parts, (length,), generator=draw)
        for part in range(parts):
            tables[part].append(slots[owner == part])
            lengths[part].append(len(tables[part][-1]))
    levels = []
    for rows, length in zip(tables, lengths, strict=True):
        table = torch.full((len(rows), max(length, default=0)), -1, dtype=torch.int32)
        for r, found in enumerate(rows):
            table[r, : len(found)] = found
        levels.append(Level(case.cu_seqlens_q, table.to(case.q.device), int32(length, case.q.device), 1))
    return levels


@cases(80)
@given(batches(rules=("all keys",)), scorings, st.integers(1, 4), seeds)
def test_keys_dealt_to_levels_in_any_way_and_order_are_one_pass(batch, scoring, parts, seed):
    case = batch.case(**scoring)
    levels = dealt(case, batch.page, parts, seed)
    # a layout whose pages lie a fraction of a token apart cannot be addressed token by token
    if batch.layout in ("interleaved", "heads first"):
        case = replace(case, k_cache=case.k_cache.contiguous(), v_cache=case.v_cache.contiguous())
    state = cascade_attention(case.q, case.k_cache, case.v_cache, levels, backend="torch", **scoring)
    assert_state_close(state, case.reference(), plain=case.reference(torch.float32), factor=FACTOR)


@needs_triton
@cases(10)
@given(batches(rules=("all keys",), max_requests=2), scorings, st.integers(1, 3), seeds)
def test_keys_dealt_to_levels_in_any_way_and_order_are_one_pass_on_triton(batch, scoring, parts, seed):
    case = replace(batch, layout="packed").case(runtime.device(), **scoring)
    levels = dealt(case, batch.page, parts, seed)
    with watched() as loads:
        if loads is not None:
            loads.register(**case.tensors)
            for i, level in enumerate(levels):
                loads.register(**{f"table {i}": level.page_table, f"lengths {i}": level.cache_seqlens})
        state = cascade_attention(case.q, case.k_cache, case.v_cache, levels, backend="triton", **scoring)
    assert_state_close(state, case.reference(), plain=case.reference(torch.float32), factor=FACTOR)


@cases(60)
@given(batches(), scorings, st.sampled_from([1, 2, 3, 4, 16, 64]), seeds)
def test_other_pages_change_nothing(batch, scoring, page, seed):
    """The same tokens in pages of another size, dealt in another order and laid out in another way."""
    case = batch.case(**scoring)
    moved = replace(batch, page=page, layout="packed").case(**scoring)
    assert_state_close(
        run(moved, "torch"), run(case, "torch"), atol=2e-5 * (1 + 4 * abs(scoring.get("softmax_scale", 1)))
    )


@cases(60)
@given(batches(max_requests=4), scorings)
def test_a_request_does_not_feel_its_neighbours(batch, scoring):
    case = batch.case(**scoring)
    together = run(case, "torch")
    starts = case.cu_seqlens_q.tolist()
    for r in range(len(batch.rows)):
        alone = run(case.request(r), "torch")
        mine = State(*(x[starts[r] : starts[r + 1]] for x in together))
        assert_state_close(alone, mine)
