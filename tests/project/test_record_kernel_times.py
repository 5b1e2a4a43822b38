"""The record of public kernel times follows from their files, which are read line by line."""

import json
from pathlib import Path

import pytest

from cascade_lab.evidence import recorded
from tools import record_kernel_times

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "aic"


def same(found, expected):
    """Equal but for the last of the kept digits, which linear algebra libraries may round differently."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == pytest.approx(expected, rel=0.011) if isinstance(expected, float) else found == expected


def test_recorded_summary_follows_from_the_public_data():
    if not DATA.is_dir():
        pytest.skip("the public measurements are not beside the checkout")
    record = recorded.load("aic_calibration")
    record.pop("date")
    assert same(json.loads(json.dumps(record_kernel_times.summarise(DATA))), record)


def write_grid(path, rows):
    text = "system,step,isl,latency\n" + "".join(f"{row}\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return path


def test_grids_are_read_by_key_and_sorted(tmp_path):
    path = write_grid(tmp_path / "grid.csv", ["a,8,4,0.5", "b,0,8,2.0", "a,0,4,0.25"])
    assert record_kernel_times.read_grid(path, ("system",)) == {
        ("a",): [(0, 4, 0.25), (8, 4, 0.5)],
        ("b",): [(0, 8, 2.0)],
    }
    with pytest.raises(ValueError, match="two for"):
        record_kernel_times.read_grid(write_grid(path, ["a,8,4,0.5", "a,8,4,0.6"]), ("system",))


def test_hit_ratios_need_both_shapes():
    times = [(0, 8, 4.0), (4, 4, 3.0), (6, 2, 1.0), (0, 16, 9.0)]
    assert record_kernel_times.hit_ratios(times, 8) == {"0.5": 0.75, "0.75": 0.25}
    assert record_kernel_times.hit_ratios(times, 16) == {}
    assert record_kernel_times.hit_ratios(times[1:], 8) == {}


@pytest.mark.parametrize(
    "row", ["0,-1,1.5", "0,8,nan", "0,8,inf", "0,8,-1", "0,8,0", "0,8", "x,8,1", "1.5,8,1", "0,8,1e999", "0,8,True"]
)
def test_measured_rows_that_are_no_measurements_are_named_with_file_and_line(row, tmp_path):
    path = tmp_path / "grid.csv"
    path.write_text(f"step,isl,latency\n0,4,1.5\n{row}\n")
    with pytest.raises(
        ValueError, match=r"^grid\.csv, line 3: expected whole numbers step and isl, and a positive latency$"
    ):
        record_kernel_times.read_grid(path, ())
    path.write_text("step,isl\n0,4\n")
    with pytest.raises(ValueError, match=r"^grid\.csv, line 1: expected the columns latency too$"):
        record_kernel_times.read_grid(path, ())
