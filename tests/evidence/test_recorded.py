"""Published times of plain and cascade attention: as the record has them, and the model's sign beside each."""

import json

import pytest

from cascade_lab.evidence import recorded
from cascade_lab.trigger import H100

CASES = recorded.published()


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.device.name}, {c.branches} over {c.prefix_len}")
def test_published_cases_have_the_predicted_sign_or_a_stated_reason(case):
    """Where the model is known to be wrong it must still be wrong, or the list is out of date."""
    if case.plain_us is not None:
        assert case.speedup == case.plain_us / case.cascade_us
    right = (case.predicted_speedup() > 1) == (case.speedup > 1)
    assert right is (case.wrong == "")


def test_published_cases_include_losses_that_the_model_gets_right():
    """K30 (tests/known_faults.md): 8 heads on 1 over 4000 tokens (26 us against 19), and 128 beams over a prefix of 128
    (0.52x).
    """
    lost = [case for case in CASES if case.speedup < 1 and not case.wrong]
    assert len(lost) == 3
    assert {(c.prefix_len, c.branches, c.num_kv_heads) for c in lost} == {(4000, 8, 1), (128, 128, 8), (1024, 8, 4)}
    assert sum(bool(case.wrong) for case in CASES) == 3


def test_every_published_case_names_source_and_device_and_what_was_assumed():
    record = recorded.load("published")
    assert len(CASES) == 17
    assert {case.device.name for case in CASES} == set(record["devices"])
    for case in CASES:
        assert len(case.source) > 20
        assert "assum" in case.device.source
        assert case.launches.keys() == {"naive", "cascade"}


def test_a_case_has_the_fields_of_its_series_and_its_own(tmp_path, monkeypatch):
    """Two series: times on a device that the record describes, and a ratio alone on one that the package knows."""
    slow = {"name": "Slow", "bandwidth": 1e9, "l2_bandwidth": 1e10, "l2_bytes": 1 << 30, "launch": 1e-3}
    slow |= {"matmul_rate": 1e18, "num_sms": 1, "source": "made up"}
    shape = {
        "num_q_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 64,
        "suffix_len": 3,
        "launches": {"naive": 1, "cascade": 3},
    }
    times = [
        {"prefix_len": 1000, "branches": 4, "plain_us": 9.0, "cascade_us": 6.0},
        {"prefix_len": 10, "branches": 2, "plain_us": 1.0, "cascade_us": 2.0, "wrong": "no reason"},
    ]
    series = [
        {"source": "one", "device": "Slow", "cases": times} | shape,
        {"source": "two", "device": "H100", "cases": [{"prefix_len": 7, "branches": 5, "speedup": 3.0}]} | shape,
    ]
    record = {"source": "x", "devices": ["Slow"], "date": "2026-01-01", "device models": [slow], "series": series}
    monkeypatch.setattr(recorded, "load", lambda name: json.loads(json.dumps(record)) if name == "published" else None)
    first, second, third = recorded.published()
    assert (first.source, first.device.bandwidth, first.prefix_len, first.branches) == ("one", 1e9, 1000, 4)
    assert (first.speedup, first.plain_us, first.wrong) == (1.5, 9.0, "")
    assert (second.speedup, second.wrong) == (0.5, "no reason")
    assert (third.device, third.speedup, third.plain_us, third.cascade_us) == (H100, 3.0, None, None)
    # by hand: launches of a millisecond are nearly all of a short prefix
    assert second.predicted_speedup() == pytest.approx(1 / 3, rel=0.02)


def test_without_the_record_there_are_no_published_cases(monkeypatch):
    monkeypatch.setattr(recorded, "load", lambda name: None)
    assert recorded.published() == ()


def verified(length, ratio, group=4):
    cascade = {"ratio_measured": ratio, "ratio_predicted": 4.0}
    where = {"length": length, "topk": 4, "batch": 1, "group": group, "rows": "branch"}
    return where | {"plans": {"cascade": cascade}}


def test_runs_on_gpus_are_read_at_their_centre_and_longest_prompt(tmp_path, monkeypatch):
    prefills = [(4096, 0, 3.0, 1.0), (8192, 0, 8.0, 1.0), (4096, 4096, 6.0, 0.75), (2048, 6144, 4.0, 0.4375)]
    names = ("new", "hit", "seconds", "remaining")
    record = {
        "provenance": {"device": "cuda (x)", "date": "2026-01-01"},
        "scale": {"centre": [16384, 4, 1, 4, "branch"]},
        "sections": {
            "verify": {"rows": [verified(16384, 3.5), verified(1024, 0.8), verified(1024, 9.0, group=8)]},
            "prefill": {"rows": [dict(zip(names, row, strict=True)) for row in prefills]},
        },
    }
    folder = tmp_path / "figures" / "measured"
    folder.mkdir(parents=True)
    monkeypatch.setattr(recorded, "_folders", lambda: [tmp_path / "nothing", folder])
    assert recorded.gpu_runs() == ()
    for name in ("gpu_a", "other"):
        (folder / f"{name}.json").write_text(json.dumps(record))
    (run,) = recorded.gpu_runs()
    assert (run.device, run.date) == ("cuda (x)", "2026-01-01")
    assert list(run.naive_over_cascade.items()) == [(1024, (0.8, 4.0)), (16384, (3.5, 4.0))]
    assert run.prefill == {0.0: (1.0, 1.0), 0.5: (0.75, 0.75), 0.75: (0.5, 0.4375)}
    assert run.prefill_distance(lambda h: 1 - h * h) == pytest.approx(0.0625 / 2)
    assert run.prefill_distance(lambda h: 1 - h) == pytest.approx(0.25)
    (folder / "gpu_a.json").write_text(json.dumps(record | {"sections": {}}))
    (run,) = recorded.gpu_runs()
    assert (run.naive_over_cascade, run.prefill) == ({}, {})
    assert run.prefill_distance(float) != run.prefill_distance(float)
