"""A plan answers as the call that it was made of, for other queries and caches, and names what does not fit."""

from dataclasses import fields, replace

import pytest
import torch

from cascade_lab import DraftTree, Level, Plan, VerifyBatch, cascade_attention, plan, runtime
from cascade_lab.evidence.reference import assert_state_close, attention_oracle


@pytest.fixture
def batch(loads):
    """Two ragged requests, made when whatever watches tensors does so already."""
    return VerifyBatch([13, 5], [DraftTree.branches(2, 3), DraftTree.chain(2)], page_size=4, rows="branch")


def inputs(batch, seed, device, dtype=torch.float32):
    gen = torch.Generator().manual_seed(seed)
    shapes = (batch.num_rows, 4, 16), (batch.num_pages, 4, 2, 16), (batch.num_pages, 4, 2, 8)
    return [torch.randn(shape, generator=gen).to(dtype).to(device) for shape in shapes]


def on(device, levels):
    def moved(level):
        named = {field.name: getattr(level, field.name) for field in fields(level)}
        return replace(level, **{n: x.to(device) for n, x in named.items() if isinstance(x, torch.Tensor)})

    return [moved(level) for level in levels]


@pytest.mark.parametrize("levels", ["naive", "cascade", "fused"])
def test_a_plan_gives_what_the_call_gives_bit_for_bit(levels, backend, device, batch):
    levels = on(device, batch.levels(levels))
    options = {"softcap": 3.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], device=device), "backend": backend}
    made = plan(*inputs(batch, 0, device), levels, **options)
    assert isinstance(made, Plan)
    for seed in (0, 1, 2):
        given = inputs(batch, seed, device)
        found, expected = made(*given), cascade_attention(*given, levels, **options)
        assert torch.equal(found.o, expected.o)
        assert torch.equal(found.lse, expected.lse)
        assert found.o.dtype == torch.float32


def test_a_plan_agrees_with_float64(backend, device, batch):
    levels = on(device, batch.levels("cascade"))
    made = plan(*inputs(batch, 0, device), levels, backend=backend)
    given = inputs(batch, 5, device)
    # every node's keys at once: the fused level, whose mask says which
    (whole,) = batch.levels("fused")
    expected = attention_oracle(
        *(x.cpu() for x in given),
        whole.page_table,
        whole.cache_seqlens,
        cu_seqlens_q=whole.cu_seqlens_q,
        tree_mask=whole.tree_mask,
        tail_seqlens=whole.tail_seqlens,
    )
    assert_state_close([x.cpu() for x in made(*given)], expected, atol=1e-5)


def test_caches_in_another_layout_and_of_one_allocation_are_planned_where_they_lie(backend, device, batch):
    levels = on(device, batch.levels("cascade"))

    def caches(seed):
        gen = torch.Generator().manual_seed(seed)
        whole = torch.randn((batch.num_pages, 2, 2, 4, 16), generator=gen).to(device)
        return whole[:, 0], whole[:, 1]

    q = inputs(batch, 0, device)[0]
    made = plan(q, *caches(0), levels, layout="HND", backend=backend)
    for seed in (0, 1):
        given = caches(seed)
        found, expected = made(q, *given), cascade_attention(q, *given, levels, layout="HND", backend=backend)
        assert torch.equal(found.o, expected.o)
        assert torch.equal(found.lse, expected.lse)


def test_a_plan_is_differentiable_where_the_call_is(batch):
    levels = batch.levels("cascade")
    made = plan(*inputs(batch, 0, "cpu"), levels, backend="torch")
    grads = []
    for call in (made, lambda *x: cascade_attention(*x, levels, backend="torch")):
        given = [x.requires_grad_() for x in inputs(batch, 3, "cpu")]
        o, lse = call(*given)
        (o.square().sum() + lse.sum()).backward()
        grads.append([x.grad for x in given])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(
    ("place", "change", "error", "message"),
    [
        (0, lambda x: x[:-1], ValueError, r"q: expected \(8, 4, 16\) with strides .* as planned, given \(7, 4, 16\)"),
        (0, lambda x: x.half(), TypeError, "q: expected torch.float32 on cpu as planned, given torch.float16"),
        (1, lambda x: torch.cat((x, x)), ValueError, "k_cache: expected .* as planned"),
        (2, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), ValueError, "v_cache: expected .* strides"),
        (1, lambda x: x.tolist(), TypeError, "k_cache: expected a tensor, given list"),
    ],
)
def test_what_was_not_planned_for_is_named(place, change, error, message, batch):
    made = plan(*inputs(batch, 0, "cpu"), batch.levels("cascade"), backend="torch")
    given = inputs(batch, 1, "cpu")
    given[place] = change(given[place])
    with pytest.raises(error, match=message):
        made(*given)


def test_a_plan_refuses_what_the_call_refuses(batch):
    q, k, v = inputs(batch, 0, "cpu")
    (level,) = batch.levels("fused")
    wrong = Level(level.cu_seqlens_q, level.page_table, level.cache_seqlens + 100, level.page_size)
    with pytest.raises(ValueError, match="cache_seqlens: expected 0 to"):
        plan(q, k, v, [wrong])
    with pytest.raises(ValueError, match="levels: expected at least one Level"):
        plan(q, k, v, [])
    with pytest.raises(ValueError, match="softcap"):
        plan(q, k, v, [level], softcap=-1.0)


def test_lengths_written_later_are_followed_by_a_plan_made_unchecked(backend, device, batch):
    q, k, v = inputs(batch, 0, device)
    lens = torch.tensor([3, 5], dtype=torch.int32, device=device)
    table = torch.arange(6, dtype=torch.int32, device=device).view(2, 3)
    rows = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    level = Level(rows, table, lens, 4, max_seqlen_q=1)
    with runtime.unchecked():
        made = plan(q[:2], k, v, [level], backend=backend)
    made(q[:2], k, v)
    lens += torch.tensor([8, 7], dtype=torch.int32, device=device)
    found, expected = made(q[:2], k, v), cascade_attention(q[:2], k, v, [level], backend=backend)
    assert torch.allclose(found.o, expected.o, atol=1e-6)
    assert torch.allclose(found.lse, expected.lse, atol=1e-6)
