"""Every notebook runs under other parameters than the committed ones, makes the same claims, and all of them stand.

What is committed of them depends on no machine, no library's wording and no timing of messages.
"""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cascade_lab.book import canonical, runner
from cascade_lab.book.execution import load
from cascade_lab.book.parameters import read_parameters
from cascade_lab.evidence.claims import gather
from tests.notebook_cases import code, shown_claim, write

CHECKOUT = Path(__file__).resolve().parents[2]
FOLDER = CHECKOUT / "notebooks"
# For each notebook, named sets of values; a set names only what it changes.
PARAMETER_SETS: dict[str, dict[str, dict[str, object]]] = {
    "01_lse_splitting": {
        "one kv head, odd head dim, single tokens as pages": {
            "seed": 1,
            "head_dim": 20,
            "num_q_heads": 3,
            "num_kv_heads": 1,
            "page_size": 1,
            "prefix_lengths": [1, 33],
            "draft_lengths": [3, 2],
            "splits": [1, 5],
        },
        "every head its own kv head, long pages": {
            "seed": 2,
            "head_dim": 96,
            "num_q_heads": 3,
            "num_kv_heads": 3,
            "page_size": 64,
            "prefix_lengths": [65, 1, 30],
            "draft_lengths": [1, 7, 2],
            "splits": [1, 11],
        },
    },
    "02_cascade_read_volume": {
        "one branch, no prefix, long pages": {
            "topk": 1,
            "counted_prefixes": [0, 33],
            "counted_steps": [1, 4],
            "page_size": 64,
            "num_q_heads": 8,
            "num_kv_heads": 1,
            "clock_mebibytes": 64,
        },
        "many branches, single tokens as pages": {
            "topk": 16,
            "counted_prefixes": [65, 7],
            "counted_steps": [7, 1],
            "page_size": 1,
            "head_dim": 64,
            "ragged_prefixes": [1, 0, 3, 70],
            "clock_branches": 2,
        },
    },
    "03_prefix_hit_area": {
        "one kv head, odd lengths, single tokens as pages": {
            "seed": 1,
            "n": 4097,
            "hit": 1001,
            "prompt_lengths": [17, 1],
            "hits": [3, 0],
            "page_size": 1,
            "num_q_heads": 3,
            "num_kv_heads": 1,
            "head_dim": 20,
            "timed_tokens": 8192,
        },
        "every head its own kv head, long pages, high hits": {
            "seed": 2,
            "n": 100000,
            "hit": 80000,
            "prompt_lengths": [64, 130, 33, 5],
            "hits": [63, 100, 32, 2],
            "page_size": 64,
            "num_q_heads": 2,
            "head_dim": 96,
            "flop_rate": 1e14,
            "fixed_ms": 200.0,
        },
    },
    "04_other_regions": {
        "two kv heads, single tokens as pages, narrow window": {
            "seed": 1,
            "brute_force_n": 300,
            "hit_ratio": 0.25,
            "kernel_lengths": [50, 9],
            "kernel_hits": [49, 0],
            "kernel_window": 7,
            "num_kv_heads": 2,
            "page_size": 1,
        },
        "three heads a group, long pages, a window wider than the prompts": {
            "seed": 2,
            "brute_force_n": 96,
            "hit_ratio": 0.875,
            "kernel_lengths": [130, 20, 1],
            "kernel_hits": [111, 1, 0],
            "kernel_window": 400,
            "num_q_heads": 6,
            "num_kv_heads": 2,
            "page_size": 64,
        },
    },
    "05_hit_ratio_on_traces": {
        "agentic traffic, a mixture of experts, other caches": {
            "seed": 1,
            "requests": 600,
            "traffic": "agentic",
            "model": "Qwen3-30B-A3B",
            "capacities": [50_000, 500_000, 5_000_000],
        },
        "a short trace with an id per whole block of 64": {
            "seed": 2,
            "requests": 500,
            "trace": "../tests/data/turns.jsonl",
            "block_size": 64,
            "model": "Llama-3.1-405B",
            "capacities": [512, 2048, 16384],
        },
        "a trace of given hits": {"requests": 700, "trace": "../tests/data/hits.csv"},
    },
    "06_across_ranks": {
        "two ranks, single tokens as pages, one kv head": {
            "seed": 1,
            "world_size": 2,
            "prefix_lengths": [0, 33],
            "topk": 1,
            "steps": 4,
            "page_size": 1,
            "num_q_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 20,
            "prompt_lengths": [1, 64],
            "model_heads": 32,
            "model_kv_heads": 32,
            "wire_ratio": 1.0,
        },
        "three ranks, long pages, every head its own kv head": {
            "seed": 2,
            "world_size": 3,
            "prefix_lengths": [65, 200, 1, 30],
            "topk": 2,
            "steps": 1,
            "page_size": 64,
            "num_q_heads": 3,
            "num_kv_heads": 3,
            "head_dim": 64,
            "prompt_lengths": [50, 0, 7, 2],
            "model_kv_heads": 1,
            "model_head_dim": 64,
        },
    },
}
PARAMETER_SETS["07_kernel_walk"] = {
    "wide rows in small tiles, single tokens as pages": {
        "seed": 1,
        "head_dim": 64,
        "key_block": 16,
        "query_rows": [1, 64],
        "key_lengths": [2, 200],
        "page_size": 1,
    },
    "many short requests in long pages": {
        "seed": 2,
        "head_dim": 32,
        "row_tile": 32,
        "key_block": 64,
        "query_rows": [5, 40, 1, 9],
        "key_lengths": [90, 150, 77, 66],
        "page_size": 128,
    },
}
PARAMETER_SETS["08_speculative_round"] = {
    "two wide branches of single drafts, no hit, single tokens as pages": {
        "seed": 3,
        "prompt_lengths": [5, 34, 2],
        "hits": [0, 33, 0],
        "topk": 2,
        "steps": 1,
        "new_tokens": 3,
        "page_size": 1,
        "layers": 3,
        "num_kv_heads": 1,
    },
    "long branches, every head its own kv head, long pages": {
        "seed": 4,
        "prompt_lengths": [40, 3],
        "hits": [1, 2],
        "topk": 4,
        "steps": 4,
        "new_tokens": 6,
        "page_size": 32,
        "num_q_heads": 2,
    },
}
# `make test` executes every notebook once, as it is committed, and these once more; the others are left to test-all.
QUICK = {
    "01_lse_splitting": "one kv head, odd head dim, single tokens as pages",
    "04_other_regions": "two kv heads, single tokens as pages, narrow window",
    "06_across_ranks": "two ranks, single tokens as pages, one kv head",
}
RUNS = [
    pytest.param(name, label, marks=[] if QUICK.get(name) == label else pytest.mark.long)
    for name, sets in PARAMETER_SETS.items()
    for label in sets
]


