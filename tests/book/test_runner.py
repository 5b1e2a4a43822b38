"""The runner believes a notebook when every cell ran and every claim stands (K71 to K86, tests/known_faults.md)."""

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import papermill
import pytest
from nbformat.v4 import new_output
from nbformat.v4.rwbase import split_lines

from cascade_lab.book import canonical, runner
from cascade_lab.book.execution import load
from cascade_lab.book.parameters import NotebookError, bind, read_parameters
from cascade_lab.book.refusals import check_runnable
from cascade_lab.evidence.claims import MIME
from cascade_lab.files import UsageError
from tests.limits import HANGS_S
from tests.notebook_cases import FIELDS, PARAMETERS, code, shown_claim, write

CLAIM = "from cascade_lab.evidence.claims import claim\n"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "notebooks"


@pytest.fixture
def output(tmp_path):
    return tmp_path / "build"


def left_behind(output):
    return [path.name for path in output.rglob(".*")]


def test_a_good_run_publishes_page_notebook_and_claims(tmp_path, monkeypatch, capsys):
    """K77, K79, K86: typed parameters, this interpreter whatever is installed, sources and caller untouched."""
    folder, output = tmp_path / "a {name} here" / "notebooks", tmp_path / "out {put}"
    path = write(
        folder,
        "01_good",
        "import os, sys, pathlib\nprint(pathlib.Path.cwd().name, rows, scale, names, flush=True)",
        CLAIM + f"claim('1.1', 'this interpreter', measured=sys.executable == {sys.executable!r}, expected=True)",
        CLAIM + "claim('1.2', 'rows arrive', measured=rows, expected=5)\n"
        "claim('1.3', 'small', measured=1e-9, expected=0, tol=1e-6)",
        "from IPython.display import display\nimport base64\n"
        "pixel = base64.b64encode(b'not shown').decode()\n"
        "about = {'alt': 'Two <bars> \"side\" by side', 'figure': 'bars'}\n"
        "display({'image/png': pixel}, raw=True, metadata={'image/png': about})\n"
        "figures = pathlib.Path(os.environ['CASCADE_LAB_FIGURES'])\nfigures.mkdir()\n"
        "_ = (figures / 'bars.svg').write_text('<svg/>')",
        metadata={"kernelspec": {"name": "dev-env", "display_name": "dev"}},
    )
    spec = tmp_path / "jupyter" / "kernels" / "python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text('{"argv": ["false"], "display_name": "bogus", "language": "python"}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    before = path.read_bytes()

    status = runner.run(["01"], {"rows": "5", "scale": "2", "names": "['x', 'y']"}, folder=folder, output=output)

    shown = capsys.readouterr()
    assert (status, shown.err) == (0, "")
    assert re.search(r"^1\.2 +rows arrive +oracle +5 +5 +holds$", shown.out, re.MULTILINE)
    assert path.read_bytes() == before
    assert list((tmp_path / "elsewhere").iterdir()) == list(folder.glob("*.[!i]*")) == []
    executed = nbformat.read(output / "01_good.ipynb", as_version=4)
    assert executed.cells[3].outputs[0].text == "notebooks 5 2.0 ['x', 'y']\n"
    assert executed.metadata.kernelspec.name == "python3"
    text = (output / "01_good.ipynb").read_text()
    assert "papermill" not in text.replace("injected-parameters", "")
    assert str(tmp_path) not in text
    page = (output / "01_good.html").read_text()
    assert 'alt="Two &lt;bars&gt; &quot;side&quot; by side"' in page or "alt='Two &lt;bars&gt;" in page
    assert (output / "figures" / "bars.svg").read_text() == "<svg/>"
    assert f"data:image/svg+xml;base64,{base64.b64encode(b'<svg/>').decode()}" in page
    assert "data:image/png" not in page
    records = json.loads((output / "claims.json").read_text())
    assert [record["id"] for record in records] == ["1.1", "1.2", "1.3"]
    assert records[2] == {
        "id": "1.3",
        "notebook": "01_good",
        "statement": "small",
        "instrument": "oracle",
        "expected": "0 ± 1e-6",
        "measured": 1e-9,
        "verdict": "holds",
    }
    assert left_behind(output) == []


