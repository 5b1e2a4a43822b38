"""The numbers behind the pictures, and how a picture reaches the notebook and its files."""

import base64
import io
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cascade_lab import files
from cascade_lab.pictures import merge as pictures
from cascade_lab.pictures import show
from cascade_lab.pictures.style import AREAS, LAWS, SERIES, TRACES, save
from tests.limits import HANGS_S


@pytest.fixture
def shown(monkeypatch):
    """What `show` hands to the notebook: (data, metadata) per output."""
    outputs = []

    def display(data, *, metadata=None, raw):
        assert raw
        outputs.append((data, metadata))

    monkeypatch.setattr("IPython.display.display", display)
    return outputs


def small_figure():
    return pictures.split_keys([1, 3], [2, 6], 1)[0]


def test_split_keys_gives_the_state_of_each_side_and_of_the_whole():
    _, data = pictures.split_keys([1, 2, 3, 4, 6, 8], [6, 3, 2, 0, 3, 9], 3)
    assert [data["o_a"], data["o_b"], data["o_whole"]] == pytest.approx([3, 5, 4.5], abs=1e-15)
    sums = [math.exp(data[f"lse_{side}"]) for side in ("a", "b", "whole")]
    assert sums == pytest.approx([6, 18, 24], rel=1e-15)


def test_split_keys_draws_one_bar_of_the_right_height_per_key():
    fig, _ = pictures.split_keys([1, 2, 3.5, 4], [6, 3, 2, 0], 1)
    assert [bar.get_height() for bar in fig.axes[0].patches] == [1, 2, 3.5, 4]


def test_unshifted_weights_are_right_in_the_middle_and_lost_where_the_format_ends():
    levels = [-110.0, -30.0, -8.0, 0.0, 8.0, 11.0, 11.5, 88.0, 88.5, 89.0]
    _, data, reach = pictures.overflow(levels)
    right = 1 / (1 + math.exp(-1))
    assert data["shifted"] == pytest.approx([right] * len(levels), abs=1e-6)
    # float16 ends at 65504 = e^11.09, float32 at e^88.7; below, the last subnormal numbers are e^-17 and e^-103
    assert [math.isfinite(w) for w in data["float16"]] == [False, False, *[True] * 4, *[False] * 4]
    assert [math.isfinite(w) for w in data["float32"]] == [False, *[True] * 8, False]
    assert data["float16"][2:5] == pytest.approx([right] * 3, abs=1e-3)
    assert data["float32"][1:8] == pytest.approx([right] * 7, abs=1e-6)
    # the sum e^c + e^(c - 1) ends 0.31 before e^c does, and a number over infinity is 0
    assert data["float16"][5] == data["float32"][8] == 0
    assert reach == {"float16": (-8.0, 8.0), "float32": (-30.0, 88.0)}


def test_the_reach_of_a_format_leaves_out_weights_that_are_coarse():
    levels = [c / 4 for c in range(-80, 60)]
    _, data, reach = pictures.overflow(levels, slack=0.05)
    low, high = (levels.index(c) for c in reach["float16"])
    off = [abs(w / right - 1) for w, right in zip(data["float16"], data["shifted"], strict=True)]
    assert max(off[low : high + 1]) <= 0.05 < min(off[low - 1], off[high + 1])
    assert math.isfinite(data["float16"][low - 1])


def test_overflow_follows_the_gap():
    _, data, _ = pictures.overflow([0.0, 1.0], gap=3.0)
    assert data["shifted"] == pytest.approx([1 / (1 + math.exp(-3))] * 2, abs=1e-6)


def test_rounding_errors_are_ordered_by_dtype_and_bounded_for_any_number_of_splits(backend):
    g = torch.Generator().manual_seed(3)
    scores = 2 * torch.randn(5, 24, generator=g, dtype=torch.float64)
    values = torch.randn(24, 9, generator=g, dtype=torch.float64)
    _, data = pictures.rounding(scores, values, [1, 3, 24], backend=backend)
    assert [len(errors) for errors in data.values()] == [3, 3, 3]
    for name, slack in (("bfloat16", 1.01), ("float16", 1.01), ("float32", 16)):
        unit = torch.finfo(getattr(torch, name)).eps / 2 * float(values.abs().max())
        assert all(0 < error <= slack * unit for error in data[name]), name
    assert all(b > f > 100 * s for b, f, s in zip(data["bfloat16"], data["float16"], data["float32"], strict=True))


