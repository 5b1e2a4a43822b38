"""The oracle against hand-computed numbers, and the comparison against states that must not pass."""

from __future__ import annotations

import math

import pytest
import torch

from cascade_lab.evidence.reference import (
    Reference,
    assert_state_close,
    attention_oracle,
    merge_oracle,
    state_error,
    visible_keys,
)
from tests.cases import attention_case, int32, offsets, random, tree_mask

INF, NAN = math.inf, math.nan


def pattern(matrix):
    return ["".join(str(int(x)) for x in row) for row in matrix]


@pytest.mark.parametrize(
    ("rows", "keys", "options", "expected"),
    [
        (2, 5, {}, ["11111", "11111"]),
        (2, 5, {"causal": True}, ["11110", "11111"]),
        (5, 2, {"causal": True}, ["00", "00", "00", "10", "11"]),
        (3, 5, {"window_size": (1, 0)}, ["01100", "00110", "00011"]),
        (3, 5, {"window_size": (-1, 1)}, ["11110", "11111", "11111"]),
        (3, 5, {"window_size": (0, -1)}, ["00111", "00011", "00001"]),
        (3, 5, {"window_size": (1, 5), "causal": True}, ["01100", "00110", "00011"]),
        (5, 2, {"window_size": (0, 0)}, ["00", "00", "00", "10", "01"]),
        (0, 3, {}, []),
        (2, 0, {}, ["", ""]),
    ],
)
def test_visible_keys_by_hand(rows, keys, options, expected):
    """K51 (tests/known_faults.md): bottom-right alignment, written out."""
    [matrix] = visible_keys(offsets([rows]), int32([keys]), **options)
    assert matrix.shape == (rows, keys)
    assert pattern(matrix) == expected


def test_visible_keys_of_trees():
    """K25: a node sees its ancestors and itself; keys before the tail are seen by all; tails differ from rows."""
    tree = [-1, 0, 0, 1, 2]
    mask = tree_mask([tree, tree[:3]])
    first, second = visible_keys(offsets([5, 3]), int32([7, 4]), tree_mask=mask)
    assert pattern(first) == ["1110000", "1111000", "1110100", "1111010", "1110101"]
    assert pattern(second) == ["1100", "1110", "1101"]
    leaves = mask[[3, 4]]
    [matrix] = visible_keys(offsets([2]), int32([6]), tree_mask=leaves, tail_seqlens=int32([5]))
    assert pattern(matrix) == ["111010", "110101"]
    [wide] = visible_keys(offsets([130]), int32([130]), tree_mask=tree_mask([[n - 1 for n in range(130)]]))
    assert torch.equal(wide, torch.ones(130, 130).tril().bool())


