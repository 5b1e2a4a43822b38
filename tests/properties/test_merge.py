"""The algebra of states over any lse: one neutral element, no order, no grouping, and float64 as the judge."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cascade_lab import State, merge_state, merge_states, runtime
from cascade_lab.evidence.reference import merge_oracle
from cascade_lab.states import lse_from_base2, lse_to_base2
from tests.cases import random
from tests.properties.budget import cases
from tests.properties.strategies import CPU, needs_triton, seeds, watched

POISON = (math.nan, math.inf, -math.inf)
# beyond 88 a float32 exponential overflows, beyond 104 it is 0, beyond 745 a float64 one is; gaps may be denormal
EDGES = (88.0, 88.7228, 88.723, 103.97, 104.0, 709.8, 745.2, 1e5, 3e38, 1.2e-38, 1e-40, 1.4e-45, 1.0)
anchors = st.sampled_from([0.0, *EDGES, *(-x for x in EDGES)])
finite = st.one_of(anchors, st.floats(-30, 30, width=32), st.floats(-1e5, 1e5, width=32))
empty = st.sampled_from([-math.inf, math.inf])
lses = finite | empty
# sums and differences of these are exact in float32
quarters = st.integers(-400, 400).map(lambda n: n / 4)

up_to_five = st.integers(1, 5)
single = ("float32", "float16", "bfloat16")
double = (*single, "float64")


@dataclass(frozen=True)
class Parts:
    """`lse[row][s]` of S states to merge, rows (t, h) = divmod(row, heads); what is empty carries NaN or Inf in o."""

    lse: tuple[tuple[float, ...], ...]
    heads: int = 1
    dim: int = 4
    o_dtype: str = "float32"
    lse_dtype: str = "float32"
    out_dtype: str | None = None
    scale: float = 1.0
    layout: str = "packed"
    seed: int = 0

    def tensors(self, device: torch.device = CPU) -> tuple[Tensor, Tensor]:
        """o [T, S, H, D] and lse [T, S, H]."""
        rows, states, heads = len(self.lse) // self.heads, len(self.lse[0]), self.heads
        lse = torch.tensor(self.lse, dtype=getattr(torch, self.lse_dtype), device=device)
        lse = lse.view(rows, heads, states).transpose(1, 2).contiguous()
        o = self.scale * random(rows, states, heads, self.dim, seed=self.seed, dtype=torch.float64)
        o = o.to(device, getattr(torch, self.o_dtype))
        hidden = torch.tensor(POISON, dtype=o.dtype, device=device).repeat(o.numel() // 3 + 1)[: o.numel()]
        o = torch.where(lse.isinf()[..., None], hidden.view_as(o), o)
        if self.layout == "transposed":
            lse = lse.permute(2, 1, 0).contiguous().permute(2, 1, 0)
            o = o.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
        elif self.layout == "padded":
            lse = torch.nn.functional.pad(lse, (1, 2, 0, 0, 0, 1), value=math.nan)[:rows, :, 1 : 1 + heads]
            o = torch.nn.functional.pad(o, (0, 3, 2, 0, 1, 0), value=math.nan)[:, 1:, 2:, : self.dim]
        return o, lse


@st.composite
def parts(draw, states=up_to_five, dtypes=single, lse=lses, **fixed) -> Parts:
    """Any states to merge; `states`, `dtypes` and `lse` narrow what is drawn, `fixed` fields are not drawn at all."""
    count, heads = draw(states), draw(st.integers(1, 3))
    rows = draw(st.integers(1, 3)) * heads
    any_dtype = st.sampled_from(dtypes)
    drawn = dict(
        dim=st.sampled_from([4, 1, 3, 16, 20]),
        o_dtype=any_dtype,
        lse_dtype=st.sampled_from([t for t in ("float32", "float64") if t in dtypes]),
        out_dtype=st.none() | any_dtype,
        scale=st.sampled_from([1.0, 1e-3, 1e4]),
        layout=st.sampled_from(["packed", "transposed", "padded"]),
        seed=seeds,
    )
    drawn = {name: draw(strategy) for name, strategy in drawn.items() if name not in fixed}
    table = draw(st.lists(st.tuples(*[lse] * count), min_size=rows, max_size=rows))
    return Parts(tuple(table), heads, **drawn, **fixed)


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def assert_merged(state: State, o: Tensor, lse: Tensor, *, steps: int = 1) -> None:
    """Element by element within rounding of the float64 merge, `steps` being how often a merge rounded.

    With u = eps of the arithmetic: every weight is e^x for an x <= 0 that rounded by u |x|, and |x| e^x <= 1/e, so o
    moves by a few u of the largest |o| of its row. An lse that was rounded in between moves o by u |lse| as well,
    where a state whose own |lse| is much larger than that of the result has no weight.
    """
    expected = merge_oracle(o, lse)
    given, given_lse = state.o.double(), state.lse.double()
    assert given.shape == expected.o.shape
    assert given_lse.shape == expected.lse.shape
    bare = expected.lse == -math.inf
    assert torch.equal(given_lse == -math.inf, bare)
    assert not given[bare].any()
    lost = expected.lse.isnan()
    assert torch.equal(given_lse.isnan(), lost)
    assert given[lost].isnan().all()
    kept = ~(bare | lost)

    unit = eps(torch.promote_types(state.lse.dtype, torch.float32))
    largest = torch.where(lse.isinf()[..., None], 0.0, o.double()).abs().amax((1, 3))
    count = lse.shape[1]
    bound = unit * (steps * expected.lse.abs() + steps * count + 4)
    error = (given_lse - expected.lse).abs()
    assert (error <= bound)[kept].all(), f"lse is off by up to {(error / bound)[kept].max():.3g} of its bound"
    moved = unit * (count + 6) + (bound if steps > 1 else 0.0)
    # what the merge itself rounds o to, and the smallest step that dtype has
    dtype = state.o.dtype
    smallest = torch.finfo(dtype).smallest_normal * eps(dtype)
    bound = (moved * largest + smallest)[..., None] + eps(dtype) * expected.o.abs()
    error = (given - expected.o).abs()
    assert (error <= bound)[kept].all(), f"o is off by up to {(error / bound)[kept].max():.3g} of its bound"


def same(a: Tensor, b: Tensor) -> bool:
    """Every element equal, NaN to NaN."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def out_dtype(case: Parts) -> torch.dtype | None:
    return None if case.out_dtype is None else getattr(torch, case.out_dtype)


