"""A claim must be able to fail, in every form a measurement can take."""

import json
import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cascade_lab.evidence import claims
from cascade_lab.evidence.claims import AtLeast, AtMost, Claim, claim, claims_table, format_table, gather


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(claims, "_claims_here", {})


@pytest.fixture
def shown(monkeypatch):
    """Outputs as a notebook would receive them."""
    outputs = []
    ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    display = SimpleNamespace(
        display=lambda data, metadata, raw: outputs.append(
            {"output_type": "display_data", "data": data, "metadata": metadata}
        )
    )
    monkeypatch.setitem(claims.sys.modules, "IPython", ipython)
    monkeypatch.setitem(claims.sys.modules, "IPython.display", display)
    return outputs


def notebook(outputs):
    return {"cells": [{"cell_type": "markdown"}, {"cell_type": "code", "outputs": outputs}]}


@pytest.mark.parametrize(
    ("measured", "expected", "tol"),
    [
        (3, 3, 0),
        (True, True, 0),
        (Fraction(1, 3), Fraction(2, 6), 0),
        (0.5, Fraction(1, 2), 0),
        (3.0, 3, 0),
        ("naive", "naive", 0),
        ((1, 2), [1, 2], 0),
        ([0.1, 2.0], (0.1004, 2), 1e-3),
        (-math.inf, -math.inf, 0),
        (math.inf, math.inf, 1e-3),
        (torch.tensor(0.5), 0.5, 0),
        (torch.tensor([7]), 7, 0),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5, 0),
        (np.float32(0.25), 0.25, 0),
        (np.bool_(True), True, 0),
        (np.array([[4]]), 4, 0),
        (2, AtMost(2), 0),
        (0.1, AtLeast(Fraction(1, 10)), 0),
        (10**20 + 1, 10**20, 1),
    ],
)
def test_true_claims_hold(measured, expected, tol, capsys):
    claim("1.1", "the two agree", measured=measured, expected=expected, tol=tol)
    assert capsys.readouterr().out.startswith("1.1 holds: the two agree (oracle: expected ")


@pytest.mark.parametrize(
    ("measured", "expected", "tol"),
    [
        (3, 4, 0),
        (False, True, 0),
        (0.1 + 0.2, 0.3, 0),
        (Fraction(1, 3), 1 / 3, 0),
        (10**20 + 1, float(10**20), 0),
        (1.0011, 1, 1e-3),
        (math.nan, math.nan, 0),
        (math.nan, 0.0, 1e9),
        (0.0, math.nan, 1),
        (math.nan, AtMost(1), 0),
        (math.nan, AtLeast(1), 0),
        ((1.0, math.nan), (1.0, math.nan), 0),
        (math.inf, -math.inf, 1),
        (1e308, math.inf, 1),
        ((1, 2), (1, 2, 3), 0),
        ((1, 2, 3), (1, 2), 0),
        ((), (1,), 0),
        ("naive", "naive ", 0),
        (3, AtMost(2), 0),
        (1, AtLeast(2), 0),
    ],
)
def test_false_claims_leave_their_output_and_raise(measured, expected, tol, shown):
    with pytest.raises(AssertionError, match=r"claim 1\.2 fails: the two agree: measured .* expected "):
        claim("1.2", "the two agree", measured=measured, expected=expected, tol=tol)
    (output,) = shown
    assert output["data"][claims.MIME]["verdict"] == "fails"
    assert gather(notebook(shown))[0].verdict == "fails"
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown


@pytest.mark.parametrize(
    ("measured", "expected", "tol"),
    [
        (True, 1, 0),
        (1, True, 0),
        ("1", 1, 0),
        ((2, True), (1, 1), 0),
        (3, (3,), 0),
        (torch.tensor([1.0, 2.0]), 1.0, 0),
        (np.zeros(0), 0, 0),
        (1j, 1, 0),
        ({1}, 1, 0),
        (1, None, 0),
        ("a", AtMost(1), 0),
        (1, AtMost("a"), 0),
        (1, AtMost(math.nan), 0),
    ],
)
def test_what_cannot_be_compared_is_refused(measured, expected, tol, shown):
    with pytest.raises(TypeError, match=r"^claim 1\.3"):
        claim("1.3", "the two agree", measured=measured, expected=expected, tol=tol)
    assert shown == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tol": -1}, "tol"),
        ({"tol": math.nan}, "tol"),
        ({"tol": math.inf}, "tol"),
        ({"tol": True}, "tol"),
        ({"measured": "a", "expected": "a", "tol": 0.1}, "tol"),
        ({"expected": AtMost(3), "tol": 0.1}, "tol"),
        ({"instrument": "guessed"}, "instrument"),
        ({"id": "1 4"}, "id"),
        ({"id": ""}, "id"),
        ({"statement": "two\nlines"}, "statement"),
        ({"statement": " "}, "statement"),
        ({"magnitude": 1e-6}, "magnitude"),
        ({"expected": AtMost(3), "magnitude": 0}, "magnitude"),
        ({"expected": AtMost(3), "magnitude": math.inf}, "magnitude"),
        ({"expected": AtMost(3), "magnitude": "1"}, "magnitude"),
        ({"reason": "two\nlines"}, "reason"),
        ({"measured": None}, "measured"),
        ({"measured": None, "instrument": "derived"}, "measured"),
    ],
)
def test_malformed_claims_name_the_argument(change, named, shown):
    arguments = {"id": "1.4", "statement": "the two agree", "measured": 1, "expected": 1} | change
    with pytest.raises(ValueError, match=named):
        claim(**arguments)
    assert shown == []


