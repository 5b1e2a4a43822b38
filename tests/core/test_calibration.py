"""Fits of prefill times: made-up kernels whose law is known, then the public measurements where they are at hand."""

import math
import random
from pathlib import Path

import numpy as np
import pytest

from cascade_lab.calibration import FEATURES, feature_errors, fit
from cascade_lab.evidence import recorded

PREFIXES = (0, 256, 1024, 4096, 16384, 65536)
NEW = (64, 256, 1024, 2048, 8192)


def samples(time, noise=0.0, prefixes=PREFIXES, new=NEW):
    draw = random.Random(0)
    return [(L, x, time(L, x) * (1 + draw.uniform(-noise, noise))) for L in prefixes for x in new]


def test_area_form_recovers_its_coefficients():
    """A published fit of a GPU's chunks: a = 3.25e-7, b = 6.03e-3, c = 26.1 and gamma = 5.39e-4 ms."""
    c, gamma, b, a = 26.1, 5.39e-4, 6.03e-3, 3.25e-7
    fitted = fit(samples(lambda L, x: c + gamma * L + b * x + a * (2 * L * x + x * x)))
    assert fitted.form == "area"
    assert (fitted.c, fitted.gamma, fitted.b, fitted.a) == pytest.approx((c, gamma, b, a), rel=1e-6)
    assert (fitted.r, fitted.floor) == (0, 0)
    assert fitted.cv_error < 1e-9
    published = {0: 572, 32768: 1287, 65536: 2002, 98304: 2717}
    assert {L: round(fitted.time(L, 32768)) for L in published} == pytest.approx(published, abs=2)


def test_noise_is_smoothed_and_measured():
    fitted = fit(samples(lambda L, x: 1 + 1e-4 * x + 1e-8 * (2 * L * x + x * x), noise=0.04))
    assert fitted.form == "area"
    assert fitted.a == pytest.approx(1e-8, rel=0.05)
    assert 0.01 < fitted.cv_error < 0.05


def test_floor_hides_the_area_until_the_context_is_long():
    """A floor of 123 ms up to about 32K of prefix, then the area: the published shape of one accelerator."""
    floor, a, b = 123.5, 1.5e-6, 0.02
    prefixes = tuple(range(0, 100_000, 4096))
    time = lambda L, x: max(floor, b * x + a * (2 * L * x + x * x))  # noqa: E731
    fitted = fit(samples(time, prefixes=prefixes, new=(1024,)))
    assert fitted.form == "floor"
    assert fitted.floor == pytest.approx(floor, rel=0.01)
    assert fitted.time(0, 1024) == pytest.approx(floor, rel=0.01)
    assert fitted.time(97_000, 1024) == pytest.approx(time(97_000, 1024), rel=0.02)
    assert fitted.cv_error < 0.02


@pytest.mark.parametrize(("law", "a", "r"), [("rectangle", 1e-9, 1e-9), ("new tokens squared", 0, 2e-9)])
def test_square_form_shows_what_the_mask_throws_away(law, a, r):
    scale = 2e-9
    fitted = fit(samples(lambda L, x: 1e-3 + scale * FEATURES[law](L, x)))
    assert fitted.form == "square"
    assert (fitted.a, fitted.r) == pytest.approx((a, r), abs=1e-15)
    assert fitted.time(8192, 8192) == pytest.approx(1e-3 + scale * FEATURES[law](8192, 8192), rel=1e-6)


def test_coefficients_are_never_negative():
    """Times that fall with the prefix cannot be bought by a negative coefficient."""
    fitted = fit(samples(lambda L, x: 1 + 1e-3 * x - 1e-6 * L))
    assert min(fitted.c, fitted.gamma, fitted.b, fitted.a, fitted.r, fitted.floor) >= 0
    assert fitted.gamma == 0


def test_a_richer_form_must_earn_its_coefficient():
    """Noise alone: neither floor nor square wins on held-out samples by a tenth."""
    draw = random.Random(5)
    flat = [(L, x, draw.uniform(0.9, 1.1)) for L in PREFIXES for x in NEW]
    assert fit(flat).form == "area"


@pytest.mark.parametrize("law", FEATURES)
def test_feature_errors_name_the_executed_region(law):
    errors = feature_errors(samples(lambda L, x: 1e-6 + 1e-9 * FEATURES[law](L, x)))
    assert set(errors) == set(FEATURES)
    assert min(errors, key=errors.get) == law
    assert errors[law] < 1e-6
    assert all(errors[other] > 0.1 for other in errors if other != law)


def test_features_by_hand():
    """3 new tokens over 5: twice the 15 + 6 pairs less the diagonal's half, the 8 x 3 rectangle, 9 and 3."""
    assert {name: f(5, 3) for name, f in FEATURES.items()} == {
        "triangle": 39,
        "rectangle": 24,
        "new tokens squared": 9,
        "new tokens": 3,
    }