def test_show_displays_a_png_with_its_alt_text_and_then_the_caption(shown, monkeypatch, tmp_path):
    monkeypatch.delenv(files.FIGURES, raising=False)
    monkeypatch.chdir(tmp_path)
    show(small_figure(), "name", alt="two bars", caption="B is *heavier*.")
    (image, metadata), (caption, _) = shown
    assert base64.b64decode(image["image/png"]).startswith(b"\x89PNG")
    assert metadata == {"image/png": {"alt": "two bars", "figure": "name"}}
    assert image["text/plain"] == "two bars"
    assert caption == {"text/markdown": "B is *heavier*.", "text/plain": "B is *heavier*."}
    assert list(tmp_path.iterdir()) == []


def test_show_saves_the_same_bytes_twice_without_date_or_version(shown, monkeypatch, tmp_path):
    for folder in ("first", "second/deep"):
        monkeypatch.setenv(files.FIGURES, str(tmp_path / folder))
        show(small_figure(), "name", alt="two bars", caption="Read.", png=True)
        show(small_figure(), "vector", alt="two bars", caption="Read.")
    first, second = tmp_path / "first", tmp_path / "second/deep"
    assert sorted(path.name for path in first.iterdir()) == ["name.png", "name.svg", "vector.svg"]
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()
    inside, saved = base64.b64decode(shown[0][0]["image/png"]), (first / "name.png").read_bytes()
    assert [int.from_bytes(png[16:20], "big") for png in (inside, saved)] == [704, 1408]
    svg = (first / "name.svg").read_text()
    assert "dc:date" not in svg
    assert "Matplotlib v" not in svg


def test_the_readme_shows_pictures_of_twice_the_width_that_they_have_in_their_notebooks():
    checkout = Path(__file__).resolve().parents[2]
    widths = {}
    for path in sorted((checkout / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            for output in cell.get("outputs", []):
                about = output.get("metadata", {}).get("image/png", {})
                if "figure" in about:
                    bitmap = base64.b64decode("".join(output["data"]["image/png"]))
                    widths[about["figure"]] = int.from_bytes(bitmap[16:20], "big")
    drawn = sorted((checkout / "figures").glob("*.png"))
    assert len(drawn) > 7
    for path in drawn:
        assert int.from_bytes(path.read_bytes()[16:20], "big") == 2 * widths[path.stem], path.name


def test_a_picture_that_no_two_runs_draw_alike_names_no_figure(shown, monkeypatch, tmp_path):
    monkeypatch.setenv(files.FIGURES, str(tmp_path))
    show(small_figure(), None, alt="a clock", caption="Read.")
    assert shown[0][1] == {"image/png": {"alt": "a clock"}}
    assert list(tmp_path.iterdir()) == []


def test_pictures_are_opaque_white_and_of_one_size(shown, monkeypatch):
    from matplotlib.image import imread

    monkeypatch.delenv(files.FIGURES, raising=False)
    for fig in (small_figure(), pictures.overflow([0.0, 1.0])[0]):
        show(fig, "name", alt="a picture", caption="Read.")
    for data, _ in shown[::2]:
        image = imread(io.BytesIO(base64.b64decode(data["image/png"])))
        assert image.shape[:2] == (396, 704)
        assert image[..., 3:].min(initial=1.0) == 1.0
        assert image[0, 0, :3].tolist() == [1, 1, 1]


@pytest.mark.parametrize(("alt", "caption"), [("", "Read."), (" ", "Read."), ("two bars", "")])
def test_show_refuses_a_picture_without_words(shown, alt, caption):
    with pytest.raises(ValueError, match="alt, caption"):
        show(small_figure(), "name", alt=alt, caption=caption)
    assert shown == []


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_a_saved_figure_is_the_kind_of_its_suffix_and_the_same_bytes_twice(kind, tmp_path):
    paths = [tmp_path / "new" / f"first.{kind}", tmp_path / f"second.{kind.upper()}"]
    for path in paths:
        save(small_figure(), path)
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert first.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[kind])


@pytest.mark.parametrize("series", [SERIES, LAWS, TRACES], ids=["series", "laws", "traces"])
def test_no_series_is_told_apart_by_colour_alone(series):
    for key in ("color", "marker"):
        assert len({look[key] for look in series}) == len(series)
    # six laws share five line styles, of which the solid one comes back last
    assert len({look["linestyle"] for look in series}) == min(len(series), 5)
    assert series[0]["linestyle"] == "-"


def test_no_area_is_told_apart_by_colour_alone():
    colours, hatches = zip(*AREAS, strict=True)
    assert len(set(colours)) == len(set(hatches)) == len(AREAS)


def test_importing_the_package_or_this_module_loads_no_matplotlib():
    code = "import sys, cascade_lab; print('cascade_lab.evidence' in sys.modules, 'matplotlib' in sys.modules);"
    code += "import cascade_lab.pictures.merge; print('matplotlib' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANGS_S)
    assert found.stdout.split() == ["False", "False", "False"]
