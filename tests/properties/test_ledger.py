"""The ledger's integers against counts by hand, against the kernel's counter, and against the addresses it loads."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from cascade_lab import Level, ledger, runtime
from cascade_lab.drafts import PLANS
from cascade_lab.evidence.reference import visible_keys
from tests.cases import run
from tests.properties.budget import cases
from tests.properties.strategies import Batch, batches, filled, needs_triton, verifications, watched
from tests.verify import run_levels

LEVEL_RULES = ("all keys", "causal", "tree", "tails")


def matrices(level: Level) -> list[torch.Tensor]:
    """Which key each row sees, of the requests that have rows."""
    options = dict(causal=level.causal, tree_mask=level.tree_mask, tail_seqlens=level.tail_seqlens)
    return [seen for seen in visible_keys(level.cu_seqlens_q, level.cache_seqlens, **options) if len(seen)]


def slots(level: Level) -> set[int]:
    """Slots of every token that a request with rows reads, token by token."""
    starts, size = level.cu_seqlens_q.tolist(), level.page_size
    return {
        level.page_table[r, n // size].item() * size + n % size
        for r, length in enumerate(level.cache_seqlens.tolist())
        if starts[r + 1] > starts[r]
        for n in range(length)
    }


def tile_tokens(level: Level, block_m: int, group: int) -> int:
    """Keys before the last one that some row of a tile may see; only a causal rule lets a tile stop early."""
    total = 0
    for seen in matrices(level):
        for tile in seen.repeat_interleave(group, 0).split(block_m):
            total += int(tile.any(0).sum()) if level.causal else seen.shape[1]
    return total


@cases(200)
@given(batches(rules=LEVEL_RULES, max_rows=9, max_keys=60), st.integers(1, 40))
def test_a_level_is_counted_key_by_key(batch, block_m):
    level = batch.level(batch.case())
    book = ledger([level], num_q_heads=batch.heads[0], num_kv_heads=batch.heads[1])
    read = [length for rows, length in zip(batch.rows, batch.lengths, strict=True) if rows]
    assert book.kv_tokens == sum(read)
    assert book.kv_tokens_paged == sum(-(-length // batch.page) * batch.page for length in read)
    assert book.kv_tokens_unique == len(slots(level)) == sum(read)
    assert book.pairs == sum(int(seen.sum()) for seen in matrices(level))
    assert book.tile_tokens(block_m) == tile_tokens(level, block_m, batch.heads[0] // batch.heads[1])
    assert book.kv_bytes(batch.dim, torch.bfloat16, batch.value_dim) == (
        sum(read) * batch.heads[1] * (batch.dim + batch.value_dim) * 2
    )


@st.composite
def overlapping(draw) -> list[Level]:
    """Levels over the same rows whose pages overlap in any way, each in a page size of its own."""
    total = draw(st.integers(0, 6))
    plan = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.lists(st.integers(0, total), max_size=3)))
        size, columns = draw(st.integers(1, 5)), draw(st.integers(0, 4))
        requests = len(cuts) + 1
        pages = draw(st.lists(st.integers(0, 9), min_size=requests * columns, max_size=requests * columns))
        lengths = [draw(st.integers(0, size * columns)) for _ in range(requests)]
        plan.append(
            Level(
                torch.tensor([0, *cuts, total], dtype=torch.int32),
                torch.tensor(pages, dtype=torch.int32).view(requests, columns),
                torch.tensor(lengths, dtype=torch.int32),
                size,
                causal=draw(st.booleans()),
            )
        )
    return plan


@cases(200)
@given(overlapping())
def test_unique_tokens_of_a_plan_are_the_distinct_slots_of_its_levels(levels):
    book = ledger(levels)
    each = [slots(level) for level in levels]
    assert [part.kv_tokens_unique for part in book.levels] == [len(found) for found in each]
    assert book.kv_tokens_unique == len(set().union(*each))
    for name in ("kv_tokens", "kv_tokens_paged", "pairs"):
        assert getattr(book, name) == sum(getattr(part, name) for part in book.levels)
    assert book.pairs == sum(int(seen.sum()) for level in levels for seen in matrices(level))
    assert book.tile_tokens(3) == sum(tile_tokens(level, 3, 1) for level in levels)


def kernel_block(batch: Batch) -> int:
    from cascade_lab.backends.triton.config import tile_for

    packed = max(batch.rows, default=0) * (batch.heads[0] // batch.heads[1])
    return tile_for(packed, max(batch.dim, batch.value_dim), batch.torch_dtype).block_m


@needs_triton
@cases(24)
@given(batches(rules=LEVEL_RULES, dtypes=("float32", "bfloat16"), max_requests=2, max_keys=70), st.sampled_from([1, 3]))
def test_the_kernel_loads_what_the_ledger_says(batch, num_splits):
    """`reads` of each KV head, and the bytes of K and V by address, are the ledger's tile tokens."""
    case = batch.case(runtime.device())
    expected = ledger([batch.level(case)], num_q_heads=batch.heads[0], num_kv_heads=batch.heads[1]).tile_tokens(
        kernel_block(batch)
    )
    with watched() as loads:
        reads = torch.full((batch.heads[1],), 11, dtype=torch.int64, device=case.q.device)
        run(case, "triton", loads, reads=reads, num_splits=num_splits)
        assert (reads - 11).tolist() == [expected] * batch.heads[1]
        if loads is not None:
            for cache, width in (("k_cache", batch.dim), ("v_cache", batch.value_dim)):
                assert loads[cache].loaded_bytes == expected * batch.heads[1] * width * case.q.element_size()


