"""Merging states: the algebra, the numerics and the boundary, on every backend."""

from __future__ import annotations

import math
import re

import pytest
import torch

from cascade_lab import (
    State,
    lse_from_base2,
    lse_to_base2,
    merge_state,
    merge_states,
    runtime,
    states,
)
from cascade_lab.evidence.reads import record_loads
from cascade_lab.evidence.reference import assert_state_close, attention_oracle, merge_oracle
from tests.cases import bytes_of, int32, random

INF, NAN = math.inf, math.nan
HALF = (torch.float16, torch.bfloat16)


def make_states(T, S, H, D, *, seed=0, dtype=torch.float32, lse_dtype=torch.float32, device="cpu", empty=0.0):
    """o [T, S, H, D], lse [T, S, H]. A share `empty` has lse -inf or +inf and junk in o."""
    o = random(T, S, H, D, seed=seed, dtype=dtype, device=device)
    lse = random(T, S, H, seed=seed + 1, device=device).to(lse_dtype) * 3
    if empty:
        generator = torch.Generator().manual_seed(seed + 2)
        lot = torch.rand(T, S, H, generator=generator).to(device)
        lse[lot < empty] = -INF
        lse[lot < empty / 2] = INF
        o[lot < empty] = NAN
        o[lot < empty / 3] = INF
        o[lot < empty / 6] = 6e4
    return o, lse


def pair(o, lse):
    return o[:, 0], lse[:, 0], o[:, 1], lse[:, 1]


def one_row(*values, D=4, device="cpu"):
    """o [1, S, 1, D] and lse [1, S, 1] from (o, lse) numbers."""
    o = torch.tensor([value for value, _ in values], device=device).view(1, -1, 1, 1).expand(-1, -1, -1, D)
    return o.contiguous(), torch.tensor([lse for _, lse in values], device=device).view(1, -1, 1)


def both_ways(o, lse, backend):
    """The same two states merged by each function."""
    return merge_state(*pair(o, lse), backend=backend), merge_states(o, lse, backend=backend)


@pytest.mark.parametrize("empty", [0.0, 0.5])
@pytest.mark.parametrize(
    ("T", "H", "D"),
    [(5, 3, 1), (2, 1, 2), (3, 2, 8), (7, 2, 36), (4, 3, 64), (3, 1, 72), (2, 2, 80), (3, 2, 96), (2, 5, 128)]
    + [(2, 1, 192), (3, 1, 256), (2, 2, 512), (2, 1, 576)],
)
def test_merge_matches_float64(backend, device, T, H, D, empty):
    """K14, K1, K3 (tests/known_faults.md): any head dim, a half of the states empty and their o full of NaN, inf and
    huge numbers.
    """
    o, lse = make_states(T, 2, H, D, seed=D, device=device, empty=empty)
    for state in both_ways(o, lse, backend):
        assert_state_close(state, merge_oracle(o, lse))


@pytest.mark.parametrize("S", [1, 2, 3, 16, 133])
def test_merge_of_many_with_half_empty_matches_float64(backend, device, S):
    o, lse = make_states(3, S, 2, 24, seed=S, device=device, empty=0.5)
    assert_state_close(merge_states(o, lse, backend=backend), merge_oracle(o, lse))


def test_merge_of_no_states_is_empty(backend, device):
    state = merge_states(torch.ones(3, 0, 2, 4, device=device), torch.ones(3, 0, 2, device=device), backend=backend)
    assert_state_close(state, (torch.zeros(3, 2, 4), torch.full((3, 2), -INF)))


@pytest.mark.parametrize("dtypes", [(a, b) for a in (torch.float32, *HALF) for b in (torch.float32, *HALF)], ids=str)
def test_mixed_dtypes_are_promoted(backend, device, dtypes):
    o_a, lse = make_states(5, 2, 2, 40, seed=3, dtype=dtypes[0], device=device)
    o_b, _ = make_states(5, 2, 2, 40, seed=4, dtype=dtypes[1], device=device)
    o_a, o_b = o_a[:, 0], o_b[:, 1]
    state = merge_state(o_a, lse[:, 0], o_b, lse[:, 1], backend=backend)
    assert state.o.dtype == torch.promote_types(*dtypes)
    assert state.lse.dtype == torch.float32
    expected = merge_oracle(torch.stack([o_a.double(), o_b.double()], 1), lse)
    assert_state_close(state, expected)


