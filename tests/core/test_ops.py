"""What a compiler sees: whole graphs with the results and gradients of plain calls, and operators that pass opcheck."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import cascade_lab
from cascade_lab import State, attention, cascade_attention, merge_state, merge_states, runtime
from cascade_lab.evidence.reference import assert_state_close
from cascade_lab.paging import split_kv_cache
from tests.cases import attention_case, int32, random, tree_mask
from tests.verify import CHAIN, FORK, verify_case

OPS = torch.ops.cascade_lab
SINKS = torch.tensor([0.5, -torch.inf, 3.0, -1.0])
SCALES = torch.tensor([0.5, 2.5]), torch.tensor([3.0, 0.25])
TREES = [[-1, 0, 0, 1, 2], [-1, 0, 1], [-1]]
CASES = {
    "causal": dict(causal=True),
    "softcap of strided caches": dict(softcap=3.0, layout="interleaved"),
    "half window": dict(window_size=(3, 1), dtype=torch.float16, layout="heads first"),
    "half in, float32 out": dict(dtype=torch.bfloat16, out_dtype=torch.float32, value_dim=24),
    "tree": dict(tree_mask=tree_mask(TREES), tail_seqlens=int32([5, 0, 3, 1])),
    "float64 tree with default tails": dict(tree_mask=tree_mask(TREES), dtype=torch.float64),
}

on_gpu = pytest.mark.skipif(not torch.cuda.is_available() or runtime.triton_mode() != "compiled", reason="needs a GPU")
needs_graphs = pytest.mark.skipif(
    "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ, reason="a CUDA graph needs the caching allocator"
)


@pytest.fixture(autouse=True)
def _forget_graphs():
    torch.compiler.reset()


@pytest.fixture(params=["torch", "triton"])
def kernels(request) -> str:
    """The backend under test. Named apart from `backend`, whose recorder of loads a compiler cannot trace."""
    if request.param == "triton" and runtime.triton_mode() != "interpreted":
        pytest.skip("Triton does not run on CPU tensors here")
    return request.param


def whole(function, compiler: str = "aot_eager", **options):
    return torch.compile(function, fullgraph=True, backend=compiler, **options)


def ragged(**options):
    """Four requests: one without rows, one of a single key, lengths on and off page edges."""
    return attention_case([5, 0, 3, 1], [12, 4, 7, 1], **options)


def call(case, q, k_cache, v_cache, **options) -> State:
    arguments = (case.page_table, case.cache_seqlens)
    return attention(q, k_cache, v_cache, *arguments, cu_seqlens_q=case.cu_seqlens_q, **case.options | options)


def states(T=5, S=3, H=3, D=8, dtype=torch.float32, lse_dtype=torch.float32) -> tuple[Tensor, Tensor]:
    """S states per row with every kind of empty side, o sliced from wider memory and lse transposed."""
    o = random(T, S, H, D + 3, seed=1, dtype=dtype)[..., :D]
    lse = random(H, S, T, seed=2, dtype=lse_dtype).transpose(0, 2)
    lse[0, 0], lse[1, 1], lse[2, :] = -torch.inf, torch.inf, -torch.inf
    return o, lse


def side_by_side(o: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    return o[:, 0], lse[:, 0], o[:, 1], lse[:, 1]


def leaves(*tensors: Tensor) -> list[Tensor]:
    """Leaves with the strides of the originals."""
    return [x.detach().requires_grad_() for x in tensors]


def with_gradients(function, *tensors: Tensor) -> tuple[Tensor, ...]:
    """o, lse and the gradients of a loss through both; -inf is left out of it."""
    inputs = leaves(*tensors)
    o, lse = function(*inputs)
    weight = random(*o.shape, seed=8).to(o.dtype)
    loss = (o * weight).sum().double() + lse.masked_fill(lse.isinf(), 0).double().cos().sum()
    return o.detach(), lse.detach(), *torch.autograd.grad(loss, inputs)


def assert_same(actual, expected, **tolerance) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, **tolerance or dict(rtol=0, atol=0))


def compiled_graph(function, *arguments) -> list[str]:
    """Names of this package's operators in the one graph that compiling `function` gives."""
    counter = CompileCounterWithBackend("aot_eager")
    torch.compile(function, fullgraph=True, backend=counter)(*arguments)
    (graph,) = counter.graphs
    targets = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
    return [target.split(".")[1] for target in targets if target.startswith("cascade_lab.")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_compiled_merges_equal_plain_ones(kernels, dtype):
    o, lse = states(dtype=dtype)

    def pair(*x):
        return merge_state(*x, backend=kernels)

    def many(*x):
        return merge_states(*x, backend=kernels, out_dtype=torch.float32)

    for function, inputs in ((pair, side_by_side(o, lse)), (many, (o, lse))):
        assert_same(with_gradients(whole(function), *inputs), with_gradients(function, *inputs))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static shapes", "dynamic shapes"])
def test_compiled_attention_equals_plain(name, dynamic):
    case = ragged(**CASES[name])

    def run(q, k_cache, v_cache):
        return call(case, q, k_cache, v_cache)

    inputs = (case.q, case.k_cache, case.v_cache)
    plain = with_gradients(run, *inputs)
    assert plain[2].abs().sum() > 0
    assert_same(with_gradients(whole(run, dynamic=dynamic), *inputs), plain)


@pytest.mark.parametrize("levels", [1, 2])
def test_compiled_sinks_and_scales_equal_plain_ones(levels):
    """One operator with the sinks' gradient, also over levels, where plain calls merge the sinks in by a step apart."""
    case = verify_case([6, 3, 0], [FORK, CHAIN, CHAIN], dtype=torch.float64)
    plan = case.batch.levels("cascade" if levels == 2 else "fused")
    assert len(plan) == levels
    scales = dict(zip(("k_scale", "v_scale"), SCALES, strict=True))

    def run(q, k_cache, v_cache, sinks):
        return cascade_attention(q, k_cache, v_cache, plan, sinks=sinks, **scales)

    inputs = (case.q, case.k_cache.nan_to_num(), case.v_cache.nan_to_num(), SINKS.double())
    plain = with_gradients(run, *inputs)
    assert plain[-1][[0, 2, 3]].abs().min() > 0
    assert plain[-1][1] == 0
    assert_same(with_gradients(whole(run), *inputs), plain, rtol=1e-10, atol=1e-12)
    assert compiled_graph(run, *inputs) == ["attention"]


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_compiled_float8_caches_equal_plain_ones(kernels, cache_dtype):
    case = ragged(causal=True, dtype=torch.float16, cache_dtype=cache_dtype)

    def run(q, k_cache, v_cache, k_scale, sinks):
        return call(case, q, k_cache, v_cache, k_scale=k_scale, v_scale=0.5, sinks=sinks, backend=kernels)

    inputs = (case.q, case.k_cache, case.v_cache, SCALES[0], SINKS)
    assert_same(whole(run)(*inputs), run(*inputs))


@pytest.mark.parametrize("name", [name for name in CASES if "float64" not in name])
def test_compiled_triton_attention_equals_plain(name):
    if runtime.triton_mode() != "interpreted":
        pytest.skip("Triton does not run on CPU tensors here")
    case = ragged(**CASES[name])

    def run(q, k_cache, v_cache):
        return call(case, q, k_cache, v_cache, backend="triton", num_splits=2)

    inputs = (case.q, case.k_cache, case.v_cache)
    assert_same(whole(run)(*inputs), run(*inputs))


@pytest.mark.parametrize("interleaved", [False, True], ids=["apart", "interleaved"])
@pytest.mark.parametrize("plan", ["naive", "cascade", "fused"])
def test_compiled_levels_equal_plain_ones(plan, interleaved):
    """With levels as an input of the graph, in all plans, and through views that step over gaps."""
    case = verify_case([6, 3, 0], [FORK, CHAIN, CHAIN], interleaved=interleaved, dtype=torch.float64)
    levels = case.batch.levels(plan)
    kv_cache = torch.stack((case.k_cache, case.v_cache), dim=1 if interleaved else 0)

    def run(q, kv_cache):
        k_cache, v_cache = split_kv_cache(kv_cache) if interleaved else kv_cache
        return cascade_attention(q, k_cache, v_cache, levels)

    plain = with_gradients(run, case.q, kv_cache)
    assert plain[3].abs().sum() > 0
    assert_same(with_gradients(whole(run), case.q, kv_cache), plain, rtol=0, atol=1e-13)
    assert_state_close(State(*plain[:2]), case.oracle())


def test_compiled_levels_mix_passes_with_and_without_a_mask(kernels):
    """A cascade of shared prefix (no mask), then the tree: lists of optional tensors with both kinds of entry."""
    case = verify_case([6, 3], [FORK, CHAIN])
    (fused,) = case.batch.levels("fused")
    levels = [replace(level, name="plain") for level in case.batch.levels("cascade")] + [
        replace(fused, cache_seqlens=fused.cache_seqlens * 0, tail_seqlens=fused.cache_seqlens * 0)
    ]
    assert {level.tree_mask is None for level in levels} == {True, False}

    def run(q, k_cache, v_cache):
        return cascade_attention(q, k_cache, v_cache, levels, backend=kernels)

    inputs = (case.q, case.k_cache, case.v_cache)
    if kernels == "triton":
        assert_same(whole(run)(*inputs), run(*inputs))
    else:
        actual, plain = with_gradients(whole(run), *inputs), with_gradients(run, *inputs)
        assert_same(actual, plain, rtol=1e-5, atol=1e-6)
    assert_state_close(State(*run(*inputs)), case.oracle(), plain=case.oracle(torch.float32))


def test_a_call_is_one_operator_in_the_graph(kernels):
    case = ragged()
    o, lse = states()
    verify = verify_case([6, 3], [FORK, CHAIN])
    levels = verify.batch.levels("cascade")

    def check_call(*x):
        return call(case, *x, backend=kernels)

    def check_cascade(*x):
        return cascade_attention(*x, levels, backend=kernels)

    def check_pair(*x):
        return merge_state(*x, backend=kernels)

    def check_many(*x):
        return merge_states(*x, backend=kernels)

    def check_out(*x):
        return merge_state(*x, out=torch.empty_like(x[0]), backend=kernels)

    assert compiled_graph(check_call, case.q, case.k_cache, case.v_cache) == ["attention"]
    assert compiled_graph(check_cascade, verify.q, verify.k_cache, verify.v_cache) == ["attention"]
    assert compiled_graph(check_pair, *side_by_side(o, lse)) == ["merge_state"]
    assert compiled_graph(check_many, o, lse) == ["merge_states"]
    assert compiled_graph(check_out, *side_by_side(o, lse)) == ["merge_state_out"]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_fuses_around_the_operators():
    """Neighbours are compiled, strides and all: a transposed projection in front, a weighting behind."""
    case = ragged(causal=True)
    weight = random(4, 16, seed=5)

    def run(q, k_cache, v_cache):
        state = call(case, torch.tanh(q.transpose(0, 1)).transpose(0, 1), k_cache, v_cache)
        again = merge_state(state.o * weight, state.lse, state.o, state.lse.t().contiguous().t() + 1)
        return again.o * 2, again.lse

    inputs = (case.q, case.k_cache, case.v_cache)
    actual, plain = with_gradients(whole(run, "inductor"), *inputs), with_gradients(run, *inputs)
    assert_same(actual, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("alias", ["apart", "o_a and lse_a", "o_b"])
@pytest.mark.parametrize("compiler", ["aot_eager", "eager"])
def test_compiled_merge_writes_into_out(kernels, alias, compiler):
    o, lse = states()
    expected = merge_state(*side_by_side(o, lse))
    inputs = [x.clone() for x in side_by_side(o, lse)]
    out, out_lse = {
        "apart": (torch.empty_like(inputs[0]), torch.empty_like(inputs[1])),
        "o_a and lse_a": (inputs[0], inputs[1]),
        "o_b": (inputs[2], None),
    }[alias]

    def run(*x, out, out_lse):
        return merge_state(*x, out=out, out_lse=out_lse, backend=kernels)

    merged = whole(run, compiler)(*inputs, out=out, out_lse=out_lse)
    assert merged.o is out
    assert out_lse is None or merged.lse is out_lse
    assert_same(merged, expected, rtol=1e-6, atol=1e-6)
    for given, before in zip(inputs, side_by_side(o, lse), strict=True):
        assert given is out or given is out_lse or torch.equal(given, before)


@pytest.mark.parametrize("compiler", ["aot_eager", "eager"])
def test_compiled_calls_count_reads(kernels, compiler):
    case = ragged(causal=True)
    verify = verify_case([6, 3], [FORK, CHAIN])
    levels = verify.batch.levels("cascade")

    def run(reads):
        call(case, case.q, case.k_cache, case.v_cache, reads=reads, backend=kernels)
        cascade_attention(verify.q, verify.k_cache, verify.v_cache, levels, reads=reads, backend=kernels)
        return reads * 2

    counted, plain = (torch.tensor([7, 9]) for _ in range(2))
    expected = run(plain)
    assert torch.equal(whole(run, compiler)(counted), expected)
    assert torch.equal(counted, plain)
    # every request with rows fits one tile, and the levels are read as the ledger says
    tokens = 12 + 7 + 1 + cascade_lab.ledger(levels, num_q_heads=4, num_kv_heads=2).kv_tokens
    assert plain.tolist() == [7 + tokens, 9 + tokens]


def test_compiled_attention_counts_reads_beside_gradients():
    case = ragged(causal=True)
    reads = torch.zeros(2, dtype=torch.int64)

    def run(q, k_cache, v_cache):
        return call(case, q, k_cache, v_cache, reads=reads)

    inputs = (case.q, case.k_cache, case.v_cache)
    plain = with_gradients(run, *inputs)
    once = reads.clone()
    assert_same(with_gradients(whole(run), *inputs), plain)
    assert torch.equal(reads, 2 * once)


@pytest.mark.parametrize("inside", [True, False])
def test_unchecked_calls_compile(inside):
    case = ragged()

    def run(q):
        if inside:
            with runtime.unchecked():
                return call(case, q, case.k_cache, case.v_cache, max_seqlen_q=5)
        return call(case, q, case.k_cache, case.v_cache, max_seqlen_q=5)

    expected = run(case.q)
    if inside:
        assert_same(whole(run)(case.q), expected)
    else:
        with runtime.unchecked():
            assert_same(whole(run)(case.q), expected)
    assert runtime.checks_enabled()


def test_graphs_serve_other_lengths_and_row_counts():
    """Lengths are read when the graph runs, so one graph serves any; rows are a shape, and shapes may vary too."""
    counter = CompileCounterWithBackend("aot_eager")
    case = ragged(causal=True)

    def run(q, cache_seqlens, cu_seqlens_q):
        arguments = (q, case.k_cache, case.v_cache, case.page_table, cache_seqlens)
        return attention(*arguments, cu_seqlens_q=cu_seqlens_q, causal=True)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    batches = [([12, 4, 7, 1], [0, 5, 5, 8, 8]), ([9, 2, 5, 0], [0, 2, 3, 6, 7]), ([3, 1, 7, 1], [0, 1, 2, 5, 6])]
    compiles = []
    for lengths, rows in batches:
        arguments = (case.q[: rows[-1]], int32(lengths), int32(rows))
        assert_same(compiled(*arguments), run(*arguments))
        compiles.append(counter.frame_count)
    assert compiles[0] == compiles[1] == compiles[2]


def test_exported_programs_hold_the_operators():
    case = ragged(causal=True)

    class Model(torch.nn.Module):
        def forward(self, q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q):
            arguments = (q, k_cache, v_cache, page_table, cache_seqlens)
            return tuple(attention(*arguments, cu_seqlens_q=cu_seqlens_q, causal=True))

    inputs = (case.q, case.k_cache, case.v_cache, case.page_table, case.cache_seqlens, case.cu_seqlens_q)
    program = torch.export.export(Model(), inputs)
    assert any(node.target is OPS.attention.default for node in program.graph.nodes)
    assert_same(program.module()(*inputs), Model()(*inputs))


def test_wrong_arguments_are_named_under_a_compiler():
    case = ragged()
    inputs = (case.q[:, :3], case.k_cache, case.v_cache)
    run = lambda *x: call(case, *x)  # noqa: E731
    expected = "q: expected H_q to be a positive multiple of H_kv = 2, given H_q = 3"
    with pytest.raises(ValueError, match=expected):
        torch.compile(run, backend="eager")(*inputs)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="positive multiple of H_kv"):
        whole(run)(*inputs)


@pytest.mark.parametrize("call_of", ["merge_state", "merge_states", "merge_state_out", "attention"])
def test_a_mode_that_cannot_run_is_refused_while_compiling(call_of, monkeypatch):
    monkeypatch.setattr(runtime, "triton_mode", lambda: "compiled")
    monkeypatch.setattr(runtime, "require_triton", lambda: None)
    operator, arguments = operator_call(call_of, "triton")
    with pytest.raises(RuntimeError, match="on cpu tensors runs in Triton's interpreter"):
        whole(operator)(*arguments)


@pytest.mark.parametrize("levels", [1, 2])
def test_triton_refuses_gradients_under_a_compiler_and_as_operator(levels):
    pytest.importorskip("triton")
    case = verify_case([6, 3], [FORK, CHAIN])
    plan = case.batch.levels("fused" if levels == 1 else "cascade")
    q = case.q.requires_grad_()
    assert len(plan) == levels

    def run(q):
        return cascade_attention(q, case.k_cache, case.v_cache, plan, backend="triton")

    with pytest.raises(RuntimeError, match="attention has no gradient on backend='triton'"):
        torch.compile(run, backend="eager")(q)
    operator, arguments = operator_call("attention" if levels == 1 else "attention over two passes", "triton")
    with pytest.raises(RuntimeError, match="attention has no gradient on backend='triton'"):
        operator(arguments[0].requires_grad_(), *arguments[1:])
    if runtime.triton_mode() == "interpreted":
        with torch.no_grad():
            assert_same(whole(run)(q), run(q))


def test_merges_have_second_derivatives_and_attention_has_one():
    o, lse = (x.double().requires_grad_() for x in (random(3, 2, 2, 4, seed=3), random(3, 2, 2, seed=4)))

    def pair(o, lse, merge=merge_state):
        return tuple(merge(*side_by_side(o, lse)))

    def operator(o, lse):
        return pair(o, lse, lambda *x: OPS.merge_state(*x, torch.float64, "torch"))

    for function in (pair, operator, merge_states, lambda o, lse: OPS.merge_states(o, lse, torch.float64, "torch")):
        assert torch.autograd.gradgradcheck(lambda *x, f=function: tuple(f(*x)), (o, lse))
    attend, arguments = operator_call("attention", "torch")
    q = arguments[0].requires_grad_()
    (gradient,) = torch.autograd.grad(attend(q, *arguments[1:])[0].pow(2).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def operator_call(name: str, backend: str, dtype=torch.float32, masked=True, reads=True):
    """An operator of this package with arguments that are ragged, strided and partly empty."""
    if name.startswith("merge"):
        o, lse = states(dtype=dtype)
        pair = side_by_side(o, lse)
        if name == "merge_state_out":
            return OPS.merge_state_out, (*pair, torch.empty(o[:, 0].shape, dtype=dtype), torch.empty(5, 3), backend)
        return getattr(OPS, name), (*(pair if name == "merge_state" else (o, lse)), torch.float32, backend)
    case = ragged(dtype=dtype, layout="interleaved")
    mask, tails = (tree_mask(TREES), int32([5, 0, 3, 1])) if masked else (None, None)
    tensors = (case.k_cache, case.v_cache, case.page_table, case.cache_seqlens, case.cu_seqlens_q)
    constants = (0.25, 2.0)
    if name == "attention_backward":
        o, lse = call(case, case.q, case.k_cache, case.v_cache, tree_mask=mask, tail_seqlens=tails)
        d_o, d_lse = random(*o.shape, seed=4, dtype=dtype).transpose(0, 1).contiguous().transpose(0, 1), lse.cos()
        inputs = (d_o, d_lse.nan_to_num(), o, lse, case.q, *tensors, mask, tails, *SCALES)
        return OPS.attention_backward, ([True, reads, True], *inputs, 2, -1, *constants)
    window = (-1, -1) if masked else (4, 0)
    options = (*constants, 2, dtype, reads, backend, *((SINKS, *SCALES) if "sinks" in name else (None, None, None)))
    passes = [(*tensors, 5, *window, mask, tails)]
    if "two passes" in name:
        # the second pass reads nothing in two requests, and has no mask
        passes.append((*tensors[:3], int32([2, 0, 3, 0]), tensors[4], 9, -1, -1, None, None))
    return OPS.attention, (case.q, *map(list, zip(*passes, strict=True)), *options)


each_dtype = pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.long)])