@needs_triton
@cases(10)
@given(st.data())
def test_several_row_tiles_load_their_keys_again(data):
    """More packed rows than a tile holds: the ledger takes the launch's block_m, the kernel counts the same."""
    batch = data.draw(batches(rules=("all keys", "causal"), max_requests=2, max_keys=50))
    rows = tuple(data.draw(st.integers(0, 60)) for _ in batch.rows)
    batch = replace(batch, rows=rows, heads=(6, 1), dim=8, value_dim=8)
    case = batch.case(runtime.device())
    book = ledger([batch.level(case)], num_q_heads=6, num_kv_heads=1)
    with watched() as loads:
        reads = torch.zeros(1, dtype=torch.int64, device=case.q.device)
        run(case, "triton", loads, reads=reads)
    assert reads.tolist() == [book.tile_tokens(kernel_block(batch))]


@cases(60)
@given(verifications())
def test_plans_read_what_their_ledger_says(drawn):
    case = filled(drawn)
    for plan in PLANS:
        levels = case.batch.levels(plan)
        reads = torch.zeros(drawn.heads[1], dtype=torch.int64)
        run_levels(case, levels, "torch", reads=reads)
        assert reads.tolist() == [ledger(levels).kv_tokens] * drawn.heads[1]


@needs_triton
@cases(10)
@given(verifications(max_requests=2, max_nodes=4, max_prefix=12))
def test_plans_touch_what_their_ledger_says_on_triton(drawn):
    """Loaded bytes are kv_tokens, distinct bytes kv_tokens_unique, for all three plans."""
    case = filled(drawn, runtime.device())
    for plan in PLANS:
        levels = case.batch.levels(plan)
        book = ledger(levels)
        with watched() as loads:
            reads = torch.zeros(drawn.heads[1], dtype=torch.int64, device=case.q.device)
            run_levels(case, levels, "triton", loads, reads=reads)
            assert reads.tolist() == [book.kv_tokens] * drawn.heads[1]
            if loads is not None:
                for cache, width in (("k_cache", drawn.dim), ("v_cache", drawn.value_dim)):
                    per_token = drawn.heads[1] * width * 4
                    assert loads[cache].loaded_bytes == book.kv_tokens * per_token
                    assert loads[cache].distinct_bytes == book.kv_tokens_unique * per_token