def pair(case: Parts, device: torch.device = CPU, first: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o_a, lse_a, o_b, lse_b of two neighbouring states."""
    o, lse = case.tensors(device)
    return o[:, first], lse[:, first], o[:, first + 1], lse[:, first + 1]


two = st.just(2)


def check_against_oracle(case: Parts, backend: str, device: torch.device = CPU) -> None:
    o, lse = case.tensors(device)
    before = o.clone(), lse.clone()
    state = merge_states(o, lse, out_dtype=out_dtype(case), backend=backend)
    assert state.o.dtype == (out_dtype(case) or o.dtype)
    assert state.lse.dtype == lse.dtype
    assert_merged(state, o, lse)
    if o.shape[1] == 2:
        assert_merged(merge_state(*pair(case, device), out_dtype=out_dtype(case), backend=backend), o, lse)
    assert same(o, before[0])
    assert same(lse, before[1])


@cases(300)
@given(parts(dtypes=double))
def test_any_states_merge_as_in_float64(case):
    check_against_oracle(case, "torch")


@needs_triton
@cases(60)
@given(parts())
def test_any_states_merge_as_in_float64_on_triton(case):
    with watched():
        check_against_oracle(case, "triton", runtime.device())


@cases(60)
@given(parts(lse=lses | st.just(math.nan), dtypes=double))
def test_nan_lse_makes_its_row_nan_and_no_other(case):
    o, lse = case.tensors()
    assert_merged(merge_states(o, lse, backend="torch"), o, lse)


@needs_triton
@cases(20)
@given(parts(lse=lses | st.just(math.nan)))
def test_nan_lse_makes_its_row_nan_and_no_other_on_triton(case):
    o, lse = case.tensors(runtime.device())
    with watched() as loads:
        if loads is not None:
            loads.register(o=o, lse=lse)
        assert_merged(merge_states(o, lse, backend="triton"), o, lse)


def check_neutral(case: Parts, nothing: float, backend: str, device: torch.device = CPU) -> None:
    o, lse = (x[:, 0] for x in case.tensors(device))
    bare = lse.isinf()
    kept = State(torch.where(bare[..., None], 0.0, o), torch.where(bare, -math.inf, lse))
    kept.o[lse.isnan()] = math.nan
    other = torch.full_like(o, math.nan), torch.full_like(lse, nothing)
    for state in (merge_state(o, lse, *other, backend=backend), merge_state(*other, o, lse, backend=backend)):
        assert same(state.o, kept.o)
        assert same(state.lse, kept.lse)


@cases(80)
@given(parts(states=st.just(1), lse=lses | st.just(math.nan), out_dtype=None), empty)
def test_an_empty_state_changes_no_bit_on_either_side(case, nothing):
    check_neutral(case, nothing, "torch")


@needs_triton
@cases(20)
@given(parts(states=st.just(1), out_dtype=None), empty)
def test_an_empty_state_changes_no_bit_on_either_side_on_triton(case, nothing):
    with watched():
        check_neutral(case, nothing, "triton", runtime.device())


@cases(60)
@given(parts(states=two, dtypes=double, out_dtype=None))
def test_two_states_merge_alike_in_either_order(case):
    """Bit by bit for the lse, whose sum has no order; o may be summed with one rounding less for the second state."""
    o_a, lse_a, o_b, lse_b = pair(case)
    forth = merge_state(o_a, lse_a, o_b, lse_b, backend="torch")
    back = merge_state(o_b, lse_b, o_a, lse_a, backend="torch")
    assert same(forth.lse, back.lse)
    unit = 8 * eps(torch.float32) + 2 * eps(forth.o.dtype)
    size = torch.where(lse_a.isinf()[..., None], 0, o_a).abs() + torch.where(lse_b.isinf()[..., None], 0, o_b).abs()
    assert ((forth.o - back.o).abs() <= unit * size + torch.finfo(forth.o.dtype).tiny).all()


@cases(80)
@given(parts(states=st.integers(2, 6), dtypes=("float32",)), st.randoms(use_true_random=False))
def test_any_order_and_grouping_is_one_merge(case, draw):
    """Merge two neighbours of a shuffled list until one state is left."""
    o, lse = case.tensors()
    states = list(zip(o.unbind(1), lse.unbind(1), strict=True))
    draw.shuffle(states)
    rounds = len(states)
    while len(states) > 1:
        i = draw.randrange(len(states) - 1)
        states[i : i + 2] = [merge_state(*states[i], *states[i + 1], backend="torch")]
    assert_merged(State(*states[0]), o, lse, steps=rounds)


@needs_triton
@cases(20)
@given(parts(states=st.integers(2, 4), dtypes=("float32",)))
def test_a_fold_is_one_merge_on_triton(case):
    o, lse = case.tensors(runtime.device())
    with watched() as loads:
        if loads is not None:
            loads.register(o=o, lse=lse)
        state = o[:, 0], lse[:, 0]
        for s in range(1, o.shape[1]):
            state = merge_state(*state, o[:, s], lse[:, s], backend="triton")
    assert_merged(State(*state), o, lse, steps=o.shape[1])


@cases(60)
@given(parts(states=st.just(1), dtypes=double, out_dtype=None))
def test_merging_with_itself_adds_ln_2_and_keeps_every_bit_of_o(case):
    o, lse = (x[:, 0] for x in case.tensors())
    state = merge_state(o, lse, o, lse, backend="torch")
    assert same(state.o, torch.where(lse.isinf()[..., None], 0.0, o))
    doubled = torch.where(lse.isinf(), -math.inf, lse.double() + math.log(2))
    unit = eps(lse.dtype)
    assert torch.allclose(state.lse.double(), doubled, rtol=unit, atol=unit)


@cases(60)
@given(parts(states=st.integers(1, 4), lse=quarters | empty, dtypes=("float32",)), quarters)
def test_a_shift_of_every_lse_moves_only_the_lse(case, shift):
    o, lse = case.tensors()
    state, moved = (merge_states(o, x, backend="torch") for x in (lse, lse + shift))
    assert same(state.o, moved.o)
    assert torch.allclose(moved.lse, state.lse + shift, rtol=4 * eps(lse.dtype), atol=1e-4)


@cases(60)
@given(parts(states=two, dtypes=double, out_dtype=None))
def test_a_state_may_be_written_over_either_input(case):
    o_a, lse_a, o_b, lse_b = pair(case)
    expected = merge_state(o_a, lse_a, o_b, lse_b, backend="torch")
    for side in (0, 2):
        mine = [x.clone() for x in (o_a, lse_a, o_b, lse_b)]
        state = merge_state(*mine, out=mine[side], out_lse=mine[side + 1], backend="torch")
        assert state.o is mine[side]
        assert state.lse is mine[side + 1]
        assert same(state.o, expected.o)
        assert same(state.lse, expected.lse)
        assert same(mine[2 - side], (o_b, lse_b, o_a, lse_a)[side])
        assert same(mine[3 - side], (lse_b, o_b, lse_a, o_a)[side])


@needs_triton
@cases(20)
@given(parts(states=two, out_dtype=None))
def test_a_state_may_be_written_over_either_input_on_triton(case):
    with watched():
        o_a, lse_a, o_b, lse_b = pair(case, runtime.device())
        expected = merge_state(o_a, lse_a, o_b, lse_b, backend="triton")
        for side in (0, 2):
            mine = [x.clone() for x in (o_a, lse_a, o_b, lse_b)]
            state = merge_state(*mine, out=mine[side], out_lse=mine[side + 1], backend="triton")
            assert same(state.o, expected.o)
            assert same(state.lse, expected.lse)
            assert same(mine[2 - side], (o_b, None, o_a)[side])


@cases(60)
@given(parts(states=two, dtypes=double))
def test_strides_change_no_bit(case):
    o, lse = case.tensors()
    there = merge_states(o, lse, out_dtype=out_dtype(case), backend="torch")
    copy = merge_states(
        o.clone(memory_format=torch.contiguous_format),
        lse.clone(memory_format=torch.contiguous_format),
        out_dtype=out_dtype(case),
        backend="torch",
    )
    assert same(there.o, copy.o)
    assert same(there.lse, copy.lse)


@cases(50)
@given(
    st.lists(st.floats(-(2.0**127), 2.0**127, width=32) | empty, min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_log_bases_convert_there_and_back(values, dtype):
    lse = torch.tensor([values], dtype=dtype)
    base2 = lse_to_base2(lse)
    assert torch.allclose(base2.double(), lse.double() / math.log(2), rtol=4 * eps(dtype), atol=1e-44)
    assert torch.allclose(lse_from_base2(base2), lse, rtol=4 * eps(dtype), atol=1e-44)
    assert torch.equal(lse_from_base2(base2).isinf(), lse.isinf())