@pytest.mark.parametrize("out_dtype", [torch.float32, *HALF])
def test_out_dtype_is_rounded_once(backend, device, out_dtype):
    """The output is off by the one rounding to its dtype, and by no second one."""
    o, lse = make_states(9, 3, 2, 32, seed=5, device=device)
    state = merge_states(o, lse, out_dtype=out_dtype, backend=backend)
    assert state.o.dtype == out_dtype
    exact = merge_oracle(o, lse)
    ulp = torch.finfo(out_dtype).eps * exact.o.abs().clamp_min(2.0**-14)
    assert ((state.o.double() - exact.o).abs() <= 0.51 * ulp + 1e-6).all()


@pytest.mark.parametrize("marker", [-INF, INF])
@pytest.mark.parametrize("junk", [0.0, NAN, INF, -INF, 3e38])
def test_empty_side_is_neutral(backend, device, marker, junk):
    """K1, K3: merging with an empty state, on either side, returns the other state to the last bit."""
    o, lse = make_states(6, 2, 3, 20, seed=7, device=device)
    for side in (0, 1):
        o_side, lse_side = o.clone(), lse.clone()
        o_side[:, side], lse_side[:, side] = junk, marker
        for state in both_ways(o_side, lse_side, backend):
            assert torch.equal(state.o, o[:, 1 - side])
            assert torch.equal(state.lse, lse[:, 1 - side])


@pytest.mark.parametrize("markers", [(-INF, -INF), (INF, -INF), (-INF, INF), (INF, INF)])
def test_two_empty_states_are_empty(backend, device, markers):
    """K1: o = 0 and lse = -inf where both sides are empty, other rows as without them."""
    o, lse = make_states(8, 2, 2, 64, seed=8, device=device)
    clean = merge_oracle(o, lse)
    o[::4], lse[::4] = NAN, torch.tensor(markers, device=device).view(2, 1)
    for state in both_ways(o, lse, backend):
        assert (state.o[::4] == 0).all()
        assert (state.lse[::4] == -INF).all()
        rest = [r for r in range(8) if r % 4]
        assert_state_close((state.o[rest], state.lse[rest]), (clean.o[rest], clean.lse[rest]))


def test_positive_infinity_means_no_keys(backend, device):
    """K3: lse_a = +inf beside lse_b = 1.5, o_b = 2 gives o = 2, lse = 1.5."""
    for state in both_ways(*one_row((0.0, INF), (2.0, 1.5), device=device), backend):
        assert state.o.unique().tolist() == [2.0]
        assert state.lse.tolist() == [[1.5]]


@pytest.mark.parametrize("other", [0.5, -INF, INF, NAN])
def test_nan_lse_propagates(backend, device, other):
    """A NaN lse makes its own row NaN, also beside an empty side, and no other row."""
    o, lse = make_states(4, 2, 2, 8, seed=9, device=device)
    lse[1, 0, 1], lse[1, 1, 1] = NAN, other
    nan_rows = torch.zeros(4, 2, dtype=torch.bool)
    nan_rows[1, 1] = True
    for swapped in (False, True):
        o_in, lse_in = (o.flip(1), lse.flip(1)) if swapped else (o, lse)
        for state in both_ways(o_in, lse_in, backend):
            assert_state_close(state, merge_oracle(o_in, lse_in), nan_rows=nan_rows)
            assert state.o[1, 1].isnan().all()


def test_nan_in_a_used_output_stays_in_its_element(backend, device):
    o, lse = make_states(3, 2, 2, 8, seed=10, device=device)
    o[2, 1, 0, 5] = NAN
    for state in both_ways(o, lse, backend):
        assert state.o.isnan().nonzero().tolist() == [[2, 0, 5]]
        assert not state.lse.isnan().any()


@pytest.mark.parametrize("shift", [0.0, 100.0, -100.0, 1e4, -1e4, 8e37])
def test_exponentials_are_shifted(backend, device, shift):
    """K5: lse (100, 99) weighs 0.73106 and 0.26894 and merges to 100.31326, at any height."""
    gap = 1.0 if abs(shift) < 1e6 else 0.0
    o, lse = one_row((1.0, shift), (0.0, shift - gap), device=device)
    weight = 1 / (1 + math.exp(-gap))
    for state in both_ways(o, lse, backend):
        assert state.o[0, 0, 0].item() == pytest.approx(weight, abs=1e-6)
        assert state.lse.item() == pytest.approx(shift + math.log1p(math.exp(-gap)), rel=1e-6, abs=1e-6)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("lse", "weight", "total"),
    [
        ((-3.4028234e38, -3.4028234e38), 0.5, -3.4028234e38),
        ((-1e30, -1e30), 0.5, -1e30),
        ((-3e38, -3.3e38), 1.0, -3e38),
        ((3.4e38, -3.4e38), 1.0, 3.4e38),
        ((-3.4e38, 3.4e38), 0.0, 3.4e38),
        ((0.0, 1e-38), 0.5, 0.6931472),
    ],
)
def test_no_finite_lse_stands_for_an_empty_state(backend, device, lse, weight, total):
    """Requirement 3: only infinity is empty, whatever large number a mask would be written with elsewhere."""
    for state in both_ways(*one_row((1.0, lse[0]), (0.0, lse[1]), device=device), backend):
        assert state.o[0, 0, 0].item() == pytest.approx(weight, rel=1e-6)
        assert state.lse.item() == pytest.approx(total, rel=1e-6)