def test_every_notebook_has_sets_that_differ_from_its_defaults():
    paths = runner.select(FOLDER)
    assert sorted(PARAMETER_SETS) == [path.stem for path in paths]
    assert all(label in PARAMETER_SETS[name] for name, label in QUICK.items())
    for path in paths:
        defaults = {name: parameter.default for name, parameter in read_parameters(load(path)).items()}
        assert PARAMETER_SETS[path.stem]
        for label, values in PARAMETER_SETS[path.stem].items():
            assert values, label
            assert all(defaults[name] != value for name, value in values.items()), label


@pytest.mark.parametrize(("name", "label"), RUNS)
def test_claims_hold_under_other_parameters(name, label, tmp_path):
    status = runner.run([name], PARAMETER_SETS[name][label], folder=FOLDER, output=tmp_path)
    assert status == 0
    records = runner.read_claims(tmp_path)
    committed = gather(load(FOLDER / f"{name}.ipynb"))
    assert [record["id"] for record in records] == [claim.id for claim in committed]
    for record in records:
        elsewhere = ["not measured here"] if record["instrument"] in ("timed", "recorded") else []
        assert record["verdict"] in ["holds", *elsewhere], record


PATHS = sorted(FOLDER.glob("*.ipynb"))
# For each notebook, a value that it refuses, and what it says of it.
REFUSED = {
    "01_lse_splitting": ("head_dim", 257, "head_dim: expected from 1 to 256, given 257: lower it to 256 or less"),
    "02_cascade_read_volume": ("topk", 33, "topk: expected from 1 to 32, given 33: lower it to 32 or less"),
    "03_prefix_hit_area": ("hits", [40, 0, 133], r"hits: expected each less than .*: lower the largest"),
    "04_other_regions": ("hit_ratio", 0.0, "hit_ratio: expected from 0.1 to 0.9, given 0.0: raise it to 0.1 or more"),
    "05_hit_ratio_on_traces": ("model", "GPT", "model: expected one of .*, given 'GPT': choose one of these"),
    "06_across_ranks": ("num_q_heads", 6, "num_q_heads: expected a positive multiple of world_size = 4, given 6: 8 is"),
    "07_kernel_walk": ("row_tile", 24, "row_tile: expected a power of two, given 24: try 32"),
    "08_speculative_round": ("hits", [16, 13], "hits: expected each below its prompt length, given .*: lower the"),
}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_parameter_that_is_refused_is_named_with_what_it_takes_and_a_remedy(path):
    """Only imports, parameters and the cell that judges them are run."""
    name, value, said = REFUSED[path.stem]
    names, judged = {"__name__": "__main__"}, False
    for cell in code_cells(path):
        tree = ast.parse(cell.source)
        if all(
            isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body
        ) or "parameters" in cell.metadata.get("tags", []):
            exec(compile(tree, path.name, "exec"), names)
        elif re.search(r"^accept\(", cell.source, re.MULTILINE):
            assert name in names
            names[name] = value
            with pytest.raises(ValueError, match=f"^parameters: {said}"):
                exec(compile(tree, path.name, "exec"), names)
            judged = True
            break
    assert judged