@each_dtype
@pytest.mark.parametrize(
    "name",
    [
        *("merge_state", "merge_states", "merge_state_out"),
        *("attention", "attention over two passes with sinks"),
    ],
)
def test_operators_pass_opcheck(kernels, name, dtype):
    operator, arguments = operator_call(name, kernels, dtype)
    torch.library.opcheck(operator, arguments)


@each_dtype
@pytest.mark.parametrize(
    "name",
    ["merge_state", "merge_states", "attention", "attention over two passes with sinks"],
)
def test_operators_pass_opcheck_with_gradients(name, dtype):
    for masked in (True, False) if "attention" in name else (True,):
        operator, arguments = operator_call(name, "torch", dtype, masked, reads=masked)

        def needed(x):
            if isinstance(x, list):
                return [needed(y) for y in x]
            if not isinstance(x, Tensor) or not x.is_floating_point() or any(x is scale for scale in SCALES):
                return x
            return x.detach().requires_grad_()

        torch.library.opcheck(operator, tuple(map(needed, arguments)))


@pytest.mark.parametrize("name", ["merge_state", "merge_states"])
def test_triton_merges_pass_opcheck_with_gradients(name):
    if runtime.triton_mode() != "interpreted":
        pytest.skip("Triton does not run on CPU tensors here")
    operator, arguments = operator_call(name, "triton")
    leafy = (x.detach().requires_grad_() if isinstance(x, Tensor) else x for x in arguments)
    torch.library.opcheck(operator, tuple(leafy))


