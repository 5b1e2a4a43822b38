"""The interpreter switch, the choice of a backend, and imports in fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cascade_lab import runtime
from tests.cases import attention_case, int32, run
from tests.limits import HANGS_S

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
ATTEMPT = """
import torch
from cascade_lab import merge_state, runtime
print("mode", runtime.triton_mode(), runtime.device(), runtime.device_reason())
o, lse = torch.ones(3, 2, 8), torch.zeros(3, 2)
for backend in ("triton", "torch", "auto"):
    try:
        state = merge_state(o, lse, 3 * o, lse, backend=backend)
    except RuntimeError as error:
        print(backend, "RuntimeError:", str(error).replace(chr(10), " "))
    else:
        print(backend, state.o.unique().tolist(), round(state.lse.max().item(), 4), round(state.lse.min().item(), 4))
"""
RIGHT = "[2.0] 0.6931 0.6931"


def child(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run Python in a process that has no GPU and no TRITON_INTERPRET unless it is given."""
    inherited = {name: value for name, value in os.environ.items() if name != runtime.SWITCH}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = inherited | NO_GPU | {"PYTHONPATH": os.pathsep.join(paths)} | environment
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=HANGS_S)


def output_of(code: str, **environment: str) -> str:
    done = child("-c", code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def output_of_file(folder: Path, code: str, **environment: str) -> str:
    """As `output_of`, of a file, for kernels are made from source."""
    script = folder / "program.py"
    script.write_text(code)
    done = child(str(script), **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def attempt(first: str = "", **environment: str) -> dict[str, str]:
    """The mode and what each backend answered in a fresh process that ran `first` before the package came in."""
    lines = output_of(first + ATTEMPT, **environment).splitlines()
    return dict(line.split(" ", 1) for line in lines)


needs_triton = pytest.mark.skipif(runtime.triton_mode() == "absent", reason="Triton is not installed")


def test_import_brings_in_torch_and_numpy_only():
    """K43 (tests/known_faults.md): importing needs no GPU, and Triton, plotting and notebooks are not imported before
    they are used.
    """
    code = """
import sys, torch
before = set(sys.modules)
import cascade_lab
added = {name.split(".")[0] for name in set(sys.modules) - before}
heavy = {"triton", "matplotlib", "papermill", "nbformat", "nbclient", "nbconvert", "IPython", "pandas", "pytest"}
print(sorted(added & heavy))
print("cascade_lab.evidence" in sys.modules, torch.cuda.is_initialized())
"""
    assert output_of(code).split("\n")[:2] == ["[]", "False False"]


@needs_triton
def test_a_machine_without_gpu_interprets():
    """K42, K46: the switch is set before Triton comes in, beside a caller who keeps arrays under any name."""
    answers = attempt("import numpy as np\nn = np.arange(3); tl = np.ones(4); D = np.zeros(2)\n")
    assert answers == {"mode": "interpreted cpu no GPU found", "triton": RIGHT, "torch": RIGHT, "auto": RIGHT}


@needs_triton
@pytest.mark.parametrize("brought", ["", "import cascade_lab.evidence\n"])
def test_an_empty_target_asks_for_nothing(brought):
    answers = attempt(brought, CASCADE_LAB_TARGET="")
    assert answers == {"mode": "interpreted cpu no GPU found", "triton": RIGHT, "torch": RIGHT, "auto": RIGHT}


@needs_triton
def test_compiled_kernels_on_cpu_tensors_are_refused_with_a_way_out():
    """K43: no GPU, switch off by the user: the import works, kernels are refused clearly, torch serves."""
    answers = attempt(TRITON_INTERPRET="0")
    assert answers["mode"].startswith("compiled cpu")
    assert answers["triton"].startswith("RuntimeError: ")
    assert "TRITON_INTERPRET=1" in answers["triton"]
    assert (answers["torch"], answers["auto"]) == (RIGHT, RIGHT)


@needs_triton
@pytest.mark.parametrize("setting", [None, "0", "1"])
def test_triton_imported_first_is_right_or_refused(setting):
    """K42: the right answer, or a RuntimeError that names TRITON_INTERPRET; never a wrong number or a crash inside."""
    answers = attempt("import triton\n", **({} if setting is None else {"TRITON_INTERPRET": setting}))
    if setting == "0":
        assert answers["triton"].startswith("RuntimeError: ")
        assert "TRITON_INTERPRET" in answers["triton"]
    else:
        assert answers["triton"] == RIGHT
    assert (answers["torch"], answers["auto"]) == (RIGHT, RIGHT)


@needs_triton
@pytest.mark.parametrize("given", ["0", None])
def test_switch_set_after_the_import_is_noticed(given):
    """K42: a notebook that sets the variable in cell 2, after an import of Triton in cell 1."""
    code = "import triton, os\nos.environ['TRITON_INTERPRET'] = '1'\n"
    answers = attempt(code, **({} if given is None else {"TRITON_INTERPRET": given}))
    assert (answers["triton"], answers["torch"], answers["auto"]) == (RIGHT, RIGHT, RIGHT)


@needs_triton
@pytest.mark.parametrize(("first", "later"), [(None, "0"), ("1", "0")])
def test_a_switch_that_changes_after_the_first_kernel_is_refused(first, later):
    """K42: kernels have one mode in a process, and another value of the variable is an error that says so."""
    code = f"""
import torch, os
from cascade_lab import merge_state
o, lse = torch.ones(3, 2, 8), torch.zeros(3, 2)
merge_state(o, lse, o, lse, backend="triton")
os.environ["TRITON_INTERPRET"] = "{later}"
{ATTEMPT}
"""
    lines = output_of(code, **({} if first is None else {"TRITON_INTERPRET": first})).splitlines()
    answers = dict(line.split(" ", 1) for line in lines)
    assert answers["triton"].startswith("RuntimeError: kernels of this process are interpreted since their first use")
    assert "TRITON_INTERPRET" in answers["triton"]
    assert (answers["torch"], answers["auto"]) == (RIGHT, RIGHT)


OURS = """
import torch
from cascade_lab import Level, attention, merge_state, runtime
o, lse = torch.ones(3, 2, 8), torch.zeros(3, 2)
state = merge_state(o, lse, 3 * o, lse, backend="triton")
q, cache = torch.full((2, 1, 8), 0.5), torch.arange(5.0).view(5, 1, 1, 1).expand(5, 1, 1, 8).contiguous()
int32 = lambda *x: torch.tensor(x, dtype=torch.int32)
wide = attention(q, 0 * cache, cache, int32(0, 1, 2, 3, 4)[None], int32(5), cu_seqlens_q=int32(0, 2), causal=True,
                 backend="triton")
assert wide.o[:, 0, 0].tolist() == [1.5, 2.0], wide
assert state.o.unique().tolist() == [2.0] and runtime.triton_mode() == "interpreted"
"""
DEFINED = """
import triton
import triton.language as tl

@triton.jit
def add_one(x_ptr, n, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + lanes, mask=lanes < n, other=0.0)
    tl.store(x_ptr + lanes, x + tl.sum(tl.exp(x), 0) + tl.max(x, 0), mask=lanes < n)
"""
COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

source = ASTSource(fn=add_one, signature={"x_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}, constexprs={"BLOCK": 64})
print("user's kernel", type(add_one).__name__, ".visible .entry add_one" in triton.compile(
    source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""
CHILD = """
import os, subprocess, sys
print("here", os.environ.get("TRITON_INTERPRET"), triton.knobs.runtime.interpret)
code = "import os, torch; torch.cuda.device_count = lambda: 1; from cascade_lab import runtime; "
code += "print('child', os.environ.get('TRITON_INTERPRET'), runtime.triton_mode())"
subprocess.run([sys.executable, "-c", code], check=True)
"""


@needs_triton
@pytest.mark.parametrize(
    "order",
    [(OURS, DEFINED), (DEFINED, OURS), ("import cascade_lab\n", DEFINED, OURS)],
    ids=["after", "before", "between"],
)
def test_kernels_of_others_compile_and_children_choose_for_themselves(order, tmp_path):
    """In any order of imports and calls ours are interpreted, a user's `triton.jit` compiles, and so does a child that
    has a GPU: nothing is left in the environment, in Triton's switches or in its language."""
    program = "".join(order) + COMPILED + OURS + COMPILED + CHILD
    lines = output_of_file(tmp_path, program, TRITON_CACHE_DIR=str(tmp_path / "cache")).splitlines()
    compiled = "user's kernel JITFunction True"
    assert lines == [compiled, compiled, "here None False", "child None compiled"]


@needs_triton
def test_a_switch_of_the_user_holds_for_both(tmp_path):
    """TRITON_INTERPRET=1 interprets a user's kernels beside ours, before our launches and after them."""
    theirs = "\nx = torch.zeros(5)\nadd_one[(1,)](x, 5, BLOCK=8)\nprint(x.tolist())\n"
    program = DEFINED + "import torch\n" + theirs + OURS + theirs
    assert output_of_file(tmp_path, program, TRITON_INTERPRET="1").splitlines() == [str([8.0] * 5)] * 2


HIDDEN = {
    "blocked": "import sys\nsys.modules['triton'] = None\n",
    "not found": """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name=name)
sys.meta_path.insert(0, Hide())
""",
}


@pytest.mark.parametrize("way", HIDDEN)
def test_works_without_triton(way):
    """The torch backend serves, and asking for Triton says what is missing and what works."""
    answers = attempt(HIDDEN[way])
    assert answers["mode"].startswith("absent cpu")
    assert answers["triton"].startswith("RuntimeError: backend='triton' needs the triton package")
    assert "backend='torch'" in answers["triton"]
    assert (answers["torch"], answers["auto"]) == (RIGHT, RIGHT)


def test_unknown_backend_is_refused():
    with pytest.raises(ValueError, match=r"backend.*auto.*triton.*torch.*'cuda'"):
        runtime._pick_backend("cuda", torch.zeros(1))


def test_auto_is_torch_for_cpu_tensors():
    assert runtime._pick_backend("auto", torch.zeros(1)) == "torch"
    assert runtime._pick_backend("torch", torch.zeros(1)) == "torch"


def test_unchecked_holds_inside_and_ends_outside():
    """Value checks are off inside, also when nested; shape and dtype checks stay on; an error ends it too."""
    case = attention_case([1, 2], [3, 7])
    assert runtime.checks_enabled()
    with runtime.unchecked():
        assert not runtime.checks_enabled()
        with runtime.unchecked():
            assert not runtime.checks_enabled()
        assert not runtime.checks_enabled()
        run(case, "torch", max_seqlen_q=2)
        with pytest.raises(TypeError, match="cache_seqlens"):
            run(replace(case, cache_seqlens=case.cache_seqlens.long()), "torch")
    assert runtime.checks_enabled()
    with pytest.raises(ZeroDivisionError), runtime.unchecked():
        raise ZeroDivisionError
    assert runtime.checks_enabled()
    with pytest.raises(ValueError, match="cache_seqlens"):
        run(replace(case, cache_seqlens=int32([3, -7])), "torch")


def test_provenance_is_plain_text():
    record = runtime.provenance()
    assert {"python", "torch", "triton", "numpy", "system", "device", "triton mode"} <= set(record)
    assert all(type(value) is str and value for value in record.values())
    assert record["torch"] == torch.__version__.split("+")[0] or record["torch"] == torch.__version__
    assert not any(str(ROOT) in value for value in record.values())


OWN_KERNEL = """
import os
import torch
import triton.language as tl
import cascade_lab.evidence
from cascade_lab import runtime

@runtime.jit
def twice(x):
    return 2 * x

@runtime.jit
def row_sums(x_ptr, sum_ptr, n, B: tl.constexpr):
    i, j = tl.program_id(0), tl.arange(0, B)
    tl.store(sum_ptr + i, tl.sum(twice(tl.load(x_ptr + i * n + j, mask=j < n, other=0.0)), 0))

x, sums = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]), torch.zeros(2)
row_sums[(2,)](x, sums, 3, B=4)
print(runtime.triton_mode(), sums.tolist(), os.environ.get("TRITON_INTERPRET"))
"""


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "interpreted [14.0, 112.0] None"),
        ({"CASCADE_LAB_TARGET": "sm_90"}, "executed [14.0, 112.0] None"),
    ],
)
def test_a_kernel_of_ones_own_runs_as_those_of_the_package_do(environment, said, tmp_path):
    pytest.importorskip("triton")
    (tmp_path / "own.py").write_text(OWN_KERNEL)
    done = child(str(tmp_path / "own.py"), **environment)
    assert done.stdout.strip() == said, done.stderr


def test_a_kernel_of_ones_own_needs_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(RuntimeError, match="needs the triton package"):
        runtime.jit(lambda x_ptr: None)