FAILURES = {
    "exception": ("1 / 0", "ZeroDivisionError: division by zero"),
    "bare assertion": ("assert False", "AssertionError \\(output kept"),
    "claim": (CLAIM + "claim('9.1', 'sum', measured=3, expected=4)", r"AssertionError: claim 9\.1 fails: sum: .*3.*4"),
    "swallowed claim": (
        CLAIM + "try:\n    claim('9.1', 'sum', measured=3, expected=4)\nexcept AssertionError:\n    pass",
        r"claim 9\.1 fails: sum",
    ),
    "repeated id": (
        f"{shown_claim('9.1')}\n{shown_claim('9.1')}",
        r"'9\.1' is used twice",
    ),
    "system exit": ("import sys\nsys.exit(0)", "SystemExit"),
    "unknown magic": ("%nosuch", "UsageError: Line magic function `%nosuch` not found"),
    "unknown cell magic": ("%%nosuch\n1", "UsageError: Cell magic `%%nosuch` not found"),
    "bash": ("%%bash\nfalse", "CalledProcessError"),
    "dead kernel": ("import os\nos._exit(0)", r"DeadKernelError"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failing_cell_fails_the_run_and_is_kept_apart(kind, folder, output, capsys):
    """K80: one message with notebook, cell and cause; nothing of it is taken for a result."""
    source, cause = FAILURES[kind]
    write(folder, "01_bad", code(source))
    output.mkdir()
    for name in ("01_bad.ipynb", "01_bad.html"):
        (output / name).write_text("the last good one")
    old = {"id": "9.0", "notebook": "01_bad", "statement": "s", "instrument": "oracle", "expected": 1, "measured": 1}
    other = old | {"notebook": "02_other"}
    (output / "claims.json").write_text(json.dumps([each | {"verdict": "holds"} for each in (old, other)]))

    assert runner.run(["01_bad"], folder=folder, output=output) == 1

    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert re.match(rf"01_bad\.ipynb, cell 3: .*{cause}", message)
    assert [(output / n).read_text() for n in ("01_bad.ipynb", "01_bad.html")] == ["the last good one"] * 2
    assert (output / "failed" / "01_bad.ipynb").exists()
    records = json.loads((output / "claims.json").read_text())
    assert [r["verdict"] for r in records if r["notebook"] == "01_bad"] == ["fails"] * ("claim" in kind)
    assert [r["verdict"] for r in records if r["notebook"] == "02_other"] == ["holds"]
    assert left_behind(output) == []


def test_the_others_run_when_one_fails_and_a_later_success_clears_the_failure(folder, output, capsys):
    write(folder, "01_bad", "x = rows / 0", shown_claim("1.1"))
    write(folder, "02_good", shown_claim("2.1"))
    assert runner.run(folder=folder, output=output) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("01_bad.ipynb, cell 3: ZeroDivisionError")
    assert "2.1" in shown.out
    assert not (output / "01_bad.ipynb").exists()
    write(folder, "01_bad", shown_claim("1.1"))
    assert runner.run(["01"], folder=folder, output=output) == 0
    assert not (output / "failed" / "01_bad.ipynb").exists()
    assert [r["notebook"] for r in runner.read_claims(output)] == ["01_bad", "02_good"]


def test_a_notebook_without_claims_is_published_and_a_line_says_so(folder, output, capsys):
    """F13 of tests/known_faults.md."""
    write(folder, "01_none", "x = rows")
    assert runner.run(folder=folder, output=output) == 0
    shown = capsys.readouterr()
    assert "01_none.ipynb: executed, makes no claim\n" in shown.out
    assert shown.err == ""
    assert sorted(path.name for path in output.iterdir()) == ["01_none.html", "01_none.ipynb", "claims.json"]
    assert runner.read_claims(output) == []


def test_a_claim_that_this_machine_cannot_make_is_listed_as_such(folder, output, capsys):
    """F21 of tests/known_faults.md: only one of two claims that the committed notebook shows is made here."""
    earlier = new_output("display_data", data={MIME: {"id": "1.2", **FIELDS}})
    write(folder, "01_gpu", shown_claim("1.1"), code("x = 1", outputs=[earlier]), shown_claim("1.3"))
    assert runner.run(folder=folder, output=output) == 0
    verdicts = {record["id"]: (record["verdict"], record["measured"]) for record in runner.read_claims(output)}
    assert list(verdicts) == ["1.2", "1.1", "1.3"]
    assert verdicts["1.2"] == ("not measured here", None)
    assert {verdicts[id][0] for id in ("1.1", "1.3")} == {"holds"}
    assert "not measured here" in capsys.readouterr().out
    assert runner.run(parameters={"rows": 4}, folder=folder, output=output) == 0
    assert [record["id"] for record in runner.read_claims(output)] == ["1.1", "1.3"]


def test_a_kernel_that_does_not_start_is_a_failure_of_the_notebook(folder, output, monkeypatch, capsys):
    write(folder, "01_good", shown_claim("1.1"))
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    assert runner.run(folder=folder, output=output) == 1
    assert re.match(r"01_good\.ipynb: RuntimeError: Kernel died before replying", capsys.readouterr().err)
    assert left_behind(output) == []


@pytest.mark.parametrize(("terminal", "ci", "shown"), [(True, "", True), (True, "true", False), (False, "", False)])
def test_a_progress_bar_is_for_terminals_outside_ci(terminal, ci, shown, folder, output, monkeypatch):
    """K85: nothing that moves in a log."""
    given = []
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setattr(
        papermill, "execute_notebook", lambda *_, progress_bar, **__: given.append(progress_bar) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        runner.run([write(folder, "01_good", "x = 1").name], folder=folder, output=output)
    assert given == [{"desc": "01_good"} if shown else False]


def test_an_interrupt_leaves_no_kernel_behind(folder, output):
    """As from a shell, with the package imported by its own command."""
    write(
        folder,
        "01_slow",
        "import os, time, pathlib\n_ = pathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(60)",
    )
    command = [sys.executable, "-m", "cascade_lab", "run", "--notebooks", str(folder), "--output", str(output)]
    checkout = Path(runner.__file__).parents[2]
    child = subprocess.Popen(
        command,
        cwd=checkout,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
        # it is inherited, and ignored behind an ampersand
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    pid = folder / "pid"
    deadline = time.monotonic() + HANGS_S
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    kernel = int(pid.read_text())
    os.killpg(child.pid, signal.SIGINT)
    _, errors = child.communicate(timeout=HANGS_S)
    assert (child.returncode, errors) == (130, "interrupted\n")
    with pytest.raises(ProcessLookupError):
        os.kill(kernel, 0)
    assert not (output / "01_slow.ipynb").exists()
    assert left_behind(output) == []


def test_refresh_is_idempotent_and_check_notices_every_staleness(folder, tmp_path, capfd, monkeypatch):
    """K71, K84, K86: split prints merge, ignored cells may differ, the file keeps its bytes. One line says so."""
    figures = tmp_path / "figures"
    monkeypatch.setenv("CASCADE_LAB_TARGET", "sm_90")
    path = write(
        folder,
        "01_good",
        "import os, pathlib, time\nfor i in range(3):\n    print(i, flush=True)\n    time.sleep(0.05)",
        code("time.time_ns()", "nbval-ignore-output"),
        code(
            "names = 'TRITON_INTERPRET', 'CASCADE_LAB_TARGET', 'CUDA_VISIBLE_DEVICES'\n"
            "print(*(repr(os.environ[name]) for name in names))"
        ),
        code(shown_claim("1.1"), "nbval-check-output"),
        "folder = pathlib.Path(os.environ['CASCADE_LAB_FIGURES'])\nfolder.mkdir(exist_ok=True)\n"
        "_ = (folder / 'a.svg').write_text('<svg>1</svg>')",
    )
    assert runner.check(folder=folder, figures=figures) == 1
    assert "was never run" in capfd.readouterr().err
    assert runner.refresh(folder=folder, figures=figures) == 0
    assert capfd.readouterr() == ("refreshed 01_good.ipynb, a.svg\n", "")
    first = path.read_bytes()
    assert load(path).cells[2].outputs == [new_output("stream", name="stdout", text="0\n1\n2\n")]
    assert load(path).cells[4].outputs[0].text == "'1' '' ''\n"
    assert MIME in load(path).cells[5].outputs[0].data
    assert MIME not in load(path).cells[5].outputs[0].metadata
    (figures / "a.svg").unlink()
    assert runner.refresh(folder=folder, figures=figures) == 0
    assert path.read_bytes() == first
    assert runner.check(folder=folder, figures=figures) == 0
    said = ["refreshed a.svg", "canonical and fresh 01_good.ipynb, a.svg"]
    assert capfd.readouterr() == ("".join(f"{line}\n" for line in said), "")

    path.write_bytes(first.replace(b'"1\\n"', b'"7\\n"'))
    (figures / "a.svg").write_text("<svg>2</svg>")
    assert runner.check(folder=folder, figures=figures) == 1
    told, errors = capfd.readouterr()
    assert told == ""
    assert "01_good.ipynb, cell 3: output differs from a fresh run: stdout: '7' committed, '1' now" in errors
    assert "figures/a.svg is not what a fresh run draws" in errors


def executed_as_it_is(monkeypatch):
    """No kernel: a run leaves a notebook as it was."""
    monkeypatch.setattr(runner, "execute", lambda notebook, *_, **__: notebook)


def good_notebook(folder, name="01_good"):
    """A committed notebook in canonical form, with a claim and a picture."""
    return committed(folder, *good_cells(), name=name)


@pytest.mark.parametrize(("command", "forms"), [("run", 1), ("refresh", 2), ("check", 2)])
def test_a_notebook_is_read_once_and_takes_its_form_once_before_and_once_after(command, forms, folder, monkeypatch):
    """A run has the executed notebook alone; refresh and check have the committed one beside it."""
    good_notebook(folder)
    executed_as_it_is(monkeypatch)
    read, formed = [], []
    reads, canonical_form = nbformat.reader.reads, canonical.canonical
    monkeypatch.setattr(nbformat.reader, "reads", lambda text: read.append(text) or reads(text))
    monkeypatch.setattr(
        canonical, "canonical", lambda notebook, **options: formed.append(1) or canonical_form(notebook, **options)
    )
    place = {"output": folder.parent / "build"} if command == "run" else {"figures": folder.parent / "figures"}
    assert getattr(runner, command)(folder=folder, **place) == 0
    assert (len(read), len(formed)) == (1, forms)


def test_refresh_and_check_say_one_line_for_each_notebook(folder, monkeypatch, capsys):
    """F23 of tests/known_faults.md."""
    figures = folder.parent / "figures"
    good_notebook(folder)
    with good_notebook(folder, "02_other").open("a") as file:
        file.write("\n")
    executed_as_it_is(monkeypatch)
    assert runner.refresh(folder=folder, figures=figures) == 0
    assert capsys.readouterr().out == "unchanged 01_good.ipynb\nrefreshed 02_other.ipynb\n"
    assert runner.check(folder=folder, figures=figures, execute_notebooks=False) == 0
    assert capsys.readouterr().out == "canonical 01_good.ipynb\ncanonical 02_other.ipynb\n"
    assert runner.check(folder=folder, figures=figures) == 0
    assert capsys.readouterr().out == "canonical and fresh 01_good.ipynb\ncanonical and fresh 02_other.ipynb\n"


def test_a_check_goes_on_when_the_reader_of_its_lines_has_left(folder, monkeypatch, capsys):
    """As in `cascade-lab check | head -0`: the fault of the last notebook still decides the status."""
    for name in ("01_good", "02_good"):
        good_notebook(folder, name)
    executed_as_it_is(monkeypatch)
    answers = iter(([], ["changed in 02"]))
    monkeypatch.setattr(canonical, "differences", lambda old, new: next(answers))

    class Closed:
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    assert runner.check(folder=folder, figures=folder.parent / "figures") == 1
    assert capsys.readouterr().err == "02_good.ipynb, changed in 02\n"


def test_a_failing_refresh_changes_nothing(folder, tmp_path, capsys):
    good = write(folder, "01_good", shown_claim("1.1"))
    bad = write(folder, "02_bad", "import nosuch_module")
    before = good.read_bytes(), bad.read_bytes()
    assert runner.refresh(folder=folder, figures=tmp_path / "figures") == 1
    assert (good.read_bytes(), bad.read_bytes()) == before
    assert "02_bad.ipynb, cell 3: ModuleNotFoundError: No module named 'nosuch_module'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cell", "cause"),
    [
        (code("1", "nbval-skip"), "tag 'nbval-skip'"),
        (code("1", "skip-execution"), "tag 'skip-execution'"),
        (code("1 / 0", "raises-exception"), "tag 'raises-exception'"),
        (code("# NBVAL_SKIP\n1"), "NBVAL_SKIP"),
        (code("!false"), "%%bash"),
        (code("files = !ls"), "%%bash"),
        (code("if True:\n    !false"), "%%bash"),
        (code("%sx false"), "%%bash"),
        (code("%system false"), "%%bash"),
        (code("%%bash --bg\nfalse"), "%%bash"),
        (code("%%bash --no-raise-error\nfalse"), "%%bash"),
        (code("exit"), "leave the kernel"),
        (code("if True:\n    quit()"), "leave the kernel"),
    ],
)
def test_cells_whose_failure_would_be_hidden_are_refused(cell, cause, folder):
    with pytest.raises(NotebookError, match=rf"^cell 3: .*{cause}"):
        check_runnable(load(write(folder, "01_hidden", cell)))


def test_ordinary_cells_are_not_refused(folder):
    cells = ["%%bash\nexit 0", "text = '''\nexit status\n'''", "exit = 1", "%matplotlib inline", "x = 3 != 4", "?print"]
    check_runnable(load(write(folder, "01_plain", *cells)))


@pytest.mark.parametrize(
    ("parameters", "cause"),
    [
        (None, "exactly one cell tagged 'parameters', found 0"),
        ("n = 3 + 4", "not a literal"),
        ("n = max(1, 2)", "not a literal"),
        ("n = 1\ntwice = n * 2", "not a literal"),
        ("import os", "only `name = literal`"),
        ("a = b = 1", "only `name = literal`"),
        ("n: int", "only `name = literal`"),
        ("n += 1", "only `name = literal`"),
        ("n = 1\nn = 2", "'n' twice"),
        ("n: int = 1.5", "not of type int"),
        ("n: int = True", "not of type int"),
        ("n: int = '4'", "not of type int"),
        ("n: bool = 1", "not of type bool"),
        ("n: list[int] = [1, 'a']", r"not of type list\[int\]"),
        ("n: complex = 1", "unknown type 'complex'"),
        ("n = None", "type annotation"),
        ("n = []", "type annotation"),
        ("n = {}", "type annotation"),
        ("n = (1, 2)", "kind that cannot be a parameter"),
        ("n = [(1, 2)]", "kind that cannot be a parameter"),
        ("n = {'a': b'x'}", "kind that cannot be a parameter"),
        ("n: dict[str] = {}", "unknown type"),
        ("n: set[int] = []", "unknown type"),
        ("n: dict[str, int] = {'a': 'b'}", r"not of type dict\[str, int\]"),
        ("n: dict = {'a': 1e999}", "not of type dict"),
        ("n: list = [1j]", "not of type list"),
        ("n = f'{1}'", "not a literal"),
        ("%load_ext x", "not plain Python"),
    ],
)
def test_a_parameters_cell_holds_literals_only(parameters, cause, folder):
    with pytest.raises(NotebookError, match=cause):
        read_parameters(load(write(folder, "01", "x = 1", parameters=parameters)))


def test_two_parameters_cells_are_refused(folder):
    with pytest.raises(NotebookError, match="cell 3: expected exactly one cell tagged 'parameters', found 2"):
        read_parameters(load(write(folder, "01", code("m = 1", "parameters"))))


KINDS = "n: int = 1\nx: float = 1\nb = False\ns = 'a'\nl: list[float] = []\no: int | None = None\nt: 'str | None' = 'a'"
KINDS += "\nd = {'a': 1}\nll = [[1, 2], [3]]\nm = {'a': [1, 2.5], 'b': 'x', 'c': None}\nw: dict = {}\nu: int | str = 1"


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("n", "-4", -4),
        ("n", 7, 7),
        ("x", "1e-3", 1e-3),
        ("x", "2", 2.0),
        ("b", "true", True),
        ("b", "False", False),
        ("s", "12", "12"),
        ("s", "{x} 'quoted'", "{x} 'quoted'"),
        ("l", "[1, 2.5]", [1.0, 2.5]),
        ("o", "None", None),
        ("o", "3", 3),
        ("t", "None", None),
        ("t", "b", "b"),
        ("d", '{"a": 2}', {"a": 2}),
        ("d", {"b": 3}, {"b": 3}),
        ("d", "{}", {}),
        ("ll", "[[4], [], [5, 6]]", [[4], [], [5, 6]]),
        ("m", '{"a": [1], "z": null}', {"a": [1.0], "z": None}),
        ("m", "{'b': 'y'}", {"b": "y"}),
        ("w", '{"a": [true, {"b": null}]}', {"a": [True, {"b": None}]}),
        ("u", "3", 3),
        ("u", "3 x", "3 x"),
    ],
)
def test_values_take_the_type_of_the_parameters_cell(name, given, value, folder):
    """F14 of tests/known_faults.md: dictionaries and nested lists too."""
    parameters = read_parameters(load(write(folder, "01", parameters=KINDS)))
    bound = bind(parameters, {name: given}, "01.ipynb")[name]
    assert (type(bound), bound) == (type(value), value)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("n", "1.0"),
        ("n", "True"),
        ("n", True),
        ("n", "four"),
        ("n", "1 + 1"),
        ("n", "None"),
        ("x", "1e999"),
        ("x", "1" + "0" * 400),
        ("x", "[1]"),
        ("b", "1"),
        ("b", "yes"),
        ("l", "1"),
        ("l", "['a']"),
        ("l", "[True]"),
        ("o", "1.5"),
        ("s", 3),
        ("s", None),
        ("d", "{'a': 'b'}"),
        ("d", '{"a": 1.5}'),
        ("d", "[1]"),
        ("d", "{1: 1}"),
        ("ll", "[1]"),
        ("ll", "[['a']]"),
        ("m", "{'a': {}}"),
        ("w", '{"a": NaN}'),
        ("w", "{'a': 1e999}"),
        ("u", 1.5),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(name, given, folder):
    parameters = read_parameters(load(write(folder, "01", parameters=KINDS)))
    with pytest.raises(UsageError, match=rf"01\.ipynb: parameter '{name}': expected .*, given "):
        bind(parameters, {name: given}, "01.ipynb")


