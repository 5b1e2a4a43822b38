"""Traces, measurements and notebooks of strangers: nothing in them is evaluated, and each fault is one clear line."""

import ast
import base64
import contextlib
import copy
import gzip
import json
import os
import random
import re
import socket
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

import cascade_lab
from cascade_lab import cli, traces
from cascade_lab.book import canonical, runner
from cascade_lab.book.execution import load
from cascade_lab.book.export import to_html
from cascade_lab.book.parameters import NotebookError, bind, read_parameters
from cascade_lab.book.refusals import check_runnable
from cascade_lab.evidence import recorded
from cascade_lab.evidence.claims import MIME, format_table, gather
from cascade_lab.files import ForeignFileError, UsageError, one_line, read_json
from cascade_lab.traces import TraceError, read_hits_csv, read_mooncake, read_trace
from tests.notebook_cases import CLAIM, FIELDS, PARAMETERS, code, write

PACKAGE = Path(cascade_lab.__file__).parent
LINE = b'{"timestamp": 3000, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]}'
CSV = b"input_tokens,prefix_hit_tokens\n100,64\n"
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e]")

# nothing is evaluated

# ranks are processes that get the functions of their own parent; packages load, and the reference shows, modules of
# this package that their own lists name; compiled kernels become Python functions
KNOWN = {
    "__init__.py": ["importlib.import_module"],
    "runtime.py": ["importlib.import_module"],
    "evidence/__init__.py": ["importlib.import_module"],
    "evidence/ranks.py": ["exec", "compile"],
    "evidence/ptx/translate.py": ["exec", "compile"],
    "book/api_pages.py": ["importlib.import_module", "importlib.import_module"],
}
FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "yaml",
    "jsonpickle",
}
FORBIDDEN_NAMES = {"eval", "exec", "compile", "__import__", "execfile", "input"}
FORBIDDEN_CALLS = {
    *(f"{module}.{name}" for module in ("torch", "np", "numpy", "pandas", "pd") for name in ("load", "read_pickle")),
    *("os.system", "os.popen", "torch.hub.load", "importlib.import_module", "subprocess.getoutput", "numpy.fromregex"),
    *("runpy.run_path", "runpy.run_module", "code.interact", "builtins.eval", "builtins.exec"),
}