def test_order_of_samples_only_moves_the_folds():
    data = samples(lambda L, x: 1 + 1e-4 * x + 1e-8 * (2 * L * x + x * x), noise=0.02)
    turned = fit(data[::-1])
    assert (turned.c, turned.a) == pytest.approx((fit(data).c, fit(data).a), rel=1e-9)


GOOD = samples(lambda L, x: 1 + x)


@pytest.mark.parametrize("function", [fit, feature_errors])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "at least 8"),
        (GOOD[:7], "at least 8"),
        ([row[:2] for row in GOOD], "given .* in row 0"),
        ([*GOOD, "a"], "given 'a' in row 30"),
        ([*GOOD, 5], "given 5 in row 30"),
        ([*GOOD, (1, 1, math.nan)], "nan"),
        ([*GOOD, (math.nan, 1, 1)], "nan"),
        ([*GOOD, (1, 1, math.inf)], "inf"),
        ([*GOOD, (-1, 1, 1)], "-1.0"),
        ([*GOOD, (1, 0, 1)], r"\[1.0, 0.0, 1.0\] in row 30"),
        ([*GOOD, (1, 1, 0)], r"\[1.0, 1.0, 0.0\] in row 30"),
        ([(0, x, 1.0 + x) for x in range(1, 30)], "29 with prefix 0"),
    ],
)
def test_bad_samples_are_refused(function, data, message):
    with pytest.raises(ValueError, match=f"samples: .*{message}"):
        function(data)


@pytest.mark.parametrize("bad", ["a", "1", None, True, [1]])
def test_samples_that_are_no_numbers_are_refused(bad):
    for function in (fit, feature_errors):
        with pytest.raises(TypeError, match=r"samples\[30\]: expected a number, given "):
            function([*GOOD, (bad, 1, 1.0)])


def test_samples_may_be_an_array_or_an_iterator():
    data = samples(lambda L, x: 1 + 1e-6 * (2 * L * x + x * x))
    assert fit(np.array(data)) == fit(iter(data)) == fit(data)


ROOT = Path(__file__).resolve().parents[2]


def test_recorded_summary_names_its_source():
    record = recorded.load("aic_calibration")
    assert record["source"]["repository"] == "ai-dynamo/aiconfigurator"
    assert record["source"]["licence"] == "Apache-2.0"
    assert record["devices"] == ["b200_sxm", "h100_sxm", "h200_sxm"]
    assert len(record["indexer kernels"]) == 3 * 2 * 3
    assert (ROOT / "figures" / "measured" / "aic_calibration.json").stat().st_size < 32_000


def recorded_kernels(name):
    kernels = recorded.load("aic_calibration")["indexer kernels"]
    return [
        kernel for kernel in kernels if kernel["kernel"].endswith(name) and kernel["attention shapes"]["shapes"] > 50
    ]


def test_ragged_indexer_follows_the_triangle():
    """Five to eight percent off as a triangle, three times as much as a rectangle, on all three devices."""
    kernels = recorded_kernels("fp8_mqa_logits")
    assert len(kernels) == 9
    for kernel in kernels:
        errors = kernel["attention shapes"]["single features"]
        assert errors["triangle"] < 0.08 < 0.2 < errors["rectangle"] < errors["new tokens squared"]
        assert kernel["attention shapes"]["form"] == "area"
        for ratios in kernel["ratios"].values():
            assert ratios["0.5"] == pytest.approx(0.75, abs=0.06)


def test_paged_indexer_follows_the_rectangle():
    kernels = recorded_kernels("fp8_paged_mqa_logits")
    assert len(kernels) == 6
    for kernel in kernels:
        errors = kernel["attention shapes"]["single features"]
        assert errors["rectangle"] < errors["triangle"]
        for ratios in kernel["ratios"].values():
            assert ratios["0.5"] < 0.54


def test_whole_modules_fall_almost_linearly():
    modules = recorded.load("aic_calibration")["modules"]
    assert len(modules) == 6
    assert all(0.49 < module["ratios"]["0.5"] < 0.56 for module in modules)


def test_windowed_attention_grows_linearly_and_dense_attention_faster():
    dense, window = recorded.load("aic_calibration")["without prefix"]
    growth = [math.log2(kind["times"]["16384"] / kind["times"]["4096"]) / 2 for kind in (dense, window)]
    assert (dense["window"], window["window"]) == (0, 128)
    assert growth == pytest.approx([1.83, 0.88], abs=0.01)


def test_records_without_provenance_are_refused(tmp_path, monkeypatch):
    folder = tmp_path / "figures" / "measured"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert recorded.load("nothing_here") is None
    (folder / "bare.json").write_text('{"source": "somewhere", "date": "2026-11-29"}')
    with pytest.raises(ValueError, match="bare.json: .*devices missing"):
        recorded.load("bare")
    (folder / "bare.json").write_text('{"source": "somewhere", "date": "2026-11-29", "devices": ["one"]}')
    assert recorded.load("bare")["devices"] == ["one"]
