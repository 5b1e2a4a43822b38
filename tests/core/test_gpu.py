"""Kernels on the device at hand against the float64 oracle: compiled where there is a GPU, a small part interpreted.

On a machine with a GPU `pytest -m gpu tests` runs these checks and every test of the Triton backend, compiled. The load
recorder watches the interpreter alone; compiled kernels are held to their memory by NVIDIA's compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python -m pytest -m gpu tests

Without the caching allocator each tensor is an allocation of its own, so an access past its end is an error and not a
neighbour's memory. CUDA graphs need the allocator, and their tests are skipped then. Inside an allocation, as in the
gaps of a view or the slots after a length, nothing but the poison of `test_poison` shows a wrong access. The same line
with `--tool racecheck` looks for hazards in shared memory and with `--tool synccheck` for misused barriers; with
`--tool initcheck --kernel-regex kns=_attention_kernel` (then `kns=_merge_`) for reads of memory that was never written,
in these kernels and not in torch's.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from cascade_lab import DraftTree, State, VerifyBatch, runtime
from cascade_lab.bench.gpu.session import planned
from cascade_lab.evidence import checks
from tests import conftest
from tests.limits import HANGS_S

gpu = pytest.mark.gpu
on_gpu = pytest.mark.skipif(runtime.device().type != "cuda", reason="needs a GPU")
needs_graphs = pytest.mark.skipif(
    "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ, reason="a CUDA graph needs the caching allocator"
)
interpreted = pytest.mark.skipif(runtime.triton_mode() != "interpreted", reason="the compiled checks are the others")


@gpu
@on_gpu
@pytest.mark.parametrize("check", checks.checks(), ids=str)
def test_compiled_kernels_equal_the_oracle(check):
    checks.run_check(check)


@gpu
@on_gpu
@needs_graphs
@pytest.mark.parametrize("plan", ["naive", "cascade", "fused"])
def test_a_captured_plan_sees_new_queries_and_lengths(plan):
    device = runtime.device()
    batch = VerifyBatch((300, 40), [DraftTree.branches(4, 3), DraftTree.chain(5)], device=device)
    shape = (batch.num_pages, 16, 2, 64)
    k, v = (torch.randn(shape, device=device, dtype=torch.float16) for _ in range(2))
    q = torch.randn(batch.num_rows, 8, 64, device=device, dtype=torch.float16)
    levels = batch.levels(plan)
    call = planned(q, k, v, levels)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    q.normal_()
    graph.replay()
    torch.cuda.synchronize()
    replayed = State(captured.o.clone(), captured.lse.clone())
    fresh = call()
    assert torch.equal(replayed.o, fresh.o)
    assert torch.equal(replayed.lse, fresh.lse)


@pytest.mark.parametrize(("where", "marked"), [("cuda", [True, False, False, False]), ("cpu", [False] * 4)])
def test_tests_of_the_triton_backend_are_marked_where_kernels_are_compiled(monkeypatch, where, marked):
    monkeypatch.setattr(runtime, "device", lambda: torch.device(where))
    parameters = [{"backend": "triton"}, {"backend": "torch"}, {"kernels": "triton"}, None]
    names: list[list[str]] = [[] for _ in parameters]
    items = [SimpleNamespace(add_marker=lambda mark, own=own: own.append(mark.name)) for own in names]
    for item, values in zip(items, parameters, strict=True):
        if values is not None:
            item.callspec = SimpleNamespace(params=values)
    conftest.pytest_collection_modifyitems(items)
    assert names == [["gpu"] if each else [] for each in marked]


def test_the_checks_cover_every_head_dim_and_dtype():
    found = {(check.heads[:2], check.dtype) for check in checks.checks() if check.name == "plans"}
    dims = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (576, 512)]
    assert {(dim, dtype) for dim in dims for dtype in ("float16", "bfloat16")} <= found
    kinds = {"plans", "long keys", "large trees", "windows", "float8", "layouts", "merges"}
    assert {check.name for check in checks.checks()} == kinds
    assert {check.name for check in checks.checks(small=True)} == kinds
    single = [check for check in checks.checks() if check.dtype == "float32"]
    assert {check.name for check in single} == kinds
    assert {check.heads[:2] for check in single} == {(64, 64)}


@interpreted
@pytest.mark.parametrize(
    ("check", "kernel", "wrong"),
    [
        ("plans", "cascade_attention", lambda state: state._replace(lse=state.lse + 1e-3)),
        ("plans", "cascade_attention", lambda state: state._replace(o=state.o.roll(1, 0))),
        ("long keys", "cascade_attention", lambda state: state._replace(o=state.o * 1.01)),
        ("long keys", "attention", lambda state: state._replace(lse=state.lse - 1e-3)),
        ("windows", "attention", lambda state: state._replace(o=state.o * 1.01)),
        ("float8", "cascade_attention", lambda state: state._replace(lse=state.lse + 1e-2)),
        ("layouts", "attention", lambda state: state._replace(o=state.o.flip(1))),
        ("merges", "merge_states", lambda state: state._replace(lse=state.lse.nan_to_num(neginf=0.0))),
    ],
)
def test_a_check_finds_a_wrong_kernel(monkeypatch, check, kernel, wrong):
    right = getattr(checks, kernel)
    monkeypatch.setattr(checks, kernel, lambda *a, **k: wrong(right(*a, **k)))
    (chosen,) = (c for c in checks.checks(small=True) if c.name == check)
    ((_, problem),) = checks.run_all([chosen])
    assert problem.startswith("AssertionError")


@interpreted
def test_a_check_finds_a_wrong_read_counter(monkeypatch):
    right = checks.cascade_attention

    def reads_too_much(*arguments, reads, **options):
        state = right(*arguments, reads=reads, **options)
        reads += 1
        return state

    monkeypatch.setattr(checks, "cascade_attention", reads_too_much)
    (chosen,) = (c for c in checks.checks(small=True) if c.name == "plans")
    with pytest.raises(AssertionError, match="naive: counted"):
        checks.run_check(chosen)


@pytest.mark.long
@interpreted
def test_worker_processes_report_each_check():
    todo = [check for check in checks.checks(small=True) if check.name in ("merges", "layouts")]
    broken = checks.Check("no such check", "float32", (16, 16, 1, 1))
    found = dict(checks.run_all([*todo, broken], processes=2))
    assert [found[check] for check in todo] == [None, None]
    assert "KeyError" in found[broken]
    assert list(checks.run_all(todo, processes=2, deadline=0.0)) == []


@interpreted
def test_checks_that_the_time_does_not_suffice_for_are_not_reported(monkeypatch):
    now = iter([1.0, 2.0, 3.0])
    monkeypatch.setattr(checks.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(checks, "run_check", lambda check: None)
    todo = checks.checks(small=True)
    assert list(checks.run_all(todo, deadline=3.0)) == [(check, None) for check in todo[:2]]


@pytest.mark.long
def test_marked_tests_that_do_not_end_are_ended(tmp_path):
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_slow.py").write_text(
        f"import time, pytest\n\n@pytest.mark.gpu\ndef test_slow():\n    time.sleep({HANGS_S})\n"
    )
    with pytest.raises(TimeoutError, match="not ended within 0 s"):
        checks.run_marked_tests(folder, 0.0)


@pytest.mark.long
def test_tests_marked_for_a_gpu_are_run_and_a_failing_one_is_named(tmp_path):
    folder = tmp_path / "tests"
    folder.mkdir()
    assert checks.run_marked_tests(folder) is None
    marked = (
        "import pytest\n\n@pytest.mark.gpu\ndef test_marked():\n    assert {}\n\ndef test_other():\n    assert False\n"
    )
    (folder / "test_one.py").write_text(marked.format("1 == 1"))
    (folder / "test_plain.py").write_text("def test_plain():\n    assert False\n")
    assert checks.run_marked_tests(folder) is None
    (folder / "test_two.py").write_text(marked.format("1 == 2"))
    assert "test_two.py::test_marked" in checks.run_marked_tests(folder)