@pytest.mark.parametrize("all_needed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_backward_operator_passes_opcheck(dtype, all_needed):
    operator, arguments = operator_call("attention_backward", "torch", dtype, reads=all_needed)
    torch.library.opcheck(operator, arguments)


@pytest.mark.gpu
@on_gpu
@needs_graphs
def test_calls_are_captured_in_a_cuda_graph():
    """Captured once, replayed on new queries, lengths and cache contents: no host synchronisation, no host values."""
    device = torch.device("cuda")
    case = ragged(causal=True, device=device, dtype=torch.float16, dim=64)
    case = replace(case, k_cache=case.k_cache.nan_to_num(), v_cache=case.v_cache.nan_to_num())
    verify = verify_case([40, 3], [FORK, CHAIN], device=device)
    levels = verify.batch.levels("cascade")
    assert all(level.page_table.device.type == "cuda" for level in levels)
    counted = torch.zeros(2, dtype=torch.int64, device=device)

    def run():
        with runtime.unchecked():
            state = call(case, case.q, case.k_cache, case.v_cache, max_seqlen_q=5, reads=counted)
            cascade = cascade_attention(verify.q, verify.k_cache, verify.v_cache, levels, reads=counted)
        merged = merge_state(*state, *state, out=torch.empty_like(state.o))
        many = merge_states(torch.stack((state.o, merged.o), 1), torch.stack((state.lse, merged.lse), 1))
        return (*state, *cascade, *merged, *many)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # kernels compile outside of the capture
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    case.q.copy_(case.q.flip(0))
    case.cache_seqlens.sub_(int32([3, 1, 2, 0], device))
    verify.q.mul_(0.5)
    before = counted.clone()
    graph.replay()
    added = counted - before
    expected = run()
    assert_same(captured, expected)
    assert_state_close(State(*captured[:2]), case.reference(), plain=case.reference(torch.float16))
    assert added.min() > 0
    assert torch.equal(counted, before + 2 * added)


@pytest.mark.gpu
@on_gpu
@needs_graphs
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_calls_compile_for_a_gpu(mode):
    case = ragged(causal=True, device="cuda", dtype=torch.float16, dim=64)

    def run(q):
        state = call(case, q.sin(), case.k_cache, case.v_cache, max_seqlen_q=5)
        return merge_state(*state, state.o * 2, state.lse - 1)

    compiled = torch.compile(run, fullgraph=True, mode=mode)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        merged = compiled(case.q)
        assert_same([x.clone() for x in merged], run(case.q), rtol=2e-3, atol=2e-3)
