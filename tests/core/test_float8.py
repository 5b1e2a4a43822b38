"""KV caches of float8 with a scale per KV head, against the oracle on what their elements stand for."""

from __future__ import annotations

import math

import pytest
import torch

from cascade_lab import attention, ledger
from cascade_lab.evidence.reference import assert_state_close
from tests.cases import assert_every_float8_is_exact, attention_case, check, every_float8, run, tree_mask
from tests.verify import CHAIN, FORK, check_levels, verify_case

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOAT8 = pytest.mark.parametrize("cache_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
ROWS, LENGTHS = [3, 1, 0, 6, 2], [5, 37, 9, 40, 2]
TREES = [[-1, 0, 0], [-1], [], [-1, 0, 1, 1, 0, 4], [-1, -1]]


def scales(device):
    return torch.tensor([0.3, 1.7], device=device), torch.tensor([2.5, 0.04], device=device)


@FLOAT8
@pytest.mark.parametrize(
    "dtype",
    [torch.float16, *(pytest.param(x, marks=pytest.mark.long) for x in (torch.float32, torch.bfloat16))],
    ids=str,
)
@pytest.mark.parametrize("rule", ["causal", "window, softcap", "tree"])
def test_float8_caches_match_the_oracle(backend, device, loads, rule, dtype, cache_dtype):
    """Per-head scales, several splits; what the page table does not name is NaN, as in every cache here."""
    options = {
        "causal": {"causal": True},
        "window, softcap": {"window_size": (3, 2), "softcap": 2.0, "softmax_scale": -0.4},
        "tree": {"tree_mask": tree_mask(TREES, device)},
    }[rule]
    k_scale, v_scale = scales(device)
    case = attention_case(
        ROWS, LENGTHS, dtype=dtype, cache_dtype=cache_dtype, device=device, k_scale=k_scale, v_scale=v_scale, **options
    )
    check(case, backend, loads, num_splits=2)


@pytest.mark.parametrize(("dim", "value_dim"), [(24, 8), (80, 40), (192, 128)])
def test_head_dims_of_float8_caches(backend, device, loads, dim, value_dim):
    case = attention_case(
        [2, 1],
        [9, 33],
        dim=dim,
        value_dim=value_dim,
        dtype=torch.float16,
        cache_dtype=E4M3,
        layout="heads first",
        device=device,
    )
    check(case.with_options(k_scale=0.5, v_scale=2.0), backend, loads)


@FLOAT8
def test_a_latent_cache_of_float8(backend, device, loads, cache_dtype):
    """Values are the first 128 columns of keys of 144, read once, and each has its scale."""
    case = attention_case(
        [2, 1], [9, 33], heads=(4, 1), dim=144, dtype=torch.float16, cache_dtype=cache_dtype, device=device
    )
    latent = case.k_cache[..., :128]
    case = case.with_options(k_scale=torch.tensor([0.3], device=device), v_scale=3.0)
    object.__setattr__(case, "v_cache", latent)
    check(case, backend, loads)


@FLOAT8
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_every_number_of_float8_is_read_exactly(backend, device, loads, cache_dtype):
    """K91 (tests/known_faults.md): of a row and a key for each of the 256 codes, lse is the score and o the value.

    NaN and the infinities of e5m2 arrive as such, each in a request of its own; subnormal numbers are not flushed.
    """
    case, numbers, finite = every_float8(cache_dtype, device=device)
    assert finite == (254 if cache_dtype == E4M3 else 248)
    state = run(case, backend, loads)
    assert_every_float8_is_exact(state, numbers, finite)


def test_a_number_an_unsized_tensor_and_a_tensor_are_one_scale(backend, device, loads):
    case = attention_case(ROWS, LENGTHS, cache_dtype=E4M3, device=device)
    expected, _ = check(case.with_options(k_scale=0.5, v_scale=3), backend, loads)
    for form in (torch.tensor, lambda x, device: torch.full((2,), x, device=device)):
        state = run(case, backend, loads, k_scale=form(0.5, device=device), v_scale=form(3.0, device=device))
        assert torch.equal(state.o, expected.o)
        assert torch.equal(state.lse, expected.lse)


def test_scales_hold_for_other_caches_too(backend, device, loads):
    """A scale of the keys is a softmax scale per KV head, one of the values a factor of o alone."""
    case = attention_case(ROWS, LENGTHS, device=device, causal=True, softcap=1.5)
    plain = run(case, backend, loads, softmax_scale=0.125)
    scaled = run(case, backend, loads, softmax_scale=0.25, k_scale=0.5, v_scale=4.0)
    assert_state_close((scaled.o / 4, scaled.lse), plain)
    check(case.with_options(**dict(zip(("k_scale", "v_scale"), scales(device), strict=True))), backend, loads)


@pytest.mark.parametrize("plan", ["naive", "cascade", "fused"])
def test_cascades_of_float8_caches_read_a_byte_an_element(backend, device, loads, plan):
    """Levels with pages of one token see the caches as views; reads are those of the ledger, in bytes of 1."""
    case = verify_case([6, 3, 0], [FORK, CHAIN, CHAIN], value_dim=24, cache_dtype=E4M3, device=device)
    levels = case.batch.levels(plan)
    k_scale, v_scale = scales(device)
    sinks = torch.tensor([6.0, -0.7, 1.0, 0.2], device=device)
    check_levels(case, levels, backend, loads, k_scale=k_scale, v_scale=v_scale, sinks=sinks, num_splits=1)
    predicted = ledger(levels, num_q_heads=4, num_kv_heads=2)
    assert predicted.kv_bytes(16, E4M3, 24) == predicted.kv_tokens * 2 * (16 + 24)
    if loads is not None:
        # a request's rows are one tile here
        assert predicted.tile_tokens(16) == predicted.kv_tokens
        assert loads["k_cache"].loaded_bytes + loads["v_cache"].loaded_bytes == predicted.kv_bytes(16, E4M3, 24)


def test_gradients_beside_scales():
    """gradcheck in float64 of q and caches under scales; and of q over caches of float8, which have none."""
    case = attention_case([3, 1, 2], [5, 4, 2], dtype=torch.float64, dim=4, causal=True, softcap=2.0)
    k_scale, v_scale = scales("cpu")

    def call(q, k, v):
        arguments = (case.page_table, case.cache_seqlens)
        return attention(
            q, k, v, *arguments, cu_seqlens_q=case.cu_seqlens_q, k_scale=k_scale, v_scale=v_scale, **case.options
        )

    inputs = [x.nan_to_num().requires_grad_() for x in (case.q, case.k_cache, case.v_cache)]
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    k, v = (x.detach().to(E5M2) for x in inputs[1:])
    assert torch.autograd.gradcheck(lambda q: call(q, k, v), inputs[:1], fast_mode=True)


def test_gradients_that_do_not_exist_are_refused():
    case = attention_case([2, 1], [5, 3], cache_dtype=E4M3)
    with pytest.raises(RuntimeError, match="k_scale: attention has no gradient of it"):
        run(case, "torch", k_scale=torch.ones(2, requires_grad=True))
    k = case.k_cache.requires_grad_()
    with pytest.raises(RuntimeError, match="k_cache: attention has no gradient of a cache in torch.float8_e4m3fn"):
        run(case, "torch")
    k.requires_grad_(False)


def test_wrong_float8_arguments_are_refused(backend, device):
    case = attention_case([2, 1], [5, 3], device=device)
    half = attention_case([2, 1], [5, 3], dtype=torch.float16, device=device)
    small = attention_case([2, 1], [5, 3], cache_dtype=E4M3, device=device)
    q, k, v, rest = small.q, small.k_cache, small.v_cache, (small.page_table, small.cache_seqlens)

    def refuse(error, message, *tensors, **options):
        with pytest.raises(error, match=message):
            attention(*tensors, *rest, cu_seqlens_q=small.cu_seqlens_q, backend=backend, **options)

    refuse(TypeError, "q: expected float32, .*given torch.float8_e4m3fn", q.to(E4M3), k, v)
    refuse(
        TypeError, "v_cache: expected dtype torch.float8_e4m3fn as k_cache, given torch.float8_e5m2", q, k, v.to(E5M2)
    )
    refuse(TypeError, "v_cache: expected dtype torch.float8_e4m3fn as k_cache, given torch.float32", q, k, case.v_cache)
    refuse(
        TypeError,
        "k_cache: expected dtype torch.float32 as q, or float8_e4m3fn or float8_e5m2, given torch.float16",
        q,
        half.k_cache,
        half.v_cache,
    )
    refuse(
        TypeError,
        "k_cache: expected float32, .*given torch.float8_e4m3fnuz",
        q,
        *(x.to(torch.float8_e4m3fnuz) for x in (k, v)),
    )
    for name in ("k_scale", "v_scale"):
        for error, message, value in (
            (TypeError, "expected a number, given 'a'", "a"),
            (ValueError, "expected a number > 0, given -1", -1.0),
            (ValueError, "expected a finite number in float32's normal range, given inf", math.inf),
            (TypeError, "expected float32, given torch.float64", torch.ones(2, dtype=torch.float64, device=device)),
            (ValueError, r"expected a number, \[\] or \[H_kv\] = \[2\], given \(4,\)", torch.ones(4, device=device)),
            (ValueError, r"expected finite numbers > 0, given \[1.0, 0.0\]", torch.tensor([1.0, 0.0], device=device)),
        ):
            refuse(error, f"{name}: {message}", q, k, v, **{name: value})