def test_text_is_the_same_on_machines_that_measure_differently(shown):
    for error in (1.1e-7, 3e-7):
        claim("2.1", "small error", measured=error, expected=0.0, tol=1e-5)
        claim("2.2", "bounded error", measured=error, expected=AtMost(1e-5))
        claim("2.3", "fast", measured=error, expected=AtMost(1.0), instrument="timed")
        claim("2.4", "off a number", measured=(0.7, 2 + error), expected=(0.7, 2), tol=1e-5, instrument="counted")
        claim("2.5", "rejected by far", measured=0.031 + error, expected=AtLeast(1e-5))
        claim("2.6", "a share", measured=0.314 + error, expected=AtMost(1))
    assert [o["data"] for o in shown[:6]] == [o["data"] for o in shown[6:]]
    assert [o["metadata"][claims.MIME]["measured"] for o in shown[::6]] == [1.1e-7, 3e-7]
    texts = ["below 1e-6", "below 1e-6", "at most 1", "off by less than 1e-6", "about 0.031", "about 0.31"]
    assert [o["data"][claims.MIME]["measured"] for o in shown[:6]] == texts


@pytest.mark.parametrize(
    ("measured", "options", "text"),
    [
        (6e-7, {"expected": AtMost(1e-5)}, "below 1e-5"),
        (5e-7, {"expected": AtMost(1e-5)}, "below 1e-6"),
        (6e-7, {"expected": AtMost(1e-5), "magnitude": 2e-6}, "below 2e-6"),
        (6e-6, {"expected": AtMost(1e-5), "magnitude": 2e-6}, "below 0.0001"),
        (0.0, {"expected": AtMost(1e-5), "magnitude": 2e-6}, "below 2e-6"),
        (0.0, {"expected": AtMost(1e-5)}, "0"),
        (-0.25, {"expected": AtMost(1e-5)}, "about -0.25"),
        (50.9, {"expected": AtLeast(1), "magnitude": 20}, "above 20"),
        (3120, {"expected": AtMost(4000), "magnitude": 4000}, "below 4000"),
        (3120, {"expected": AtMost(4000)}, "3120"),
        ((0.0, -4e-16), {"expected": (0, 0), "tol": 1e-14}, "below 1e-15"),
        ((3, 4.5), {"expected": (3, 4.5), "tol": 1e-5}, "off by 0"),
        (0.73105860, {"expected": 0.73105858, "tol": 1e-6, "magnitude": 2e-7}, "off by less than 2e-7"),
        (1.04711, {"expected": 1.0473, "tol": 5e-4, "instrument": "derived"}, "1.0471"),
        (Fraction(512, 8193), {"expected": Fraction(1, 16), "tol": 1e-4, "instrument": "derived"}, "0.0625"),
        ((0.7384, 0.4228), {"expected": (0.75, 0.4375), "tol": 0.03, "instrument": "recorded"}, "(0.74, 0.42)"),
        (4.6543e-10, {"expected": AtMost(1e-9), "instrument": "derived"}, "4.654e-10"),
        (2.2e-16, {"expected": AtMost(1e-14), "instrument": "derived"}, "below 1e-15"),
        (0.0491, {"expected": AtMost(0.05), "instrument": "recorded"}, "0.0491"),
        (14, {"expected": 14, "instrument": "recorded"}, "14"),
        (3.84, {"expected": 4, "tol": 2.1, "instrument": "timed"}, "within 2.1"),
        (-math.inf, {"expected": AtMost(1.0)}, "-inf"),
    ],
)
def test_what_is_shown_of_a_number(measured, options, text, shown):
    claim("2.7", "a number", measured=measured, **options)
    assert shown[0]["data"][claims.MIME]["measured"] == text


