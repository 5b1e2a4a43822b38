"""Attention sinks: one more term of the softmax per head, which no value belongs to, and which enters once."""

from __future__ import annotations

import math

import pytest
import torch

from cascade_lab import attention, cascade_attention, merge_state, merge_states
from cascade_lab.evidence.reference import assert_state_close
from cascade_lab.levels import Level
from tests.cases import attention_case, check, int32, random, run, tree_mask
from tests.verify import CHAIN, FORK, check_levels, verify_case

INF = math.inf
ROWS, LENGTHS = [3, 1, 0, 6, 2], [5, 37, 9, 40, 0]
SINKS = torch.tensor([1.5, -0.7, 4.0, 0.2])


def no_value(state, sinks):
    """The state of the sinks alone, in every row."""
    return torch.zeros_like(state.o), sinks.to(state.lse.dtype).expand_as(state.lse).contiguous()


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(x, marks=pytest.mark.long) for x in (torch.float32, torch.float16))],
    ids=str,
)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "num_splits": 3}, {"window_size": (3, 2), "softcap": 2.0}, {"softmax_scale": -0.4}],
    ids=str,
)
def test_a_sink_is_one_more_score_without_a_value(backend, device, loads, options, dtype):
    """K90 (tests/known_faults.md): also in rows without keys, whose lse is the sink itself, and once in any splits."""
    splits = {name: options[name] for name in options if name == "num_splits"}
    rule = {name: options[name] for name in options if name != "num_splits"}
    case = attention_case(ROWS, LENGTHS, dtype=dtype, device=device, sinks=SINKS.clone().to(device), **rule)
    state, _ = check(case, backend, loads, **splits)
    torch.testing.assert_close(state.lse[-2:].cpu(), SINKS.expand(2, 4), rtol=0, atol=1e-6)
    assert not state.o[-2:].any()


def test_the_sink_by_hand(backend, device):
    """Scores ln 2 and ln 3, sink ln 5: weights 0.2 and 0.3 of the values 10 and 100, and lse = ln 10."""
    q, k = torch.ones(1, 1, 1, device=device), torch.tensor([2.0, 3.0], device=device).log().view(1, 2, 1, 1)
    v = torch.tensor([10.0, 100.0], device=device).view(1, 2, 1, 1)
    sinks = torch.tensor([5.0], device=device).log()
    state = attention(q, k, v, int32([[0]], device), int32([2], device), sinks=sinks, backend=backend)
    assert state.o.item() == pytest.approx(32.0, rel=1e-6)
    assert state.lse.item() == pytest.approx(math.log(10), rel=1e-6)


def test_a_sink_is_a_state_of_no_value(backend, device, loads):
    """Merged with (o = 0, lse = sink) the call without sinks gives the call with them, and merging that again adds."""
    case = attention_case(ROWS, LENGTHS, device=device, causal=True)
    sinks = SINKS.clone().to(device)
    without = run(case, backend, loads)
    within = run(case, backend, loads, sinks=sinks)
    merged = merge_state(*without, *no_value(without, sinks), backend=backend)
    assert_state_close(merged, within)
    twice = merge_state(*merged, *no_value(without, sinks), backend=backend)
    assert_state_close(twice, run(case, backend, loads, sinks=sinks + math.log(2)))


@pytest.mark.parametrize("given", ["a lone sink above all scores", "far above", "far below"])
def test_sinks_far_from_the_scores(backend, device, loads, given):
    """K90: sinks of 100 above scores of about 1 neither overflow nor lose the lse; far below, nothing changes."""
    value = {"a lone sink above all scores": 8.0, "far above": 100.0, "far below": -1e4}[given]
    case = attention_case(ROWS, LENGTHS, device=device, sinks=torch.full((4,), value, device=device))
    state, expected = check(case, backend, loads, num_splits=2)
    assert state.lse.isfinite().all()
    if value == 100.0:
        assert (state.lse == 100.0).all()