def test_pairs_of_a_causal_prefill_are_the_triangle():
    matrices = visible_keys(offsets([4, 3]), int32([4, 9]), causal=True)
    assert [int(m.sum()) for m in matrices] == [10, 3 * 6 + 3 * 4 // 2]


def test_attention_by_hand():
    """Three keys with scores ln 1, ln 2, ln 5: weights 1/8, 2/8, 5/8 and lse = ln 8; one of three pages is poison."""
    k = torch.full((3, 2, 1, 1), NAN)
    k[2, :, 0, 0] = torch.tensor([1.0, 2.0]).log()
    k[0, 0, 0, 0] = math.log(5.0)
    v = torch.full((3, 2, 1, 2), NAN)
    v[2, :, 0] = torch.tensor([[8.0, 0.0], [0.0, 4.0]])
    v[0, 0, 0] = torch.tensor([16.0, 8.0])
    q = torch.ones(1, 1, 1)
    state = attention_oracle(q, k, v, int32([[2, 0, 99]]), int32([3]), softmax_scale=1.0)
    assert state.o.dtype == state.lse.dtype == torch.float64
    assert state.o.flatten().tolist() == pytest.approx([11.0, 6.0], rel=1e-6)
    assert state.lse.item() == pytest.approx(math.log(8.0), rel=1e-7)


def test_heads_of_a_group_read_their_own_key_head():
    case = attention_case([2, 3], [5, 8], heads=(6, 2))
    whole = case.reference()
    for h in range(6):
        k, v = case.k_cache[:, :, h // 3, None], case.v_cache[:, :, h // 3, None]
        q = case.q[:, h, None]
        one = attention_oracle(q, k, v, case.page_table, case.cache_seqlens, cu_seqlens_q=case.cu_seqlens_q)
        torch.testing.assert_close(one.o[:, 0], whole.o[:, h])
        torch.testing.assert_close(one.lse[:, 0], whole.lse[:, h])


def test_oracle_agrees_with_torch_attention():
    """A dense causal batch, by `scaled_dot_product_attention` in float64."""
    q, k, v = (random(3, 7, 4, 8, seed=s, dtype=torch.float64) for s in range(3))
    state = attention_oracle(
        q.reshape(21, 4, 8),
        k,
        v,
        torch.arange(3, dtype=torch.int32)[:, None],
        int32([7, 7, 7]),
        cu_seqlens_q=offsets([7, 7, 7]),
        causal=True,
        softmax_scale=0.3,
    )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    torch.testing.assert_close(state.o.view(3, 7, 4, 8), expected.transpose(1, 2))
    scores = (0.3 * q @ k.transpose(-1, -2)).masked_fill(torch.ones(7, 7).triu(1).bool(), -INF)
    torch.testing.assert_close(state.lse.view(3, 7, 4), scores.logsumexp(-1).transpose(1, 2))


def test_softcap_and_zero_scale():
    case = attention_case([1, 2], [5, 3], softcap=0.7, softmax_scale=2.0)
    k = case.k_cache[case.page_table[0, [0, 0, 0, 0, 1]].long(), [0, 1, 2, 3, 0], 1].double()
    scores = 0.7 * torch.tanh(2.0 * (k @ case.q[0, 2].double()) / 0.7)
    assert case.reference().lse[0, 2].item() == pytest.approx(scores.logsumexp(0).item())
    flat = case.with_options(softcap=0.0, softmax_scale=0.0).reference()
    assert flat.lse[0].tolist() == pytest.approx([math.log(5.0)] * 4)


def test_empty_rows_are_exact():
    state = attention_case([4, 1, 2], [2, 0, 3], causal=True).reference()
    assert (state.o[[0, 1, 4]] == 0).all()
    assert (state.lse[[0, 1, 4]] == -INF).all()
    assert state.lse[[2, 3, 5, 6]].isfinite().all()
    nothing = attention_case([0, 0], [3, 4]).reference()
    assert (nothing.o.shape, nothing.lse.shape) == ((0, 4, 16), (0, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_plain_run_rounds_everything_but_the_lse(dtype):
    case = attention_case([2, 1], [30, 9], dtype=dtype)
    exact, plain = case.reference(), case.reference(dtype)
    assert plain.o.dtype == dtype
    assert plain.lse.dtype == torch.float32
    error = state_error(plain, exact)
    eps = torch.finfo(dtype).eps
    assert eps / 16 < error.o < 4 * eps
    assert eps / 16 < error.lse < 4 * eps


def test_oracle_gradients():
    """Differentiable through o and lse; empty rows and unread slots have zero gradients, never NaN."""
    case = attention_case([3, 1], [2, 3], heads=(2, 1), dim=3, page=2, dtype=torch.float64)
    leaves = [x.nan_to_num(7.0).requires_grad_() for x in (case.q, case.k_cache, case.v_cache)]

    def finite(q, k, v):
        state = attention_oracle(
            q, k, v, case.page_table, case.cache_seqlens, cu_seqlens_q=case.cu_seqlens_q, causal=True
        )
        return state.o, state.lse[1:]

    assert torch.autograd.gradcheck(finite, leaves)
    grads = torch.autograd.grad(sum(x.sum() for x in finite(*leaves)), leaves)
    assert (grads[0][0] == 0).all()
    assert (grads[2][case.v_cache.isnan()] == 0).all()


def test_merge_by_hand():
    """K5, K1, K3: weights 0.7310586 and 0.2689414; an empty state's o is not looked at."""
    o = torch.tensor([[[[1.0]], [[0.0]], [[NAN]]], [[[3.0]], [[INF]], [[5.0]]]])
    lse = torch.tensor([[[100.0], [99.0], [-INF]], [[-INF], [INF], [-INF]]])
    merged = merge_oracle(o, lse)
    assert merged.o[0].item() == pytest.approx(0.7310585786300049, abs=1e-15)
    assert merged.lse[0].item() == pytest.approx(100.31326168751822, abs=1e-12)
    assert (merged.o[1].item(), merged.lse[1].item()) == (0.0, -INF)
    assert merge_oracle(o[:, :0], lse[:, :0]).lse.tolist() == [[-INF], [-INF]]


def test_merge_of_parts_is_the_whole():
    """Claim 1 inside the oracle: keys cut in three, merged, equal one pass."""
    case = attention_case([2, 3], [9, 7], page=1)
    cuts = [0, 2, 5, 9]
    parts = []
    for start, end in zip(cuts, cuts[1:], strict=False):
        table = case.page_table[:, start:]
        lengths = (case.cache_seqlens.clamp(max=end) - start).clamp(min=0)
        parts.append(
            attention_oracle(case.q, case.k_cache, case.v_cache, table, lengths, cu_seqlens_q=case.cu_seqlens_q)
        )
    merged = merge_oracle(torch.stack([p.o for p in parts], 1), torch.stack([p.lse for p in parts], 1))
    assert_state_close(merged, case.reference())


def test_merge_propagates_nan():
    lse = torch.tensor([[[NAN], [-INF]], [[0.0], [1.0]]])
    merged = merge_oracle(torch.ones(2, 2, 1, 3), lse)
    assert merged.lse[0].isnan().all()
    assert merged.o[0].isnan().all()
    assert merged.o[1].isfinite().all()


def state(seed=0, T=6, H=2, D=4):
    o, lse = random(T, H, D, seed=seed), random(T, H, seed=seed + 1)
    o[3, 1], lse[3, 1] = 0.0, -INF
    return Reference(o, lse)


def broken(change):
    o, lse = (x.clone() for x in state())
    change(o, lse)
    return Reference(o, lse)


def test_equal_states_pass():
    assert_state_close(state(), state())
    assert state_error(state(), state()) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o, lse: o[2, 1].__setitem__(3, NAN), "NaN in actual o at request 1, row 2, head 1"),
        (lambda o, lse: lse[4].__setitem__(0, NAN), "NaN in actual lse at request 1, row 4, head 0"),
        (lambda o, lse: lse[4].__setitem__(0, -INF), "empty rows .* at request 1, row 4, head 0"),
        (lambda o, lse: lse[3].__setitem__(1, -1e30), "empty rows .* at request 1, row 3, head 1"),
        (lambda o, lse: o[3, 1].__setitem__(0, 1e-30), "not exactly 0 in an empty row at request 1, row 3, head 1"),
        (lambda o, lse: o[5, 0].__setitem__(2, o[5, 0, 2] + 1e-3), "o differs by 0.001.* at request 2, row 5, head 0"),
        (lambda o, lse: lse[1].__setitem__(1, lse[1, 1] - 1e-3), "lse differs by 0.001.* at request 0, row 1, head 1"),
        (lambda o, lse: lse[1].__setitem__(1, INF), "lse differs by inf .* at request 0, row 1, head 1"),
        (lambda o, lse: o[0, 0].__setitem__(0, INF), "o differs by inf .* at request 0, row 0, head 0"),
    ],
)
def test_broken_states_fail(change, message):
    """K19: each kind of damage fails and is located."""
    with pytest.raises(AssertionError, match=message):
        assert_state_close(broken(change), state(), cu_seqlens_q=offsets([2, 3, 1]))


@pytest.mark.parametrize("part", ["o", "lse"])
def test_nan_on_both_sides_fails(part):
    """K19: NaN equals nothing, itself included, unless the row is declared."""

    def spoil(o, lse):
        (o if part == "o" else lse)[2, 1] = NAN

    bad = broken(spoil)
    with pytest.raises(AssertionError, match=f"NaN in expected {part} at row 2, head 1"):
        assert_state_close(bad, bad)
    error = state_error(bad, bad)
    assert math.isnan(getattr(error, part))


def test_declared_nan_rows_must_be_nan():
    rows = torch.zeros(6, 2, dtype=torch.bool)
    rows[2, 1] = True

    def spoil(o, lse):
        o[2, 1], lse[2, 1] = NAN, NAN

    assert_state_close(broken(spoil), state(), nan_rows=rows)
    with pytest.raises(AssertionError, match="NaN expected, but actual is a number at row 2, head 1"):
        assert_state_close(state(), state(), nan_rows=rows)
    with pytest.raises(AssertionError, match="NaN in actual"):
        assert_state_close(broken(lambda o, lse: (spoil(o, lse), lse[0].fill_(NAN))), state(), nan_rows=rows)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"lse: shapes differ, \[6, 2\] against \[2, 6\]"):
        assert_state_close(state(), Reference(state().o, state().lse.t()))
    with pytest.raises(ValueError, match="o: shapes differ"):
        state_error(state(), Reference(state().o[:1], state().lse))