def test_an_unknown_parameter_is_refused_with_the_known_ones_listed(folder, output):
    """K77: a misspelt name never falls back to the default."""
    path = write(folder, "01_good", "x = 1")
    with pytest.raises(
        UsageError, match=r"01_good\.ipynb: unknown parameter 'row'.*rows: int = 3, scale: float = 0\.5"
    ):
        runner.run([], {"row": "4"}, folder=folder, output=output)
    assert not output.exists()
    assert path.exists()


@pytest.mark.parametrize(
    ("names", "stems"),
    [((), ["01_a", "02_ab", "02_b"]), (("02_a",), ["02_ab"]), (("notebooks/01_a.ipynb", "01"), ["01_a"])],
)
def test_notebooks_are_chosen_by_name_or_beginning(names, stems, folder):
    for name in ("02_b", "01_a", "02_ab"):
        write(folder, name)
    assert [path.stem for path in runner.select(folder, names)] == stems


@pytest.mark.parametrize("name", ["02", "03", ""])
def test_a_name_that_fits_none_or_several_is_refused(name, folder):
    for each in ("01_a", "02_a", "02_b"):
        write(folder, each)
    with pytest.raises(UsageError, match="the notebooks are 01_a, 02_a, 02_b"):
        runner.select(folder, [name])