def evaluations(source):
    """Every place where a text or a file could become code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            named = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            named = []
        yield from (name for name in named if name.split(".")[0] in FORBIDDEN_MODULES or name in FORBIDDEN_CALLS)
        if isinstance(node, ast.Name) and node.id in FORBIDDEN_NAMES:
            yield node.id
        if isinstance(node, ast.Attribute) and ast.unparse(node) in FORBIDDEN_CALLS:
            yield ast.unparse(node)
        if isinstance(node, ast.keyword) and node.arg in ("shell", "allow_pickle"):
            yield node.arg


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_module_evaluates_or_unpickles(path):
    known = KNOWN.get(path.relative_to(PACKAGE).as_posix(), [])
    assert list(evaluations(path.read_text(encoding="utf-8"))) == known


def test_no_committed_notebook_evaluates_or_unpickles():
    for path in sorted((PACKAGE.parent / "notebooks").glob("*.ipynb")):
        for cell in load(path).cells:
            if cell.cell_type == "code" and not cell.source.startswith("%%"):
                plain = "\n".join(line for line in cell.source.splitlines() if not line.startswith(("%", "!")))
                assert list(evaluations(plain)) == [], path.name


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads as read",
        "import yaml.loader",
        "eval('1')",
        "run = exec",
        "compile(text, '', 'exec')",
        "torch.load(path)",
        "x = np.load",
        "numpy.load(path, mmap_mode='r')",
        "read(path, allow_pickle=True)",
        "os.system('ls')",
        "from os import system",
        "subprocess.run(line, shell=True)",
        "__import__(name)",
    ],
)
def test_the_search_for_evaluations_finds_them(source):
    assert list(evaluations(source))


# files

JSON_FAULTS = {
    "nothing": (b"", "line 1: expected JSON"),
    "cut short": (b'{"source": [1,\n2', "line 2: expected JSON"),
    "deeply nested": (b"[" * 100_000, "nested too deep"),
    "nested": (b"[" * 65 + b"]" * 65, "nested deeper than 64 levels"),
    "NaN": (b'{"x": NaN}', "NaN is no JSON number"),
    "infinity": (b'{"x": -Infinity}', "-Infinity is no JSON number"),
    "a huge float": (b'{"x": 1e999}', "number 1e999 is too large"),
    "a huge integer": (b'{"x": ' + b"9" * 5000 + b"}", "4300 digits"),
    "a key twice": (b'{"date": "1", "x": {"y": 1, "y": 2}}', "key 'y' is given twice"),
    "latin-1": (b'{"x":\n"\xe9"}', "line 2: expected UTF-8 text, given byte 0xe9"),
    "UTF-16": ('{"x": 1}'.encode("utf-16"), "line 1: expected UTF-8 text, given UTF-16 text"),
    "gzip": (gzip.compress(b"{}", mtime=0), "given gzip-compressed data"),
    "a NUL": (b'{"x": 1}\x00', "line 1: expected JSON"),
    "controls": (b'{"a\\u001b[2J\\u202e": 1, "a\\u001b[2J\\u202e": 2}', "is given twice"),
}


@pytest.mark.parametrize("fault", JSON_FAULTS)
def test_json_that_is_none_is_one_line_with_its_place(fault, tmp_path):
    content, message = JSON_FAULTS[fault]
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(ForeignFileError) as caught:
        read_json(path)
    assert str(caught.value).startswith(path.as_posix())
    assert message in str(caught.value)
    assert not CONTROLS.search(str(caught.value))
    assert len(str(caught.value)) < len(str(path)) + 350


def test_json_that_is_good_is_read_whatever_its_line_ends_and_mark(tmp_path):
    path = tmp_path / "record.json"
    for content in (b'\xef\xbb\xbf{"a":\r\n[1.5, null, "\xc3\xa9"]}\r\n', b'{"a": [15e-1, null, "\\u00e9"]}'):
        path.write_bytes(content)
        assert read_json(path) == {"a": [1.5, None, "é"]}
    with pytest.raises(ForeignFileError, match="expected at most 20 bytes, given more"):
        read_json(path, limit=20)
    assert read_json(path, limit=path.stat().st_size) == {"a": [1.5, None, "é"]}


@pytest.fixture(params=["a directory", "a pipe", "a socket", "a device"])
def special(request, tmp_path, monkeypatch):
    """A path that is no file, and its kind."""
    monkeypatch.chdir(tmp_path)
    path = Path("trace.jsonl")
    if request.param == "a directory":
        path.mkdir()
    elif request.param == "a pipe":
        os.mkfifo(path)
    elif request.param == "a socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    else:
        path.symlink_to("/dev/zero")
    return path, request.param


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes and sockets as files")
def test_what_is_no_file_is_refused_at_once_by_every_reader(special, capsys):
    """A pipe would be waited for, and a device has no end."""
    path, kind = special
    readers = [
        read_json,
        lambda path: list(read_mooncake(path)),
        lambda path: list(read_hits_csv(path, on_error="skip")),
        lambda path: list(read_trace(path)),
    ]
    for read in readers:
        # a socket cannot be opened at all
        with pytest.raises((ForeignFileError, OSError)) as caught:
            read(path)
        assert kind == "a socket" or str(caught.value) == f"trace.jsonl: expected a file, given {kind}"
    with pytest.raises(NotebookError, match="not readable as a notebook: "):
        load(path)
    assert cli.main(["trace", str(path)]) == 2
    assert capsys.readouterr().err == "cascade-lab trace: expected a file, given something else: trace.jsonl\n"


def test_a_link_to_a_file_is_read_and_a_link_to_itself_is_not(tmp_path):
    (tmp_path / "real.jsonl").write_bytes(LINE)
    (tmp_path / "link.jsonl").symlink_to("real.jsonl")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    assert len(list(read_trace(tmp_path / "link.jsonl"))) == 1
    with pytest.raises(OSError, match="symbolic links"):
        list(read_trace(tmp_path / "loop.jsonl"))


# traces


TRACE_FAULTS = {
    "gzip cut short": (
        "trace.jsonl.gz",
        gzip.compress(LINE, mtime=0)[:-9],
        1,
        "line: expected gzip-compressed data, given damaged ones",
    ),
    "gzip of another archive": ("trace.jsonl", gzip.compress(b"PK\x03\x04" + bytes(9)), 1, "given compressed data"),
    "UTF-16": ("trace.jsonl", LINE.decode().encode("utf-16"), 1, "line: expected UTF-8 text, given UTF-16 text"),
    "UTF-16 CSV": ("trace.csv", CSV.decode().encode("utf-16"), 1, "line: expected UTF-8 text, given UTF-16 text"),
    "an archive": ("trace.csv", b"PK\x03\x04" + bytes(100), 1, "given compressed data"),
    "latin-1": ("trace.jsonl", LINE + b'\n{"timestamp": "\xe9"}', 2, "line: expected a JSON object"),
    "a NUL": ("trace.jsonl", LINE + b"\n\x00" + LINE, 2, "line: expected a JSON object"),
    "NULs in a CSV": ("trace.csv", CSV + b"1\x0000,0\n", 3, r"input_tokens: expected an integer"),
    "a key twice": (
        "trace.jsonl",
        LINE.replace(b'{"timestamp"', b'{"input_length": 7, "timestamp"'),
        1,
        "line: expected a JSON object, given a line that is no JSON (key 'input_length' is given twice)",
    ),
    "infinity": ("trace.jsonl", LINE.replace(b"3000", b"1e999"), 1, "timestamp: expected a finite number"),
    "a huge integer": ("trace.jsonl", LINE.replace(b"3000", b"9" * 40), 1, "timestamp: expected a finite number"),
    "a boolean": ("trace.jsonl", LINE.replace(b"3000", b"false"), 1, "timestamp: expected a finite number"),
    "a fraction of tokens": ("trace.jsonl", LINE.replace(b"1000", b"1e3"), 1, "input_length: expected an integer"),
    "nested ids": ("trace.jsonl", LINE.replace(b"[7, 8]", b"[" * 900 + b"]" * 900), 1, "hash_ids: expected a list"),
    "many wrong ids": (
        "trace.jsonl",
        LINE.replace(b"[7, 8]", b"[" + b'"x", ' * 10**5 + b"1]"),
        1,
        "hash_ids: expected a list of integers or strings, given a list of 100001",
    ),
    "escape codes": (
        "trace.csv",
        CSV + b'"\x1b[31m1",2\n',
        3,
        "input_tokens: expected an integer",
    ),
    "a program": ("trace.jsonl", b"__import__('os').system('touch pwned')", 1, "line: expected a JSON object"),
    "a pickle": ("trace.jsonl", b"\x80\x04\x95cos\nsystem\n.", 1, "line: expected a JSON object"),
    "YAML": ("trace.csv", b"!!python/object/apply:os.system ['touch pwned']\n", 1, "expected a known format"),
    "a formula": ("trace.csv", CSV + b"=cmd|'/C calc'!A0,1\n", 3, "input_tokens: expected an integer"),
}


@pytest.mark.parametrize("fault", TRACE_FAULTS)
def test_a_hostile_trace_is_one_line_that_names_file_line_and_what_was_expected(fault, tmp_path, monkeypatch, capsys):
    name, content, line, message = TRACE_FAULTS[fault]
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    assert cli.main(["trace", name]) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert shown.err.startswith(f"cascade-lab trace: {name}, line {line}, ")
    assert message in shown.err
    assert len(shown.err) < 900
    assert not CONTROLS.search(shown.err.rstrip("\n"))
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_mark_and_line_ends_of_another_system_change_nothing(mark, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(mark + LINE + b"\r\n\r\n" + LINE)
    (tmp_path / "b.csv").write_bytes(mark + CSV.replace(b"\n", b"\r\n"))
    (tmp_path / "c").write_bytes(mark + LINE)
    for name, lengths in (("a.jsonl", [1000, 1000]), ("b.csv", [100]), ("c", [1000])):
        assert [request.input_tokens for request in read_trace(tmp_path / name)] == lengths


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.csv", "trace"])
def test_a_line_of_a_gigabyte_is_refused_in_little_memory(name, tmp_path, capsys):
    """A file with a hole: a gigabyte of NUL on a disk that holds nothing of it."""
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(1 << 30)
    tracemalloc.start()
    assert cli.main(["trace", str(path)]) == 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert re.fullmatch(rf".*{re.escape(name)}, line 1, .*: expected at most 16777216 bytes\n", capsys.readouterr().err)
    assert peak < 4 * traces.MAX_LINE


def test_bad_lines_without_number_are_counted_in_little_memory(tmp_path, capsys):
    """20,000 kept errors would be some 20 MB."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(LINE + b"\n" + b"{\n" * 20_000)
    tracemalloc.start()
    assert cli.main(["trace", str(path), "--skip-bad-lines"]) == 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    errors = capsys.readouterr().err.splitlines()
    assert (errors[0], errors[-1], len(errors)) == ("skipped 20000 bad lines:", "  and 19995 more", 7)
    assert peak < 2_000_000


def test_a_line_as_costly_as_its_bytes_allow_stays_within_the_stated_multiple(tmp_path):
    """Empty lists take the most memory per byte of JSON; MAX_LINE rests on this."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(LINE.replace(b"[7, 8]", b"[" + b"[]," * 300_000 + b"1]"))
    tracemalloc.start()
    with pytest.raises(TraceError, match="given a list of 300001"):
        list(read_mooncake(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30 * path.stat().st_size


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path, capsys):
    (tmp_path / "trace.jsonl").write_bytes(LINE)
    report = tmp_path / "report.json"
    report.mkdir()
    assert cli.main(["trace", str(tmp_path / "trace.jsonl"), "--json", str(report)]) == 1
    assert re.fullmatch(r"cascade-lab trace: .*report\.json.*\n", capsys.readouterr().err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "trace.jsonl"]


def test_a_report_goes_through_a_link_or_a_pipe_and_replaces_neither(tmp_path):
    """Renaming a finished file onto /dev/stdout would remove the device."""
    (tmp_path / "trace.jsonl").write_bytes(LINE)
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    os.mkfifo(tmp_path / "pipe.json")
    other_end = os.open(tmp_path / "pipe.json", os.O_RDONLY | os.O_NONBLOCK)
    try:
        for name in ("link.json", "pipe.json"):
            assert cli.main(["trace", str(tmp_path / "trace.jsonl"), "--json", str(tmp_path / name)]) == 0
        assert os.read(other_end, 1 << 16) == (tmp_path / "real.json").read_bytes()
    finally:
        os.close(other_end)
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "pipe.json").is_fifo()
    assert json.loads((tmp_path / "real.json").read_text())["requests"] == 1
    assert len(list(tmp_path.iterdir())) == 4


# measurements


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", "expected a JSON object, given a list"),
        (b'{"source": 1, "devices": ["a"], "date": "2026"}', "source missing"),
        (b'{"source": "x", "devices": "a", "date": "2026"}', "devices missing"),
        (b'{"source": "x", "devices": ["a"], "date": true}', "date missing"),
        (b'{"source": "x", "devices": ["a"], "date": "2026", "times": [NaN]}', "NaN is no JSON number"),
    ],
)
def test_a_measurement_of_another_form_is_refused(content, message, tmp_path, monkeypatch):
    folder = tmp_path / "figures" / "measured"
    folder.mkdir(parents=True)
    (folder / "foreign.json").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        recorded.load("foreign")


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/b", "", "a.b", "a\x00b", "*"])
def test_a_measurement_is_a_name_and_never_a_path(name):
    with pytest.raises(ValueError, match="name: expected letters, digits and underscores"):
        recorded.load(name)


CLAIM_FAULTS = {
    "no list": {"a": 1},
    "no object": [1],
    "a field too many": [{"id": "1", "notebook": "n", **FIELDS, "x": 1}],
    "a field too few": [{"id": "1", **FIELDS}],
    "an id that is no text": [{"id": ["1"], "notebook": "n", **FIELDS}],
    "a notebook that is no text": [{"id": "1", "notebook": None, **FIELDS}],
    "an unknown verdict": [{"id": "1", "notebook": "n", **FIELDS, "verdict": "fine"}],
    "an unknown instrument": [{"id": "1", "notebook": "n", **FIELDS, "instrument": {}}],
    "an object as a number": [{"id": "1", "notebook": "n", **FIELDS, "measured": {"a": 1}}],
    "a list without end": [{"id": "1", "notebook": "n", **FIELDS, "measured": [[[[[[[[[[1]]]]]]]]]]}],
}


@pytest.mark.parametrize("fault", CLAIM_FAULTS)
def test_claims_of_another_form_are_damage_and_no_traceback(fault, tmp_path, capsys):
    (tmp_path / "claims.json").write_text(json.dumps(CLAIM_FAULTS[fault]))
    assert cli.main(["claims", "--output", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(r"claims\.json is damaged \(.*expected.*\); remove it and run again", error)


def test_a_terminal_is_never_told_to_do_something_by_a_claim():
    """Colours, a cleared screen, reversed text and a second line stay letters."""
    hostile = {"id": "1", **FIELDS, "statement": "a\x1b[2Jb\rc\nd\u202ee\x07", "expected": "\x1b]0;title\x07x"}
    header, rule, line = format_table([hostile]).split("\n")
    assert not CONTROLS.search(line)
    assert "ab\\rc\\nd\\u202ee\\x07" in line


def test_one_line_is_one_short_line():
    assert one_line("  a\tb  ") == "a\\tb"
    assert one_line("\x1b[1;31mred\x1b[0m \x9bx") == "red \\x9bx"
    assert one_line("x" * 10**6, 10) == "xxxxxxx..."
    assert len(one_line("\x00" * 10**6)) == 300


# notebooks


def good_notebook():
    claim = new_output("display_data", data={MIME: {"id": "1.1", **FIELDS}, "text/plain": "claim"}, metadata={MIME: {}})
    cells = [
        new_markdown_cell("# Title\n\nText", id="a"),
        new_code_cell("rows: int = 3", metadata={"tags": ["parameters"]}, execution_count=1, id="b"),
        new_code_cell("claim()", outputs=[claim], execution_count=2, metadata={"tags": ["nbval-check-output"]}, id="c"),
        new_code_cell("print(1)", outputs=[new_output("stream", text="1\n")], execution_count=3, id="d"),
    ]
    return json.loads(nbformat.writes(new_notebook(cells=cells)))


NOTEBOOK_FAULTS = {
    **{name: content for name, (content, _) in JSON_FAULTS.items()},
    "a version that is text": b'{"nbformat": "4", "nbformat_minor": 5, "metadata": {}, "cells": []}',
    "a version that is huge": b'{"nbformat": 1' + b"0" * 100 + b', "nbformat_minor": 5, "metadata": {}, "cells": []}',
    "a negative version": b'{"nbformat": -4, "nbformat_minor": 5, "metadata": {}, "cells": []}',
    "an old version of nothing": b'{"nbformat": 3, "nbformat_minor": 0, "worksheets": [{"cells": [1]}]}',
    "the oldest version": b'{"nbformat": 1, "cells": {"a": 1}}',
    "cells that are none": b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [null, 1, "x"]}',
    "cells as an object": b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": {"0": {}}}',
    "text": b"# %% [markdown]\nprint('hello')",
    "a pickle": b"\x80\x04\x95cos\nsystem\n.",
}


@pytest.mark.parametrize("fault", NOTEBOOK_FAULTS)
def test_a_hostile_notebook_is_one_line_and_runs_nothing(fault, tmp_path, capsys):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    path = folder / "01_foreign.ipynb"
    path.write_bytes(NOTEBOOK_FAULTS[fault])
    for command in (["run", "--output", str(tmp_path / "build")], ["check", "--no-run"], ["refresh"]):
        assert cli.main([command[0], "--notebooks", str(folder), *command[1:]]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert re.match(r"01_foreign\.ipynb[:,] not (readable as|a valid) (a )?notebook: ", error)
        assert len(error) < 600
        assert not CONTROLS.search(error.rstrip("\n"))
    assert path.read_bytes() == NOTEBOOK_FAULTS[fault]
    assert [path.name for path in (tmp_path / "build").iterdir()] == ["claims.json"]


JUNK = (None, True, -1, 10**30, 1.5, "", "x", "\x00\x1b[2J\ud83d", [], [[]], {}, {"a": {"b": [1]}}, ["parameters", 1])


def mutants(seed, count):
    """A good notebook with one to three places replaced, removed or repeated."""
    draw = random.Random(seed)
    for _ in range(count):
        notebook = copy.deepcopy(good_notebook())
        for _ in range(draw.randint(1, 3)):
            holders, level = [notebook], [notebook]
            while level:
                children = (each.values() if isinstance(each, dict) else each for each in level)
                level = [child for some in children for child in some if isinstance(child, (dict, list)) and child]
                holders += level
            holder = draw.choice(holders)
            key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            match draw.randrange(3):
                case 0:
                    holder[key] = draw.choice(JUNK)
                case 1:
                    del holder[key]
                case 2:
                    value = copy.deepcopy(holder[key])
                    holder.append(value) if isinstance(holder, list) else holder.__setitem__(f"{key}_", value)
            if not notebook:
                break
        yield notebook


def test_a_notebook_damaged_anywhere_is_refused_or_read_and_never_a_traceback(tmp_path):
    path = tmp_path / "01_damaged.ipynb"
    messages = []
    for notebook in mutants(0, 150):
        path.write_text(json.dumps(notebook), encoding="utf-8")
        try:
            found = load(path)
            check_runnable(found)
            bind(read_parameters(found), {}, path.name)
            canonical.text_of(canonical.canonical(found))
            gather(found)
        except (NotebookError, ValueError) as error:
            messages.append(str(error))
        messages += canonical.problems(path)
    assert len(messages) > 150
    assert [message for message in messages if "\n" in message] == []


@pytest.mark.parametrize(
    "parameters",
    [
        "rows: int = __import__('os').system('touch pwned')",
        "rows = open('pwned', 'w')",
        "rows = [x for x in ()]",
        "rows = (lambda: 1)()",
        "rows: print('pwned') = 1",
        "rows: 'open(1)' = 1",
        "rows: int = 1; import os",
        "rows = f'{open}'",
        "rows = 1\n%run other.ipynb",
        "!touch pwned",
        "rows = 1\x00",
        "rows = " + "[" * 250 + "]" * 250,
        "rows = " + "-" * 50_000 + "1",
        "rows = " + "9" * 5000,
        "rows = " + "1+" * 20_000 + "1",
        "rows = {[]: 1}",
        "rows = 1if 1else 2",
        "*rows, = [1]",
        "rows.real = 1",
        "rows[0] = 1",
        "(rows := 1)",
    ],
)
def test_parameters_are_read_and_never_run(parameters, tmp_path, recwarn):
    path = tmp_path / "01.ipynb"
    path.write_text(nbformat.writes(new_notebook(cells=[code(parameters, "parameters")])))
    with pytest.raises(NotebookError) as caught:
        read_parameters(load(path))
    assert str(caught.value).startswith("cell 1: the parameters cell ")
    assert len(str(caught.value)) < 330
    assert not CONTROLS.search(str(caught.value))
    assert not recwarn


@pytest.mark.parametrize(
    "given",
    [
        "__import__('os').system('touch pwned')",
        "[" * 100_000,
        "-" * 100_000 + "1",
        "9" * 5000,
        "1 if 1else 2",
        "\x00",
        "rows",
        "1;2",
        "{1: 2}",
        "x" * 10**6,
        "\x1b[2J",
        "\n1\n2",
    ],
)
def test_given_values_are_literals_and_their_refusal_is_short(given, tmp_path, recwarn):
    parameters = read_parameters(load(write(tmp_path, "01", parameters=PARAMETERS)))
    with pytest.raises(UsageError) as caught:
        bind(parameters, {"rows": given}, "01.ipynb")
    assert str(caught.value).startswith("01.ipynb: parameter 'rows': expected int, given ")
    assert len(str(caught.value)) < 160
    assert not CONTROLS.search(str(caught.value))
    assert not recwarn


# which notebooks are run


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder with one notebook, beside others that must never be meant."""
    folder = tmp_path / "checkout" / "notebooks"
    write(folder, "01_good", "x = 1")
    for other in ("elsewhere", "checkout", "checkout/notebooks/inner"):
        write(tmp_path / other, "01_good", "raise SystemExit('it ran')")
        write(tmp_path / other, "99_evil", "raise SystemExit('it ran')")
    monkeypatch.chdir(tmp_path / "checkout")
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "../elsewhere/01_good.ipynb",
        "../elsewhere/99_evil.ipynb",
        "notebooks/../../elsewhere/01_good.ipynb",
        "./01_good.ipynb",
        "inner/01_good",
        "notebooks/inner/01_good.ipynb",
        "inner/99_evil.ipynb",
        "/etc/passwd",
        "01_good.ipynb/../99_evil.ipynb",
        "*",
        "0[1]_good",
        "0?_good",
        "$(touch pwned)",
        "01_good; touch pwned",
        "~/01_good",
        "https://example.org/01_good.ipynb",
        "file:///01_good.ipynb",
        "s3://bucket/01_good.ipynb",
        "01_good.ipynb\x00",
        "01_good\n",
        "-",
        ".",
        "..",
        "",
        " ",
    ],
)
def test_a_name_never_means_a_notebook_outside_the_folder(name, checkout):
    """Not one with the same name elsewhere either, which would be run in place of the one that was named."""
    with pytest.raises(UsageError) as caught:
        runner.select(checkout, [name])
    assert not CONTROLS.search(str(caught.value))