def code_cells(path):
    return [cell for cell in load(path).cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_committed_notebooks_break_no_rule(path):
    """K72, K73, K82 (tests/known_faults.md): no stderr, no picture told by its size or address, an id of its own for
    every cell.
    """
    assert canonical.problems(path) == []
    ids = [cell["id"] for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    assert len(set(ids)) == len(ids) > 20
    pictures = 0
    for output in (output for cell in code_cells(path) for output in cell.outputs):
        assert output.get("name") != "stderr"
        if "image/png" in output.get("data", {}):
            pictures += 1
            assert output.data["text/plain"] == output.metadata["image/png"]["alt"]
    assert pictures >= 2


def plain(text, **data):
    return {"output_type": "display_data", "metadata": {}, "data": {"text/plain": text, **data}}


@pytest.mark.parametrize(
    ("added", "problem"),
    [
        (
            {"output_type": "stream", "name": "stderr", "text": "lib.py:3: DeprecationWarning: use new()"},
            "stderr output 'lib.py:3: DeprecationWarning: use new()'",
        ),
        (plain("[<matplotlib.lines.Line2D at 0x7f3a5c0e1d90>]"), "object address 'at 0x7f3a5c0e1d90'"),
        (
            plain("<Figure size 640x480 with 1 Axes>", **{"image/png": "aGk="}),
            "image/png output without alternative text",
        ),
        (None, "not in canonical form"),
        ("elsewhere", "not in canonical form"),
    ],
    ids=["warning of a dependency", "bare plotting call", "bare figure", "no id", "id twice"],
)
@pytest.mark.filterwarnings("ignore:Cell is missing an id", "ignore:Non-unique cell id")
def test_what_would_depend_on_libraries_is_refused(added, problem, tmp_path):
    """K72, K73, K82: a cell that warns, one that ends in a plotting call, one without an id of its own."""
    notebook = json.loads(PATHS[0].read_text(encoding="utf-8"))
    notebook["cells"][0]["id"] = "elsewhere"
    path = tmp_path / PATHS[0].name

    def problems():
        path.write_text(json.dumps(notebook, sort_keys=True, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return canonical.problems(path)

    assert problems() == []
    number, cell = next((i, c) for i, c in enumerate(notebook["cells"], 1) if i > 3 and c["cell_type"] == "code")
    if isinstance(added, dict):
        cell["outputs"].append(added)
        problem = f"cell {number}: {problem}"
    elif added is None:
        del cell["id"]
    else:
        cell["id"] = added
    assert any(each.startswith(problem) for each in problems())


def test_no_notebook_waits_for_long_output():
    """K81: a cell shows at most a screen or two, the table of claims a line for each, so that no message is late."""
    for path in PATHS:
        claims = len(gather(load(path)))
        for cell in code_cells(path):
            texts = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.outputs]
            most = claims + 2 if cell.source == "claims_table()" else 80
            assert sum(len(text.splitlines()) for text in texts) <= most


def nbval_options():
    """What the Makefile adds to `pytest notebooks`."""
    line = re.search(r"-m pytest notebooks (.*)$", (CHECKOUT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return shlex.split(line[1])


def nbval(folder, *options):
    command = [sys.executable, "-m", "pytest", str(folder), *options]
    return subprocess.run(command, cwd=folder.parent, capture_output=True, text=True)


@pytest.mark.long
def test_cells_of_a_notebook_stay_with_one_worker_without_being_told(tmp_path):
    """F28 of tests/known_faults.md, as in `pytest notebooks --nbval -n 2`: a cell needs those before it, which
    pytest-xdist alone would scatter."""
    for name in ("01_one", "02_two"):
        write(tmp_path / "notebooks", name, "n = 0", *(f"n += 1\nassert n == {i}" for i in range(1, 8)))
    options = ("--nbval", "--nbval-current-env", "-n", "2", "-p", "no:cacheprovider")
    scattered = nbval(tmp_path / "notebooks", *options)
    assert scattered.returncode == 1
    assert "NameError" in scattered.stdout
    shutil.copy(CHECKOUT / "conftest.py", tmp_path)
    together = nbval(tmp_path / "notebooks", *options)
    assert together.returncode == 0, together.stdout
    assert "18 passed" in together.stdout


def reordered(notebook, figures):
    notebook["cells"][3]["outputs"].reverse()


def redrawn(notebook, figures):
    (figures / "a.svg").write_text("<svg>2</svg>")


def only_here(notebook, figures):
    notebook["cells"][3]["source"] = notebook["cells"][3]["source"][:-1] + ["_ = os.environ['CASCADE_LAB_FIGURES']"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "noticed"),
    [(reordered, "check"), (redrawn, "check"), (only_here, "nbval")],
    ids=["outputs in another order", "another picture", "a notebook that needs this package's runner"],
)
def test_check_and_nbval_each_notice_what_the_other_cannot(change, noticed, tmp_path, monkeypatch):
    """`differences` sees order and files of pictures; nbval runs the cells without anything that the runner sets."""
    monkeypatch.delenv("CASCADE_LAB_FIGURES", raising=False)
    figures = tmp_path / "figures"
    draw = (
        "import os, pathlib\nfolder = os.environ.get('CASCADE_LAB_FIGURES')\n"
        "if folder:\n    pathlib.Path(folder).mkdir(exist_ok=True)\n"
        "    _ = pathlib.Path(folder, 'a.svg').write_text('<svg/>')"
    )
    path = write(
        tmp_path / "notebooks",
        "01_one",
        code(shown_claim("1.1"), "nbval-check-output"),
        f"{draw}\nprint('first')\ndisplay('second')\n_ = 0",
    )
    folders = {"folder": path.parent, "figures": figures}
    assert runner.refresh(**folders) == 0
    notebook = json.loads(path.read_text())
    change(notebook, figures)
    path.write_text(json.dumps(notebook, sort_keys=True, indent=1, ensure_ascii=False) + "\n")
    found = {"check": runner.check(**folders), "nbval": nbval(path.parent, *nbval_options()).returncode}
    assert found == {each: int(each == noticed) for each in found}


@pytest.mark.long
def test_a_comparison_that_collects_no_cell_fails(tmp_path):
    """K74: the command of `make test` on a folder without notebooks, and without its plugin, is no success."""
    options = nbval_options()
    assert "--nbval" in options
    assert any(option.startswith("--nbval-cell-timeout=") for option in options)
    for extra, status in (((), 5), (("-p", "no:nbval"), 4)):
        command = [sys.executable, "-m", "pytest", str(tmp_path), *options, *extra]
        assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == status


def test_notebooks_define_no_kernel_of_their_own_but_in_cells_that_say_so():
    """What a notebook launches is a kernel of the package, which the tests hold to its memory, or one that it shows
    whole, decorated for the mode at hand, and runs under the recorder.
    """
    for path in PATHS:
        cells = code_cells(path)
        kernels = [cell for cell in cells if re.search(r"\bjit\b", cell.source)]
        assert all("kernel" in cell.metadata.get("tags", []) for cell in kernels)
        assert not any("triton.jit" in cell.source for cell in cells)
        assert not kernels or any("record_loads" in cell.source for cell in cells)