@pytest.mark.parametrize("text", ["", "{}", '{"cells": [], "nbformat": 4}', "[1]", '{"nbformat": 4, "cells": [{}]}'])
def test_a_file_that_is_no_notebook_fails_by_name(text, folder, output, capsys):
    folder.mkdir()
    (folder / "01_broken.ipynb").write_text(text)
    assert runner.run(folder=folder, output=output) == 1
    assert capsys.readouterr().err.startswith("01_broken.ipynb: not ")


def test_an_output_folder_that_cannot_be_written_is_named(folder, tmp_path):
    write(folder, "01_good", "x = 1")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--output"):
        runner.run(folder=folder, output=tmp_path / "file" / "build")


def claim_output(instrument="oracle"):
    fields = {"id": "1", "statement": "s", "expected": "1", "measured": "1", "verdict": "holds"}
    return new_output("display_data", data={MIME: fields | {"instrument": instrument}})


def image(**metadata):
    return new_output("display_data", data={"image/png": "aGk="}, metadata=metadata)


def good_cells():
    return [
        code("claim()", "nbval-check-output", outputs=[claim_output()], count=2),
        code("picture()", outputs=[image(**{"image/png": {"alt": "bars"}})], count=3),
    ]


def committed(folder, *cells, name="01_good", parameters=PARAMETERS, change=lambda notebook: None):
    path = write(folder, name, *cells, parameters=parameters)
    notebook = load(path)
    notebook.cells[1].execution_count = 1
    notebook = canonical.canonical(notebook)
    change(notebook)
    # Written without nbformat, which would mend ids on the way.
    text = json.dumps(split_lines(notebook), sort_keys=True, indent=1, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_canonical_notebook_has_no_problems(folder):
    assert canonical.problems(committed(folder, *good_cells())) == []


@pytest.mark.parametrize("version", ["3.11.7", "3.12.0", "3.14.0rc1"])
def test_the_python_that_saved_last_is_no_fault_and_a_refresh_keeps_it(version, folder, output):
    path = write(folder, "01_good", "# A title", code(shown_claim("1.1"), "nbval-check-output"))
    arguments = {"folder": folder, "figures": output}
    assert runner.refresh(**arguments) == 0
    notebook = load(path)
    notebook.metadata.language_info.version = version
    path.write_text(canonical.text_of(notebook))
    assert canonical.problems(path) == []
    assert runner.check(**arguments) == 0
    assert runner.refresh(**arguments) == 0
    assert load(path).metadata.language_info.version == version


def set_cell(number, **fields):
    def change(notebook):
        notebook.cells[number - 1].update(fields)

    return change


def folded(source):
    return set_cell(4, source=source, metadata={"jupyter": {"source_hidden": True}})


@pytest.mark.parametrize(
    "change",
    [
        set_cell(4, source="\n".join(["x = 1"] * 15)),
        set_cell(4, source=f"x = '{'a' * 82}'"),
        folded("# Set-up\n" + "\n".join(["x = 1"] * 24)),
        set_cell(4, source="\n".join(["x = 1"] * 35), metadata={"tags": ["kernel"]}),
        set_cell(1, source=f"# One\n\n```text\n{'x' * 200}\n```\n\n{'y' * 200}"),
    ],
    ids=["as long as may be", "as wide as may be", "folded", "a kernel", "prose and other blocks"],
)
def test_what_a_page_shows_whole_breaks_no_rule(change, folder):
    assert canonical.problems(committed(folder, *good_cells(), change=change)) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda n: n.metadata.update(papermill={}), "not in canonical form"),
        (lambda n: n.metadata.kernelspec.update(name="dev"), "not in canonical form"),
        (lambda n: n.metadata.language_info.update(version="mine"), "not in canonical form"),
        (lambda n: n.metadata.language_info.pop("version"), "not in canonical form"),
        (lambda n: n.cells[2].metadata.update(execution={}), "not in canonical form"),
        (lambda n: n.cells[3].update(id=n.cells[2].id), "not in canonical form"),
        (lambda n: n.cells[3].pop("id"), "not in canonical form"),
        (set_cell(4, execution_count=7), "not in canonical form"),
        (set_cell(4, execution_count=None), "cell 4: never ran"),
        (set_cell(4, source=" "), "cell 4: empty code cell"),
        (set_cell(4, source="\n".join(["x = 1"] * 16)), "cell 4: 16 lines of code, at most 15"),
        (
            set_cell(4, source="\n".join(["x = 1"] * 36), metadata={"tags": ["kernel"]}),
            "36 lines of a kernel, at most 35",
        ),
        (folded("# Many\n" + "\n".join(["x = 1"] * 25)), "cell 4: 26 lines of folded code, at most 25"),
        (folded("x = 1"), "cell 4: folded, and its first line is no comment"),
        (set_cell(4, metadata={"jupyter": {"outputs_hidden": True}}), "cell 4: its outputs are folded, and not all"),
        (set_cell(4, source=f"x = '{'a' * 83}'"), "cell 4: a line of 89 columns, at most 88: \"x = 'aaa"),
        (set_cell(1, source=f"# One\n\n```python\n{'x' * 89}\n```"), "cell 1: a line of 89 columns, at most 88"),
        (set_cell(4, source="%pip install x"), "cell 4: installs packages"),
        (set_cell(4, source="!ls"), "cell 4: a failing"),
        (set_cell(4, source="# NBVAL_IGNORE_OUTPUT"), "cell 4: an nbval comment"),
        (set_cell(4, source="open('/home/someone/x')"), "cell 4: absolute path"),
        (set_cell(4, outputs=[new_output("stream", name="stderr", text="warn")]), "cell 4: stderr output 'warn'"),
        (set_cell(4, outputs=[new_output("stream", text="at /tmp/x")]), "cell 4: absolute path '/tmp/x' in the output"),
        (set_cell(4, outputs=[new_output("error", ename="E", evalue="")]), "cell 4: error output E"),
        (
            set_cell(4, outputs=[new_output("display_data", data={"text/plain": "<f at 0x7f12ab34cd>"})]),
            "cell 4: object address",
        ),
        (set_cell(4, outputs=[image()]), "cell 4: image/png output without alternative text"),
        (set_cell(4, outputs=[image(**{"image/png": {"alt": " "}})]), "cell 4: image/png output without alternative"),
        (set_cell(3, metadata={}), "cell 3: claim 1 needs the tag 'nbval-check-output'"),
        (set_cell(3, metadata={"tags": ["nbval-ignore-output"]}), "cell 3: claim 1 is not compared"),
        (set_cell(3, outputs=[]), "makes no claim"),
        (set_cell(2, metadata={}), "exactly one cell tagged 'parameters', found 0"),
        (set_cell(1, source="## Lower"), "expected exactly one level-1 heading, found 0"),
        (set_cell(1, source="# One\n\n### Three"), "heading 'Three' of level 3 follows level 1"),
        (set_cell(1, source="# One\n```\n# comment\n```\n# Two"), "expected exactly one level-1 heading, found 2"),
        (set_cell(1, source="# One ![](a.png)"), "cell 1: image without alternative text"),
    ],
)
def test_every_rule_of_a_committed_notebook_is_checked(change, problem, folder):
    found = canonical.problems(committed(folder, *good_cells(), change=change))
    assert any(problem in each for each in found), found


def test_a_timed_claim_need_not_be_compared(folder):
    cell = code("claim()", outputs=[claim_output("timed")], count=4)
    assert canonical.problems(committed(folder, *good_cells(), cell)) == []
    cell = code("claim()", "nbval-ignore-output", outputs=[claim_output("recorded")], count=4)
    assert canonical.problems(committed(folder, *good_cells(), cell)) == []


def test_canonical_form_is_stable_and_keeps_ids(folder):
    path = committed(folder, *good_cells())
    notebook = load(path)
    assert [cell.id for cell in notebook.cells] == ["cell-0", "cell-1", "cell-2", "cell-3"]
    assert canonical.text_of(canonical.canonical(notebook)) == path.read_text()