def test_bound_follows_the_plain_run():
    """An error of 1e-3 passes beside a plain error of 6e-4 and fails beside one of 4e-4; o and lse do not mix."""

    def off(by_o, by_lse):
        return broken(lambda o, lse: (o[1].add_(by_o), lse[1].add_(by_lse)))

    assert_state_close(off(1e-3, 1e-3), state(), plain=off(6e-4, 6e-4))
    with pytest.raises(AssertionError, match=r"o differs by 0.001 > 0.000.*2 x plain error 0.0004"):
        assert_state_close(off(1e-3, 1e-3), state(), plain=off(4e-4, 6e-4))
    with pytest.raises(AssertionError, match="lse differs"):
        assert_state_close(off(1e-3, 1e-3), state(), plain=off(6e-4, 4e-4))
    assert_state_close(off(1e-3, 0.0), state(), plain=off(4e-4, 0.0), factor=3.0)
    assert_state_close(off(1e-3, 0.0), state(), atol=2e-3)
    with pytest.raises(AssertionError, match="not finite"):
        assert_state_close(state(), state(), plain=off(NAN, 0.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_floor_admits_one_rounding_and_not_ten(dtype):
    expected = Reference(*(x.double() for x in state()))
    rounded = Reference(expected.o.to(dtype), expected.lse.to(torch.promote_types(dtype, torch.float32)))
    assert_state_close(rounded, expected)
    off = Reference(rounded.o * (1 + 100 * torch.finfo(dtype).eps), rounded.lse)
    if dtype != torch.float64:
        with pytest.raises(AssertionError, match="o differs"):
            assert_state_close(off, expected)