def test_float64_states_keep_float64():
    """K5: lse (800, 799) overflows an unshifted float64 exponential; the merge is 800.31326168751822."""
    o, lse = one_row((1.0, 800.0), (0.0, 799.0))
    for state in both_ways(o.double(), lse.double(), "torch"):
        assert state.o.dtype == state.lse.dtype == torch.float64
        assert state.o[0, 0, 0].item() == pytest.approx(0.7310585786300049, abs=1e-15)
        assert state.lse.item() == pytest.approx(800.3132616875182, abs=1e-12)


def test_lse_base_is_natural(backend, device):
    """K6: 4096 keys of value 0 and 16 of value 1, all scores 0: 16 / 4112. Base-2 numbers give 0.00033535."""
    o, lse = one_row((0.0, math.log(4096.0)), (1.0, math.log(16.0)), device=device)
    base2 = lse_to_base2(lse)
    assert base2.flatten().tolist() == pytest.approx([12.0, 4.0])
    for state in both_ways(o, lse, backend):
        assert state.o[0, 0, 0].item() == pytest.approx(16 / 4112, rel=1e-6)
        assert state.lse.item() == pytest.approx(math.log(4112.0), rel=1e-6)
    for state in both_ways(o, lse_from_base2(base2), backend):
        assert state.o[0, 0, 0].item() == pytest.approx(16 / 4112, rel=1e-6)
    for state in both_ways(o, base2, backend):
        assert state.o[0, 0, 0].item() == pytest.approx(0.00033535, rel=1e-4), "the control that must differ"


def test_base_conversions_are_inverse():
    lse = torch.tensor([[0.0, math.log(8.0)], [-INF, INF]])
    assert lse_to_base2(lse).tolist() == [[0.0, 3.0], [-INF, INF]]
    assert lse_from_base2(torch.tensor([1.0])).item() == pytest.approx(math.log(2.0))
    assert torch.equal(lse_from_base2(lse_to_base2(lse))[1], lse[1])