@pytest.mark.parametrize(
    "name", ["01", "01_good", "01_good.ipynb", "notebooks/01_good.ipynb", "notebooks/../notebooks/01"]
)
def test_a_name_or_path_of_the_folder_means_its_notebook(name, checkout):
    assert runner.select(checkout, [name]) == [checkout / "01_good.ipynb"]
    assert runner.select(checkout, [str(checkout / "01_good.ipynb")]) == [checkout / "01_good.ipynb"]


def test_a_link_that_leads_outside_is_refused_and_one_inside_is_not(checkout, tmp_path, capsys):
    (checkout / "02_link.ipynb").symlink_to(tmp_path / "elsewhere" / "99_evil.ipynb")
    (checkout / "03_same.ipynb").symlink_to("01_good.ipynb")
    assert [path.name for path in runner.select(checkout, ["03"])] == ["03_same.ipynb"]
    for names in ([], ["02"]):
        for command in ("run", "refresh", "check"):
            assert cli.main([command, *names]) == 2
            assert re.fullmatch(
                rf"cascade-lab {command}: 02_link\.ipynb is a link to .*99_evil\.ipynb, outside .*notebooks\n",
                capsys.readouterr().err,
            )
    assert not (checkout.parent / "build").exists()


def test_what_is_no_file_but_named_like_a_notebook_is_one_line(checkout, capsys):
    (checkout / "02_folder.ipynb").mkdir()
    os.mkfifo(checkout / "03_pipe.ipynb")
    assert cli.main(["check", "--no-run", "02", "03"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert [error.split(":")[0] for error in errors] == ["02_folder.ipynb", "03_pipe.ipynb"]
    assert [error.rsplit(", ", 1)[1] for error in errors] == ["given a directory", "given a pipe"]


@pytest.mark.parametrize(
    "source", ["%run other.ipynb", "%run -i ../01_good.ipynb", "if True:\n    %run 'a b.ipynb'", "%run other.ipynb arg"]
)
def test_a_cell_does_not_run_another_notebook(source, tmp_path):
    """Its claims would count for nobody."""
    with pytest.raises(NotebookError, match=r"^cell 3: another notebook's claims would go unjudged"):
        check_runnable(load(write(tmp_path, "01", code(source))))


def test_names_that_a_shell_or_a_template_would_read_and_a_foreign_kernel_change_nothing(tmp_path, monkeypatch, capsys):
    """K79 (tests/known_faults.md): the notebook asks for another program, which is not even looked for."""
    name = "01 $(touch pwned) `touch pwned` {x} [ab]* 'q' \"d\" & %s <b>"
    write(
        tmp_path / "notebooks",
        name,
        CLAIM,
        metadata={
            "kernelspec": {
                "name": "bash",
                "display_name": "touch pwned",
                "language": "bash",
                "argv": ["touch", "pwned"],
            },
            "language_info": {"name": "bash", "file_extension": ".sh"},
        },
    )
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run"]) == 0
    assert capsys.readouterr().err == ""
    assert sorted(path.name for path in (tmp_path / "build").iterdir()) == sorted(
        [f"{name}.html", f"{name}.ipynb", "claims.json"]
    )
    assert not list(tmp_path.rglob("pwned"))
    assert load(tmp_path / "build" / f"{name}.ipynb").metadata.kernelspec.name == "python3"
    assert [record["notebook"] for record in runner.read_claims(tmp_path / "build")] == [name]


# the exported page

SCRIPT = "<script>alert(1)</script>"
HOSTILE = {
    "script": SCRIPT,
    "upper case": "<SCRIPT SRC=https://example.org/x.js></SCRIPT>",
    "broken": "<scr<script>ipt>alert(1)</script>",
    "handler": "<img src=x onerror=alert(1)>",
    "svg": "<svg onload=alert(1)><script>alert(1)</script></svg>",
    "frame": '<iframe src="javascript:alert(1)"></iframe>',
    "style": "<style>@import 'https://example.org/x.css';</style>",
    "meta": '<meta http-equiv="refresh" content="0;url=https://example.org/">',
    "form": '<form action="https://example.org/"><input autofocus onfocus=alert(1)></form>',
    "object": '<object data="https://example.org/x.swf"></object><embed src="https://example.org/x">',
    "kept tag with a handler": "<details open ontoggle=alert(1)><summary onclick=alert(1)>x</summary></details>",
    "link": "[x](javascript:alert(1)) [y](JaVaScRiPt:alert(1)) [z](data:text/html,<script>alert(1)</script>)",
    "quoted link": '[x](https://example.org/"onmouseover="alert(1))',
    "entity link": "[x](&#106;avascript:alert(1)) <javascript:alert(1)>",
    "picture": '![x" onerror="alert(1)](https://example.org/x.png)',
    "formula": "$x < y$ $\\href{javascript:alert(1)}{x}$ $\\style{background:url(x)}{y}$ $\\mathrm{<script>}$",
    "code": "```html\n<script>alert(1)</script>\n```\n`<script>alert(1)</script>`",
    "comment": "<!--><script>alert(1)</script>-->",
    "table": "| a |\n|---|\n| <script>alert(1)</script> |",
    "heading": '## <script>alert(1)</script> " onmouseover=alert(1)',
    "language": '```"><script>alert(1)</script>\nx\n```',
    "title": "[x](https://example.org \"' onmouseover='alert(1)\")",
}
EMPTY = {"area", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}
ACTIVE = {
    "script",
    "iframe",
    "object",
    "embed",
    "form",
    "base",
    "frame",
    "frameset",
    "applet",
    "portal",
    "template",
    "input",
}


class Page(HTMLParser):
    """What a browser would run, load or leave the page for."""

    def __init__(self, text):
        super().__init__()
        self.found, self.pictures, self.links, self._style = [], [], [], False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self._style = tag == "style"
        if attributes == {"rel": "icon", "href": "data:,"}:
            # the page's own, which keeps a browser from asking for one
            return
        if tag in ACTIVE or tag == "link" or (tag == "meta" and "http-equiv" in attributes):
            self.found.append(tag)
        for name, value in attrs:
            value = re.sub(r"[\x00-\x20]", "", value or "").lower()
            if name.startswith("on") or name in ("srcdoc", "formaction", "action", "ping", "background"):
                self.found.append(f"{tag} {name}")
            if name in ("src", "srcset", "poster", "data") and not value.startswith("data:image/"):
                self.found.append(f"{tag} {name}={value[:60]}")
            if name in ("href", "xlink:href") and re.match(r"(javascript|data|vbscript|file):", value):
                self.found.append(f"{tag} {name}={value[:60]}")
        if tag == "img":
            self.pictures.append(attributes)

    def handle_data(self, data):
        if self._style and re.search(r"@import|url\(|expression\(", data):
            self.found.append(f"style {data[:60]}")


def page_of(*cells, name="01_foreign", folder=Path()):
    return to_html(
        nbformat.from_dict(new_notebook(cells=[new_markdown_cell("# Title"), *cells])), folder / f"{name}.ipynb"
    )


def test_the_page_check_finds_what_is_active():
    active = [text for kind, text in HOSTILE.items() if text.startswith("<") and kind not in ("comment", "broken")]
    assert [text for text in active if not Page(text).found] == []
    assert len(active) == 10
    assert Page("<style>p { background: url(x) }</style>").found
    assert Page('<p>good</p><img src="data:image/png;base64,AA" alt="x"><a href="02.html#x">x</a>').found == []


@pytest.mark.parametrize("kind", HOSTILE)
def test_nothing_that_a_notebook_writes_becomes_active_in_its_page(kind):
    """Prose, outputs of every text form, claims and errors: strangers' HTML is shown, never obeyed."""
    text = HOSTILE[kind]
    claim = {"id": "1.1" + text, **FIELDS, "statement": text, "expected": text, "measured": text}
    outputs = [
        new_output("stream", name="stdout", text=text),
        new_output("stream", name="stderr", text=text),
        new_output("display_data", data={"text/html": text}),
        new_output("display_data", data={"text/html": text, "text/plain": text}),
        new_output("display_data", data={"text/markdown": text}),
        new_output("display_data", data={"text/latex": text}),
        new_output("display_data", data={"application/javascript": text}),
        new_output("display_data", data={"image/svg+xml": text}, metadata={"image/svg+xml": {"alt": text}}),
        new_output("display_data", data={"text/markdown": "claim", "text/plain": text, MIME: claim}),
        new_output("error", ename=text, evalue=text, traceback=[text]),
    ]
    cells = [new_markdown_cell(text), new_code_cell(text, outputs=outputs), code(text)]
    assert Page(page_of(*cells)).found == []


@pytest.mark.parametrize(
    "address", ["../secret.png", "inner/../../secret.png", "{root}/secret.png", "file://{root}/secret.png"]
)
def test_a_page_takes_no_file_from_outside_the_notebook_s_folder(address, tmp_path):
    """A stranger's notebook must not make a reader publish a file of their own."""
    folder = tmp_path / "notebooks"
    (folder / "inner").mkdir(parents=True)
    for place in (tmp_path / "secret.png", folder / "own.png"):
        place.write_bytes(b"the secret")
    secret = base64.b64encode(b"the secret").decode()
    assert secret in page_of(new_markdown_cell("![x](own.png)"), folder=folder)
    text = f"![x]({address.format(root=tmp_path)})"
    shown = [
        new_markdown_cell(text),
        new_code_cell("x", outputs=[new_output("display_data", data={"text/markdown": text})]),
    ]
    for cell in shown:
        try:
            page = page_of(cell, folder=folder)
        except NotebookError:
            continue
        assert secret not in page
        assert "secret.png" not in [picture["src"] for picture in Page(page).pictures]


@pytest.mark.parametrize("formula", ["$\\text{<script>alert(1)</script>}$", "$$\\text{<img src=x onerror=alert(1)>}$$"])
def test_markup_in_a_formula_gives_no_page(formula):
    with pytest.raises(NotebookError, match=r"^cell 2: formula .*(no part of a formula|cannot be converted)"):
        page_of(new_markdown_cell(formula))


def test_what_is_shown_of_a_stranger_is_there_to_be_read():
    """Escaped is not dropped: the reader sees what was written."""
    output = new_output("stream", text=SCRIPT)
    page = page_of(new_markdown_cell(f"Beware of `{SCRIPT}`."), new_code_cell("x", outputs=[output]))
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 2


def test_pictures_and_their_descriptions_cannot_leave_their_attributes():
    pixel = "iVBORw0KGgo="
    alt = "\"><script>alert(1)</script> & 'x'"
    shown = new_output("display_data", data={"image/png": pixel}, metadata={"image/png": {"alt": alt}})
    broken = new_output("display_data", data={"image/png": '"><script>alert(1)</script>', "text/plain": "no picture"})
    found = Page(page_of(new_code_cell("x", outputs=[shown])))
    assert found.found == []
    assert [(p["src"], p["alt"]) for p in found.pictures] == [(f"data:image/png;base64,{pixel}", alt)]
    with contextlib.suppress(NotebookError):
        assert Page(page_of(new_code_cell("x", outputs=[broken]))).found == []


def test_a_file_name_is_text_in_its_page():
    name = '01"><script>alert(1)</script>'
    page = to_html(nbformat.from_dict(new_notebook(cells=[new_markdown_cell("No title")])), Path(f"{name}.ipynb"))
    assert Page(page).found == []
    assert SCRIPT not in page