def test_a_reason_stands_beside_the_claim_and_not_in_its_columns(shown):
    claim("2.8", "a number", measured=0.0, expected=AtMost(1e-5), reason="a *round* number")
    data = shown[0]["data"]
    assert data["text/plain"] == (
        "2.8 holds: a number (oracle: expected at most 1e-5, measured 0) Bound: a *round* number."
    )
    assert data["text/markdown"].endswith(r"Bound: a \*round\* number.")
    assert "round" not in json.dumps(data[claims.MIME])


def test_what_is_not_measured_says_why(shown):
    claim("2.9", "a time", measured=None, expected=AtMost(3), instrument="recorded", reason="nobody recorded *one*")
    data = shown[0]["data"]
    said = "2.9 not measured here: a time (recorded: expected at most 3) Reason: nobody recorded *one*."
    assert data["text/plain"] == said
    assert data["text/markdown"].endswith(r"Reason: nobody recorded \*one\*.")


def test_exact_numbers_stay_visible(shown):
    claim("3.1", "reads", measured=4096, expected=4096, instrument="counted")
    claim("3.2", "reads bounded", measured=4096, expected=AtMost(5000), instrument="counted")
    claim("3.3", "ratio", measured=Fraction(3, 4), expected=Fraction(3, 4), instrument="derived")
    assert [o["data"][claims.MIME]["measured"] for o in shown] == ["4096", "4096", "3/4"]
    assert [c.record("n")["measured"] for c in gather(notebook(shown))] == [4096, 4096, "3/4"]


def test_what_this_machine_cannot_measure_never_holds(shown):
    for instrument in ("timed", "recorded", "counted"):
        claim(f"4.{instrument}", "faster on a GPU", measured=None, expected=AtLeast(1.5), instrument=instrument)
    for found in gather(notebook(shown)):
        assert (found.verdict, found.measured) == ("not measured here", None)
        assert found.record("n")["measured"] is None


def test_one_output_per_claim_with_the_line_as_text_and_markdown(shown):
    claim("5.1", "a_b * c | d <e> $f$", measured=1, expected=1)
    (output,) = shown
    assert set(output["data"]) == {claims.MIME, "text/markdown", "text/plain"}
    assert output["data"]["text/plain"] == "5.1 holds: a_b * c | d <e> $f$ (oracle: expected 1, measured 1)"
    assert r"a\_b \* c \| d \<e\> \$f\$" in output["data"]["text/markdown"]


def test_gather_keeps_repeated_ids_and_refuses_malformed_outputs(shown):
    claim("6.1", "first", measured=1, expected=1)
    claim("6.1", "second", measured=2, expected=2)
    assert [c.statement for c in gather(notebook(shown))] == ["first", "second"]
    for damage in ({"verdict": "fine"}, {"instrument": "guessed"}, {"extra": 1}):
        broken = {"data": {claims.MIME: shown[0]["data"][claims.MIME] | damage}}
        with pytest.raises(ValueError, match="malformed claim"):
            gather(notebook([broken]))
    missing = {k: v for k, v in shown[0]["data"][claims.MIME].items() if k != "expected"}
    with pytest.raises(ValueError, match="malformed claim"):
        gather(notebook([{"data": {claims.MIME: missing}}]))


def test_claims_table_shows_the_latest_verdict_of_each_id(shown, capsys):
    claim("7.1", "one", measured=1, expected=1)
    with pytest.raises(AssertionError):
        claim("7.2", "two", measured=2, expected=3)
    claim("7.2", "two", measured=3, expected=3)
    claims_table()
    text = shown[-1]["data"]["text/plain"]
    assert [line.split()[-1] for line in text.splitlines()[2:]] == ["holds", "holds"]
    assert shown[-1]["data"]["text/markdown"].splitlines()[0].count("|") == 7


def test_table_fits_the_terminal_and_is_one_line_per_claim_when_piped():
    long = Claim("8.1", "word " * 40, "oracle", "0.0038911", "within 1e-07", "holds", 0.0038911, 0.00389109999)
    records = [long.record("n"), long.record("n") | {"id": "8.2", "measured": None}]
    assert len(format_table(records).splitlines()) == 4
    fitted = format_table(records, width=100).splitlines()
    assert max(map(len, fitted)) <= 100
    assert sum("8.1" in line for line in fitted) == 1
    assert " ".join(fitted).count("word") == 80
    assert "0.0038911" in fitted[2]
    assert format_table([]) == "no claims"
