"""Every public function and class has an example in its docstring, and it runs as it is shown."""

import doctest
import html
import importlib
import inspect
import re

import pytest
import torch

import cascade_lab
from cascade_lab import runtime
from cascade_lab.book import api_pages
from cascade_lab.book.layout import PUBLIC

MODULES = [name for names in PUBLIC.values() for name in names]
# recorded are interpreted launches alone
MODES = {"evidence.reads": "interpreted"}
PACKAGES = {"hf": "transformers"}


def public(name):
    """Functions and classes of a module's `__all__`, in order."""
    here = importlib.import_module(f"cascade_lab.{name}")
    things = [(one, getattr(here, one)) for one in here.__all__]
    return [(one, thing) for one, thing in things if inspect.isclass(thing) or inspect.isroutine(thing)]


def failures(text, name="example"):
    """What an example prints otherwise than it says, as a report; it begins with `cl` and `torch`."""
    report = []
    test = doctest.DocTestParser().get_doctest(text, {"cl": cascade_lab, "torch": torch}, name, None, None)
    assert test.examples, f"{name} has no example"
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
    return "".join(report)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module_run_as_shown(name, tmp_path, monkeypatch):
    from cascade_lab.evidence import claims

    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    if MODES.get(name, runtime.triton_mode()) != runtime.triton_mode():
        pytest.skip(f"needs kernels that are {MODES[name]}")
    monkeypatch.chdir(tmp_path)
    for one, thing in public(name):
        monkeypatch.setattr(claims, "_claims_here", {})
        torch.manual_seed(0)
        found = failures(inspect.getdoc(thing), f"cascade_lab.{name}.{one}")
        assert not found, found


def test_a_wrong_example_and_a_missing_one_are_noticed():
    assert failures(">>> cl.interactions(8, 4)\n26") == ""
    assert "Expected:\n    27\nGot:\n    26" in failures(">>> cl.interactions(8, 4)\n27")
    with pytest.raises(AssertionError, match="cl.nothing has no example"):
        failures("Does nothing.", "cl.nothing")


@pytest.mark.parametrize("thing", [cascade_lab.interactions, cascade_lab.VerifyBatch, runtime.jit])
def test_the_reference_shows_an_example_as_code(thing):
    page = api_pages._text(thing.__doc__, lambda text: "")
    _, _, after = page.partition("<strong>Example:</strong>")
    assert after.count("<pre><code>") == 1
    lines = inspect.getdoc(thing).split("Example:\n")[1].splitlines()
    shown = html.unescape(re.sub(r"<[^>]+>", "", after)).strip()
    assert shown.splitlines() == [line[4:] for line in lines]
    assert "<blockquote" not in after
