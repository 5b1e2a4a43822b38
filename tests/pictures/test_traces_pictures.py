"""The numbers behind the pictures of traces are those of the requests they show."""

import math
from fractions import Fraction

import pytest

from cascade_lab import interactions
from cascade_lab.trace_report import HitHistogram
from cascade_lab.traces import MODELS, summarize

figures = pytest.importorskip("cascade_lab.pictures.traces")
pytest.importorskip("matplotlib")

PAIRS = [(1000, 0), (100, 90), (40, 20), (7, 7)]


def test_chords_hold_the_exact_average_and_the_curve_at_two_means():
    _, data = figures.chords({"misses": [(1000, 0), (100, 90)], "hits": [(1000, 900), (100, 0)]})
    for title, pair in (("misses", [(1000, 0), (100, 90)]), ("hits", [(1000, 900), (100, 0)])):
        left = Fraction(sum(interactions(n, hit) for n, hit in pair), sum(interactions(n) for n, _ in pair))
        assert data[title]["exact"][1] == pytest.approx(float(left), abs=1e-12)
        assert data[title]["request mean"] == pytest.approx((0.45, 0.7975))
    assert data["misses"]["token mean"] == pytest.approx((90 / 1100, 1 - (90 / 1100) ** 2))
    assert data["hits"]["token mean"] == pytest.approx((900 / 1100, 1 - (900 / 1100) ** 2))


def test_the_exact_average_lies_on_the_chord_and_below_the_curve():
    _, data = figures.chords({"pair": [(5000, 4000), (3000, 600)]})
    x, y = data["pair"]["exact"]
    (x0, y0), (x1, y1) = (0.8, 1 - 0.64), (0.2, 1 - 0.04)
    assert y == pytest.approx(y0 + (x - x0) * (y1 - y0) / (x1 - x0), abs=1e-4)
    assert y < 1 - x * x - 0.05


def test_shares_weigh_requests_by_one_by_tokens_and_by_pairs():
    _, data = figures.hit_shares(PAIRS, bins=10)
    weights = {"each request 1": lambda n: 1, "by tokens, N": lambda n: n, "by pairs, N(N + 1)": interactions}
    for name, weight in weights.items():
        total = sum(weight(n) for n, _ in PAIRS)
        expected = [0.0] * 10
        for (n, _), place in zip(PAIRS, (0, 9, 5, 9), strict=True):
            expected[place] += weight(n) / total
        assert data[name] == pytest.approx(expected)
        assert sum(data[name]) == pytest.approx(1)


def test_shares_of_no_request_are_refused():
    with pytest.raises(ValueError, match="at least one request"):
        figures.hit_shares([])


def test_rule_errors_draw_every_error_once_in_percent():
    errors = {"a": {"1 - h": -0.25, "1 - h^2": 0.5}, "b": {"1 - h": 0.125, "1 - h^2": 1.0}}
    fig, data = figures.rule_errors(errors)
    assert data == errors
    drawn = {line.get_label(): list(line.get_xdata()) for line in fig.axes[0].lines if line.get_label() in errors}
    assert drawn == {"a": [-25, 50], "b": [12.5, 100]}
    assert [text.get_text() for text in fig.axes[0].get_yticklabels()] == ["1 - h", "1 - h^2"]


def test_rule_errors_refuse_traces_with_different_rules():
    with pytest.raises(ValueError, match="same rules"):
        figures.rule_errors({"a": {"1 - h": 0.1}, "b": {"1 - h^2": 0.1}})


def test_capacity_sweep_keeps_each_series_beside_its_capacities():
    fig, data = figures.capacity_sweep([10, 100], {"token": [0.1, 0.4]}, {"1 - h": [-0.02, 0.03]})
    assert data == {"token": [0.1, 0.4], "1 - h": [-0.02, 0.03]}
    left, right = fig.axes
    assert list(left.lines[0].get_xdata()) == [10, 100]
    assert list(left.lines[0].get_ydata()) == [0.1, 0.4]
    assert list(right.lines[0].get_ydata()) == [-2, 3]
    with pytest.raises(ValueError, match="2 values"):
        figures.capacity_sweep([10, 100], {"token": [0.1]}, {})


def test_two_laws_place_a_trace_between_all_alike_and_all_or_nothing():
    _, data = figures.two_laws([(0.5, 0.25), (0.5, 0.5), (0.0, 0.0)], {"half-way": (0.4, 0.28)}, "path")
    assert [place for _, _, place in data["path"][:2]] == [0, 1]
    assert math.isnan(data["path"][2][2])
    ((_, _, place),) = data["half-way"]
    assert place == pytest.approx(0.5)


def test_the_report_draws_the_shares_and_errors_of_the_trace():
    pairs = [(1000, 0), (1000, 500), (3000, 3000)]
    histogram = HitHistogram()
    summary = summarize(histogram.watch(pairs), model=MODELS["Llama-3.1-8B"])
    fig, data = figures.hit_report(summary, vars(histogram))
    assert [data["shares"]["tokens"][i] for i in (0, 10, 19)] == [0.2, 0.2, 0.6]
    assert sum(data["shares"]["pairs"]) == pytest.approx(1)
    assert data["errors"] == {name: 100 * error for name, error in summary.errors.items()}
    means = [line.get_xdata()[0] for line in fig.axes[0].lines]
    assert means == [summary.request_hit, summary.token_hit, summary.rms_hit]


def test_rows_are_drawn_as_points_and_intervals_of_what_they_save():
    rows = [("exact", 0.5, 0.25, 0.25), ("bounds", 0.75, 0.1, 0.9)]
    fig, data = figures.saved_rows(rows)
    assert data == {"exact": (0.5, 0.25, 0.25), "bounds": (0.75, 0.1, 0.9)}
    (ax,) = fig.axes
    assert [text.get_text() for text in ax.get_yticklabels()] == ["bounds", "exact"]
    lines = [list(line.get_xdata()) for line in ax.lines]
    assert lines[:6] == [[0.1, 0.9], [0.5], [0.75], [0.25, 0.25], [0.25], [0.5]]
