"""Reads have one colour and pairs another: in every figure, in the explorer, and on every page."""

import base64
import io
import re
from pathlib import Path

import pytest
from matplotlib.image import imread

from cascade_lab.pictures.style import PAIRS, READS, VERMILLION

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = CHECKOUT / "cascade_lab" / "book" / "pages"
FIGURES = {path.stem: path for path in sorted((CHECKOUT / "figures").glob("*.svg"))}
COLOURS = {"reads": READS, "pairs": PAIRS}
# which ledgers a figure draws
SHOWN = {
    "02_who_reads": ["reads"],
    "02_programs": ["reads"],
    "02_ratio": ["reads"],
    "02_cache": ["reads"],
    "03_two_savings": ["reads", "pairs"],
    "03_triangle": ["pairs"],
    "03_limit": ["pairs"],
    "03_tiles": ["pairs"],
    "04_by_hand": ["pairs"],
    "04_masks": ["pairs"],
    "05_shares": ["pairs"],
    "06_triangle": ["pairs"],
    "06_wire": ["reads"],
    "07_tiles": ["pairs"],
    "08_reads": ["reads"],
}
# keys and weights, errors, times, and shares of several regions, models or traces, each with a colour of its own
NEITHER = {
    *("01_overflow", "01_rounding", "01_split", "02_break_even", "02_published", "02_tree", "03_tile_deviation"),
    *("04_laws", "04_mixes", "04_recorded", "05_capacity", "05_chords", "05_errors", "05_laws", "05_recorded"),
    *("06_two", "07_blocks", "08_round"),
}
BITMAP = ["04_by_hand", "04_masks"]  # grids of pairs, which an SVG carries as an image


def colours(path):
    return {found.upper() for found in re.findall(r"#[0-9a-fA-F]{6}\b", path.read_text(encoding="utf-8"))}


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("ledger", COLOURS)
def test_pages_and_figures_have_one_colour_for_a_ledger(ledger):
    found = {path.name: re.findall(rf"--{ledger}:\s*([^;]+);", path.read_text()) for path in PAGES.glob("*.css")}
    assert found.pop("style.css") == [COLOURS[ledger].lower()]
    assert not any(found.values()), "defined once"
    for path in PAGES.iterdir():
        drawn = colours(path) - ({COLOURS[ledger].upper()} if path.name == "style.css" else set())
        assert COLOURS[ledger].upper() not in drawn, path.name


@pytest.mark.parametrize("ledger", COLOURS)
def test_the_colour_of_a_ledger_can_be_read_as_text_on_white(ledger):
    assert 1.05 / (luminance(COLOURS[ledger]) + 0.05) >= 4.5


@pytest.mark.parametrize("name", SHOWN)
def test_a_figure_draws_a_ledger_in_its_colour_and_in_no_other(name):
    found = colours(FIGURES[name])
    if name in BITMAP:
        found |= {PAIRS.upper()} & pixels(FIGURES[name])
    assert {ledger for ledger, colour in COLOURS.items() if colour.upper() in found} == set(SHOWN[name])
    assert VERMILLION.upper() not in found


def pixels(path):
    """The colours of the bitmaps inside an SVG."""
    found = set()
    for data in re.findall(r'"data:image/png;base64,\s*([^"]+)"', path.read_text(encoding="utf-8")):
        image = (imread(io.BytesIO(base64.b64decode(data)))[..., :3] * 255).round().astype(int)
        found |= {"#{:02X}{:02X}{:02X}".format(*pixel) for pixel in image.reshape(-1, 3)}
    return found


def test_the_mask_of_a_draft_tree_is_of_pairs():
    assert PAIRS.upper() in pixels(FIGURES["02_tree"])


def test_every_figure_is_said_to_draw_a_ledger_or_none():
    assert {*SHOWN, *NEITHER} == set(FIGURES)
    assert not {*SHOWN} & {*NEITHER}