def test_lse_is_that_of_scaled_scores():
    """K8: D=64, raw scores [8, 0], scale 0.125: lse = ln(e + 1) = 1.31326; the oracle's scale enters once."""
    q = torch.zeros(1, 1, 64)
    q[..., 0] = 8.0
    k = torch.zeros(1, 2, 1, 64)
    k[0, 0, 0, 0] = 1.0
    state = attention_oracle(q, k, torch.ones_like(k), int32([[0]]), int32([2]))
    assert state.lse.item() == pytest.approx(math.log(math.e + 1), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_weights_are_not_rounded_with_the_outputs(backend, device, dtype):
    """K16: lse (9.53, 9.47), o (1, 0): weight 0.51500. A bf16 lse would make both 9.5 and the weight 0.5."""
    o, lse = one_row((1.0, 9.53), (0.0, 9.47), device=device)
    state = merge_states(o.to(dtype), lse, out_dtype=torch.float32, backend=backend)
    assert state.o[0, 0, 0].item() == pytest.approx(0.51500, abs=5e-6)
    half = merge_state(*pair(o.to(dtype), lse), backend=backend)
    assert half.o[0, 0, 0].item() == pytest.approx(0.51500, abs=2 * torch.finfo(dtype).eps * 0.515 + 5e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("name", ["lse_a", "lse_b"])
def test_half_precision_lse_is_refused(backend, device, name, dtype):
    """K16: an lse is float32, or float64 on the torch backend."""
    o, lse = make_states(2, 2, 2, 4, device=device)
    arguments = dict(zip(("o_a", "lse_a", "o_b", "lse_b"), pair(o, lse), strict=True))
    arguments[name] = torch.zeros_like(arguments[name], dtype=dtype)
    with pytest.raises(TypeError, match=f"{name}.*float32.*{dtype}"):
        merge_state(**arguments, backend=backend)
    with pytest.raises(TypeError, match=f"lse.*float32.*{dtype}"):
        merge_states(o, lse.to(dtype), backend=backend)
    for convert in (lse_from_base2, lse_to_base2):
        with pytest.raises(TypeError, match=f"lse.*{dtype}"):
            convert(lse.to(dtype))


@pytest.mark.parametrize("given", [1.0, [1.0], None])
@pytest.mark.parametrize("convert", [lse_from_base2, lse_to_base2])
def test_base_conversions_refuse_what_is_no_tensor(convert, given):
    with pytest.raises(TypeError, match=f"lse: expected a tensor, given {type(given).__name__}"):
        convert(given)


@pytest.mark.parametrize("splits", [1, 2, 3, 8, 133])
def test_any_cut_of_the_keys_gives_one_state(backend, device, splits):
    """K17: 3 keys in 1, 2, 3, 8 or 133 parts, most of them empty, merge to the same o and lse."""
    scores = torch.tensor([0.3, -1.2, 2.0], device=device)
    values = random(3, 6, seed=11, device=device)
    o = torch.full((1, splits, 1, 6), NAN, device=device)
    lse = torch.full((1, splits, 1), -INF, device=device)
    for part, keys in enumerate(torch.arange(3).tensor_split(splits)):
        if len(keys):
            lse[0, part, 0] = scores[keys].logsumexp(0)
            o[0, part, 0] = scores[keys].softmax(0) @ values[keys]
    state = merge_states(o, lse, backend=backend)
    expected = scores.double().softmax(0) @ values.double(), scores.double().logsumexp(0)
    assert_state_close(state, (expected[0].view(1, 1, 6), expected[1].view(1, 1)))


def test_order_and_grouping_do_not_matter(backend, device):
    """Requirement 6: every order and every bracket of five states agrees within rounding."""
    o, lse = make_states(4, 5, 2, 12, seed=12, device=device, empty=0.3)
    expected = merge_oracle(o, lse)
    for order in ([4, 2, 0, 1, 3], [1, 0, 3, 2, 4], [3, 4, 2, 1, 0]):
        assert_state_close(merge_states(o[:, order], lse[:, order], backend=backend), expected)
        left = State(o[:, order[0]], lse[:, order[0]])
        for s in order[1:]:
            left = merge_state(*left, o[:, s], lse[:, s], backend=backend)
        assert_state_close(left, expected)
        head = merge_states(o[:, order[:2]], lse[:, order[:2]], backend=backend)
        tail = merge_states(o[:, order[2:]], lse[:, order[2:]], backend=backend)
        assert_state_close(merge_state(*head, *tail, backend=backend), expected)


def test_merging_a_state_with_itself_adds_ln_2(backend, device):
    o, lse = make_states(5, 1, 3, 16, seed=13, device=device)
    state = merge_state(o[:, 0], lse[:, 0], o[:, 0], lse[:, 0], backend=backend)
    assert torch.equal(state.o, o[:, 0])
    assert_state_close(state, (o[:, 0], lse[:, 0].double() + math.log(2.0)))


def test_equal_outputs_survive_any_weights(backend, device):
    o, lse = make_states(5, 7, 2, 16, seed=14, device=device)
    state = merge_states(o[:, :1].expand(-1, 7, -1, -1), lse, backend=backend)
    assert_state_close(state, (o[:, 0], lse.double().logsumexp(1)))


def test_shifting_every_lse_shifts_only_the_lse(backend, device):
    o, lse = make_states(5, 3, 2, 16, seed=15, device=device)
    plain, shifted = (merge_states(o, lse + shift, backend=backend) for shift in (0.0, 64.0))
    assert_state_close((shifted.o, shifted.lse - 64.0), plain, atol=2e-5)


@pytest.mark.parametrize("layout", ["heads first", "every other row", "expanded"])
def test_strided_lse_is_read_in_place(backend, device, layout, loads):
    """K11: a transposed [H_q, T] lse gives the same numbers as a copy, and is not copied."""
    T, H, D = 6, 4, 16
    o, lse = make_states(T, 2, H, D, seed=16, device=device)
    expected = merge_state(*pair(o, lse), backend=backend)
    o_a, lse_a, o_b, lse_b = (x.contiguous() for x in pair(o, lse))
    if layout == "heads first":
        lse_a, lse_b = (states.lse_from_heads_first(x.t().contiguous()) for x in (lse_a, lse_b))
        assert lse_a.stride() == (1, T)
    elif layout == "every other row":
        memory = torch.full((2 * T, H), NAN, device=device)
        memory[::2] = lse_a
        lse_a = memory[::2]
    else:
        lse_a = torch.zeros(1, 1, device=device).expand(T, H)
        expected = merge_state(o_a, lse_a.contiguous(), o_b, lse_b, backend=backend)
    if loads is not None:
        loads.register(o_a=o_a, lse_a=lse_a, o_b=o_b, lse_b=lse_b)
        copies = loads.loaded_bytes
    state = merge_state(o_a, lse_a, o_b, lse_b, backend=backend)
    assert torch.equal(state.o, expected.o)
    assert torch.equal(state.lse, expected.lse)
    if loads is not None:
        assert loads["lse_a"].loaded_bytes == loads["lse_b"].loaded_bytes == T * H * 4
        assert loads["o_a"].loaded_bytes == loads["o_b"].loaded_bytes == T * H * D * 4
        assert loads.loaded_bytes - copies == 2 * T * H * (D + 1) * 4, "something else was read"


def test_a_square_lse_is_read_as_its_layout_says(backend, device):
    """Requirement 4: with T = H both layouts fit, so the shape refuses neither; the helper alone tells them apart."""
    o, lse = make_states(5, 2, 5, 8, seed=33, device=device)
    expected = merge_oracle(o, lse)
    heads_first = lse[:, 1].t().contiguous()
    view = states.lse_from_heads_first(heads_first)
    assert_state_close(merge_state(o[:, 0], lse[:, 0], o[:, 1], view, backend=backend), expected)
    wrong = merge_state(o[:, 0], lse[:, 0], o[:, 1], heads_first, backend=backend)
    assert (wrong.lse.double().cpu() - expected.lse.cpu()).abs().max() > 0.1


@pytest.mark.skipif(runtime.triton_mode() != "interpreted", reason="the recorder watches Triton's interpreter")
def test_kernel_moves_compulsory_bytes_only():
    """Two states are read once and one is written once; an empty state's o is not read at all."""
    backend = "triton"
    o, lse = make_states(20, 2, 8, 64, seed=17)
    with record_loads(o=o, lse=lse) as record:
        merge_state(*pair(o, lse), backend=backend)
        assert record["o"].loaded_bytes == record["o"].distinct_bytes == 2 * 20 * 8 * 64 * 4
        assert record["lse"].loaded_bytes == 2 * 20 * 8 * 4
        assert record.stored_bytes == 20 * 8 * (64 + 1) * 4
    lse[:, 1:] = -INF
    with record_loads(o=o, lse=lse) as record:
        merge_states(o, lse, backend=backend)
        assert record["o"].loaded_bytes == 20 * 8 * 64 * 4
        assert record.stored_bytes == 20 * 8 * (64 + 1) * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_sliced_from_padded_head_dim_is_read_in_place(backend, device, dtype):
    """K11: o = the first 128 of 192 columns, and rows that are not next to each other."""
    T, H = 4, 2
    memory = torch.full((T + 3, 2, H, 192), NAN, dtype=dtype, device=device)
    o, lse = make_states(T, 2, H, 128, seed=18, dtype=dtype, device=device)
    memory[:T, :, :, :128] = o
    view = memory[:T, :, :, :128]
    for state, expected in zip(both_ways(view, lse, backend), both_ways(o, lse, backend), strict=True):
        assert torch.equal(state.o, expected.o)
        assert torch.equal(state.lse, expected.lse)


@pytest.mark.parametrize("target", ["fresh", "o_a", "o_b", "strided"])
def test_out_is_written_and_returned(backend, device, target):
    o, lse = make_states(5, 2, 3, 24, seed=19, device=device, empty=0.3)
    expected = merge_oracle(o, lse)
    o_a, lse_a, o_b, lse_b = (x.contiguous() for x in pair(o, lse))
    out, out_lse = {
        "fresh": lambda: (torch.empty(5, 3, 24, device=device), torch.empty(5, 3, device=device)),
        "o_a": lambda: (o_a, lse_a),
        "o_b": lambda: (o_b, lse_b),
        "strided": lambda: (
            torch.full((5, 3, 32), 7.0, device=device)[..., :24],
            torch.full((3, 5), 7.0, device=device).t(),
        ),
    }[target]()
    state = merge_state(o_a, lse_a, o_b, lse_b, out=out, out_lse=out_lse, backend=backend)
    assert state.o.data_ptr() == out.data_ptr()
    assert state.lse.data_ptr() == out_lse.data_ptr()
    assert_state_close((out, out_lse), expected)
    if target == "strided":
        assert (out.as_strided((5, 3, 8), out.stride(), out.storage_offset() + 24) == 7.0).all()


def test_out_alone_or_out_lse_alone(backend, device):
    o, lse = make_states(5, 2, 3, 24, seed=20, dtype=torch.bfloat16, device=device)
    expected = merge_oracle(o, lse)
    out = torch.empty(5, 3, 24, device=device)
    assert_state_close(merge_state(*pair(o, lse), out=out, backend=backend), expected)
    assert_state_close((out, expected.lse.float()), expected)
    out_lse = torch.empty(5, 3, device=device)
    assert_state_close(merge_state(*pair(o, lse), out_lse=out_lse, backend=backend), expected)
    assert_state_close((expected.o.float(), out_lse), expected)


def test_partly_overlapping_out_is_refused(backend, device):
    memory = random(7, 2, 4, seed=21, device=device)
    lse = random(8, 2, seed=22, device=device)
    before = bytes_of(memory), bytes_of(lse)
    with pytest.raises(ValueError, match=r"out: .*o_a"):
        merge_state(memory[:5], lse[:5], memory[:5] * 2, lse[:5] * 2, out=memory[1:6], backend=backend)
    with pytest.raises(ValueError, match=r"out_lse: .*lse_b"):
        merge_state(memory[:5], lse[:5] * 2, memory[:5] * 2, lse[:5], out_lse=lse[2:7], backend=backend)
    out = torch.zeros(1, 2, 4, device=device).expand(5, 2, 4)
    with pytest.raises(ValueError, match=r"out: "):
        merge_state(memory[:5], lse[:5], memory[:5] * 2, lse[:5] * 2, out=out, backend=backend)
    assert torch.equal(bytes_of(memory), before[0])
    assert torch.equal(bytes_of(lse), before[1])


def test_disjoint_views_of_one_memory_are_accepted(backend, device):
    """The columns of one tensor interleave in memory without sharing an element."""
    memory = random(4, 3, 2, 8, seed=23, device=device)
    lse = random(4, 2, 2, seed=24, device=device)
    expected = merge_oracle(memory[:, :2], lse)
    merge_state(memory[:, 0], lse[:, 0], memory[:, 1], lse[:, 1], out=memory[:, 2], backend=backend)
    assert_state_close((memory[:, 2], expected.lse.float()), expected)


def test_no_rows(backend, device):
    o, lse = torch.empty(0, 2, 3, 8, device=device), torch.empty(0, 2, 3, device=device)
    for state in both_ways(o, lse, backend):
        assert state.o.shape == (0, 3, 8)
        assert state.lse.shape == (0, 3)


def test_inputs_are_not_modified(backend, device):
    o, lse = make_states(6, 3, 2, 10, seed=25, device=device, empty=0.5)
    before = bytes_of(o), bytes_of(lse)
    both_ways(o[:, :2], lse[:, :2], backend)
    merge_states(o, lse, backend=backend)
    assert torch.equal(bytes_of(o), before[0])
    assert torch.equal(bytes_of(lse), before[1])


def with_gradients(o, lse, merge, seed):
    """Gradients of a fixed random combination of all outputs."""
    o, lse = o.clone().requires_grad_(), lse.clone().requires_grad_()
    merged = merge(o, lse)
    kept = ~merged[1].detach().isinf()
    weight = random(*merged[0].shape, seed=seed).to(merged[0])
    loss = (merged[0] * weight).sum() + (merged[1][kept] * weight[..., 0][kept]).sum()
    return torch.autograd.grad(loss, (o, lse))


@pytest.mark.parametrize("S", [2, 5])
def test_gradients_match_float64_autograd(backend, device, S):
    """Through o and lse, on every backend; 30% of the states are empty and get zero gradients, not NaN."""
    o, lse = make_states(4, S, 3, 12, seed=26, device=device, empty=0.3)
    empty = lse.isinf()

    def merge(o, lse):
        if S == 2:
            return merge_state(*pair(o, lse), backend=backend)
        return merge_states(o, lse, backend=backend)

    grad_o, grad_lse = with_gradients(o, lse, merge, seed=27)
    clean_o, clean_lse = o.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -INF)
    alive = torch.where(empty, -1e30, clean_lse).double()

    def plain(o, lse):
        lse = torch.where(empty, -INF, lse)
        total = torch.where(empty.all(1, keepdim=True), 0.0, lse)
        share = total.softmax(1).masked_fill(empty, 0.0)
        return (share[..., None] * o).sum(1), lse.logsumexp(1)

    expected = with_gradients(clean_o.double(), alive, plain, seed=27)
    assert (grad_o[empty] == 0).all()
    assert (grad_lse[empty] == 0).all()
    torch.testing.assert_close(grad_o.double(), expected[0], rtol=0, atol=2e-6)
    torch.testing.assert_close(grad_lse.double(), expected[1].masked_fill(empty, 0.0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("S", [1, 2, 3])
def test_gradcheck_in_float64(S):
    o, lse = make_states(3, S, 2, 4, seed=28)
    o, lse = o.double().requires_grad_(), lse.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda o, lse: merge_states(o, lse, backend="torch"), (o, lse))
    if S == 2:
        assert torch.autograd.gradcheck(lambda *x: merge_state(*x, backend="torch"), pair(o, lse))


def test_gradient_of_lse_alone_and_of_o_alone(backend, device):
    """A loss on one of the two outputs leaves the other's gradient undefined on the way back."""
    o, lse = make_states(3, 2, 2, 4, seed=29, device=device)
    x, y = o.clone().requires_grad_(), lse.clone().requires_grad_()
    grad_o, grad_lse = torch.autograd.grad(merge_states(x, y, backend=backend).lse.sum(), (x, y))
    assert (grad_o == 0).all()
    torch.testing.assert_close(grad_lse, lse.softmax(1), rtol=0, atol=1e-6)
    grad_o, grad_lse = torch.autograd.grad(merge_states(x, y, backend=backend).o.sum(), (x, y))
    torch.testing.assert_close(grad_o, lse.softmax(1)[..., None].expand_as(o).contiguous(), rtol=0, atol=1e-6)
    torch.testing.assert_close(grad_lse.sum(1), torch.zeros(3, 2, device=device), rtol=0, atol=1e-5)


GOOD = {"o_a": (5, 3, 8), "lse_a": (5, 3), "o_b": (5, 3, 8), "lse_b": (5, 3)}


@pytest.mark.parametrize(
    ("changes", "error", "fragments"),
    [
        ({"lse_a": lambda x: x.t()}, ValueError, ["lse_a", "(5, 3)", "(3, 5)"]),
        ({"lse_b": lambda x: x.t()}, ValueError, ["lse_b", "(5, 3)", "(3, 5)"]),
        ({"lse_a": lambda x: x.new_zeros(2, 3, 3)}, ValueError, ["lse_a", "[T, H_q]", "(2, 3, 3)"]),
        ({"lse_a": lambda x: x[:, :, None]}, ValueError, ["lse_a", "[T, H_q]", "(5, 3, 1)"]),
        ({"lse_b": lambda x: x[:4]}, ValueError, ["lse_b", "(5, 3)", "(4, 3)"]),
        ({"lse_b": lambda x: x.new_zeros(1, 3)}, ValueError, ["lse_b", "(5, 3)", "(1, 3)"]),
        ({"o_a": lambda x: x[None]}, ValueError, ["o_a", "[T, H_q, D]", "(1, 5, 3, 8)"]),
        ({"o_b": lambda x: x[:, :, :7]}, ValueError, ["o_b", "(5, 3, 8)", "(5, 3, 7)"]),
        (
            {"o_a": lambda x: x[..., ::2], "o_b": lambda x: x[..., :4]},
            ValueError,
            ["o_a", "last dim", "(24, 8, 2)"],
        ),
        ({"o_a": lambda x: x.int()}, TypeError, ["o_a", "float32", "torch.int32"]),
        ({"o_b": lambda x: x.bool()}, TypeError, ["o_b", "float32", "torch.bool"]),
        ({"o_a": lambda x: x.tolist()}, TypeError, ["o_a", "tensor", "list"]),
        ({"lse_b": lambda x: None}, TypeError, ["lse_b", "tensor", "None"]),
        (
            {"o_b": lambda x: x.to("meta"), "lse_b": lambda x: x.to("meta")},
            ValueError,
            ["o_b", "cpu", "meta"],
        ),
        ({"lse_a": lambda x: x.to("meta")}, ValueError, ["lse_a", "cpu", "meta"]),
        ({"out_dtype": torch.int8}, TypeError, ["out_dtype", "float32", "torch.int8"]),
        ({"out": torch.zeros(5, 3, 9)}, ValueError, ["out", "(5, 3, 8)", "(5, 3, 9)"]),
        ({"out": torch.zeros(5, 3, 8, dtype=torch.int32)}, TypeError, ["out", "float32", "torch.int32"]),
        (
            {"out": torch.zeros(5, 3, 8), "out_dtype": torch.float16},
            TypeError,
            ["out", "torch.float16", "torch.float32"],
        ),
        ({"out": torch.zeros(5, 3, 16)[..., ::2]}, ValueError, ["out", "last dim", "(48, 16, 2)"]),
        ({"out_lse": torch.zeros(3, 5)}, ValueError, ["out_lse", "(5, 3)", "(3, 5)"]),
        ({"out_lse": torch.zeros(5, 3).half()}, TypeError, ["out_lse", "float32", "torch.float16"]),
        ({"backend": "cuda"}, ValueError, ["backend", "triton", "cuda"]),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_bad_merge_input_is_refused(backend, device, changes, error, fragments):
    """K9 and the rest of the boundary: the message names the argument, expected and given."""
    arguments = {key: random(*shape, seed=30 + i, device=device) for i, (key, shape) in enumerate(GOOD.items())}
    arguments["backend"] = backend
    for key, change in changes.items():
        x = change(arguments[key]) if callable(change) else change
        arguments[key] = x.to(device) if isinstance(x, torch.Tensor) and not x.is_meta else x
    before = {key: bytes_of(x) for key, x in arguments.items() if isinstance(x, torch.Tensor) and not x.is_meta}
    with pytest.raises(error) as caught:
        merge_state(**arguments)
    for fragment in fragments:
        assert (device.type if fragment == "cpu" else fragment) in str(caught.value)
    for key, content in before.items():
        assert torch.equal(bytes_of(arguments[key]), content), f"{key} was modified"


@pytest.mark.parametrize(
    ("o_shape", "lse_shape", "fragments"),
    [
        ((5, 2, 3, 8), (5, 3, 2), ["lse", "(5, 2, 3)", "(5, 3, 2)"]),
        ((5, 2, 3, 8), (2, 5, 3), ["lse", "(5, 2, 3)", "(2, 5, 3)"]),
        ((5, 2, 3, 8), (5, 6), ["lse", "[T, S, H_q]", "(5, 6)"]),
        ((5, 3, 8), (5, 3), ["o", "[T, S, H_q, D]", "(5, 3, 8)"]),
    ],
)
def test_bad_states_layout_is_refused(backend, device, o_shape, lse_shape, fragments):
    with pytest.raises(ValueError, match="expected") as caught:
        merge_states(torch.zeros(o_shape, device=device), torch.zeros(lse_shape, device=device), backend=backend)
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@pytest.mark.parametrize("name", ["o_a", "lse_a", "o_b", "lse_b"])
def test_triton_refuses_float64(name, backend, device):
    """Float64 states are for the torch backend; never a silent conversion."""
    arguments = {key: random(*shape, seed=30 + i, device=device) for i, (key, shape) in enumerate(GOOD.items())}
    arguments[name] = arguments[name].double()
    with pytest.raises(TypeError, match=f"{name}.*float64"):
        merge_state(**arguments, backend=backend)


def test_out_with_a_required_gradient_is_refused(backend, device):
    o, lse = make_states(3, 2, 2, 4, device=device)
    o_a, lse_a, o_b, lse_b = pair(o, lse)
    with pytest.raises(ValueError, match="out.*gradient"):
        merge_state(o_a.clone().requires_grad_(), lse_a, o_b, lse_b, out=torch.empty_like(o_a), backend=backend)


def test_padded_lse_is_converted_by_an_explicit_call():
    """K9: [R, H_q, max_T] with query lengths [2, 3] becomes [5, H_q], and only on request."""
    padded = random(2, 4, 3, seed=31)
    padded[0, :, 2] = NAN
    packed = states.lse_from_padded(padded, int32([0, 2, 5]))
    assert packed.shape == (5, 4)
    assert torch.equal(packed, torch.cat([padded[0, :, :2].t(), padded[1].t()]))
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        states.lse_from_padded(padded, int32([0, 2, 6]))


def test_head_layout_helpers_are_views():
    lse = random(3, 7, seed=32)
    view = states.lse_from_heads_first(lse)
    assert view.shape == (7, 3)
    assert view.data_ptr() == lse.data_ptr()
    assert states.lse_to_heads_first(view).stride() == lse.stride()
    with pytest.raises(ValueError, match=r"lse.*\[H_q, T\]"):
        states.lse_from_heads_first(lse[None])


def test_state_unpacks_as_output_then_lse(backend, device):
    o, lse = make_states(2, 2, 1, 4, device=device)
    state = merge_states(o, lse, backend=backend)
    assert isinstance(state, State)
    assert re.match(r"State\(o=", repr(state))
    first, second = state
    assert first is state.o
    assert second is state.lse


@pytest.mark.parametrize("size", [1.6e38, 2e38])
def test_the_largest_outputs_that_merge(backend, size):
    """F10 (tests/known_faults.md): two equal states merge to themselves up to 3.4e38 / 2 on triton, on torch beyond."""
    device = runtime.device() if backend == "triton" else "cpu"
    o, lse = (
        torch.full((3, 2, 8), size, device=device),
        torch.tensor([0.0, -5.0, 7.0], device=device)[:, None].repeat(1, 2),
    )
    for merged in (
        merge_state(o, lse, o, lse, backend=backend),
        merge_states(torch.stack((o, o), 1), torch.stack((lse, lse), 1), backend=backend),
    ):
        right = torch.full_like(o, size if backend == "torch" or size < 1.7e38 else math.inf)
        torch.testing.assert_close(merged.o, right)
        torch.testing.assert_close(merged.lse, lse + math.log(2))