def test_no_sink_at_infinity(backend, device, loads):
    """As in a merge, -inf and +inf are no sink, head by head; a NaN is not hidden."""
    case = attention_case(ROWS, LENGTHS, device=device)
    without = run(case, backend, loads)
    sinks = torch.tensor([-INF, INF, math.nan, 0.5], device=device)
    state = run(case, backend, loads, sinks=sinks)
    for head in (0, 1):
        assert_state_close(
            (state.o[:, head : head + 1], state.lse[:, head : head + 1]),
            (without.o[:, head : head + 1], without.lse[:, head : head + 1]),
        )
    assert state.lse[:, 2].isnan().all()
    assert (state.lse[:, 3] > torch.logaddexp(without.lse[:, 3], without.lse.new_tensor(0.4))).all()


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("plan", ["naive", "cascade", "fused"])
def test_a_cascade_takes_each_sink_once(backend, device, loads, plan, num_splits):
    """Whatever the levels and splits; one sink per level would add ln 2 to rows whose sink outweighs the keys."""
    case = verify_case([6, 3, 0], [FORK, CHAIN, CHAIN], device=device)
    sinks = torch.tensor([6.0, -0.7, 1.0, 0.2], device=device)
    check_levels(case, case.batch.levels(plan), backend, loads, sinks=sinks, num_splits=num_splits)


def test_one_of_several_parts_takes_the_sinks(backend, device, loads):
    """Keys in two calls, merged: any one of them takes the sinks, and both would count them twice."""
    q = random(5, 4, 16, seed=1, device=device)
    k, v = (random(6, 4, 2, 16, seed=s, device=device) for s in (2, 3))
    cu, sinks = int32([0, 2, 5], device), SINKS.clone().to(device)

    def part(pages, lengths, **options):
        levels = [Level(cu, int32(pages, device), int32(lengths, device), 4)]
        return cascade_attention(q, k, v, levels, backend=backend, **options)

    whole = part([[0, 1, 2], [3, 4, 5]], [12, 9], sinks=sinks)
    parts = lambda first, second: (part([[0], [3]], [4, 4], **first), part([[1, 2], [4, 5]], [8, 5], **second))  # noqa: E731
    for options in (({"sinks": sinks}, {}), ({}, {"sinks": sinks})):
        a, b = parts(*options)
        assert_state_close(merge_state(*a, *b, backend=backend), whole)
    a, b = parts({}, {})
    c = no_value(a, sinks)
    os, lses = (torch.stack(x, 1) for x in zip(a, b, c, strict=True))
    assert_state_close(merge_states(os, lses, backend=backend), whole)
    a, b = parts({"sinks": sinks}, {"sinks": sinks})
    assert (merge_state(*a, *b, backend=backend).lse > whole.lse + 0.01).any()


TREES = [[-1, 0, 0], [-1], [-1, 0]]


@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"softcap": 3.0, "window_size": (2, -1)}, {"tree_mask": tree_mask(TREES)}],
    ids=["causal", "softcap", "tree"],
)
def test_gradients_with_sinks(options):
    """gradcheck in float64 of q, caches and sinks, of o and lse; a request without keys moves its sinks alone."""
    lengths = [5, 4, 2] if "tree_mask" in options else [5, 4, 0]
    case = attention_case([3, 1, 2], lengths, dtype=torch.float64, dim=4, **options)
    inputs = [x.nan_to_num().requires_grad_() for x in (case.q, case.k_cache, case.v_cache, SINKS.double())]

    def call(q, k, v, sinks):
        arguments = (case.page_table, case.cache_seqlens)
        return attention(q, k, v, *arguments, cu_seqlens_q=case.cu_seqlens_q, sinks=sinks, **case.options)

    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


def test_gradients_of_a_cascade_with_sinks():
    case = verify_case([6, 3, 0], [FORK, CHAIN, CHAIN], dtype=torch.float64, dim=4)
    levels = case.batch.levels("cascade")
    inputs = [x.nan_to_num().requires_grad_() for x in (case.q, case.k_cache, case.v_cache, SINKS.double())]
    call = lambda q, k, v, sinks: cascade_attention(q, k, v, levels, sinks=sinks)  # noqa: E731
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


def test_wrong_sinks_are_refused(backend, device):
    case = attention_case([2, 1], [5, 3], device=device)
    wrong = [
        (TypeError, "sinks: expected a tensor, given float", 0.5),
        (ValueError, r"sinks: expected \[H_q\] = \[4\], given shape \(2,\)", torch.zeros(2, device=device)),
        (TypeError, "sinks: expected float32, float16.*given torch.int64", torch.zeros(4, dtype=torch.int64)),
    ]
    for error, message, sinks in wrong:
        with pytest.raises(error, match=message):
            run(case, backend, sinks=sinks.to(device) if isinstance(sinks, torch.Tensor) else sinks)
    if backend == "triton":
        with pytest.raises(TypeError, match="sinks: expected.*given torch.float64"):
            run(case, backend, sinks=SINKS.to(device).double())
        with pytest.raises(RuntimeError, match="no gradient on backend='triton'"):
            run(case, backend, sinks=SINKS.clone().to(device).requires_grad_())
