"""The numbers behind the pictures of ranks are the areas and bytes that they show."""

import numpy as np
import pytest

from cascade_lab.sharding import split_tokens

figures = pytest.importorskip("cascade_lab.pictures.ranks")
pytest.importorskip("matplotlib")


def test_the_triangle_is_cut_into_the_areas_of_its_rows():
    _, areas = figures.triangle_cut(30, 4, ("contiguous", "zigzag"))
    rows = np.tril(np.ones((30, 30), int)).sum(1)
    for layout, found in areas.items():
        shares = split_tokens(30, 4, layout)
        assert found == tuple(sum(int(rows[i:j].sum()) for i, j in slices) for slices in shares)
    assert sum(areas["zigzag"]) == sum(areas["contiguous"]) == 465
    assert max(areas["zigzag"]) < max(areas["contiguous"])


def test_every_rank_is_drawn_with_the_squares_of_its_rows():
    fig, areas = figures.triangle_cut(8, 2, ("contiguous", "zigzag"))
    for ax, layout in zip(fig.axes, areas, strict=True):
        drawn = [0.0] * 2
        owner = {piece: rank for rank, slices in enumerate(split_tokens(8, 2, layout)) for piece in slices}
        for patch in ax.patches:
            x, y = patch.get_xy()[:-1].T
            area = abs(float(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1)))) / 2
            drawn[owner[round(y.min()), round(y.max())]] += area
        assert drawn == pytest.approx(areas[layout])
        assert layout in ax.get_title(loc="left")


def test_bytes_meet_where_the_context_pays_for_the_states():
    fig, data = figures.bytes_by_context([4, 64, 1024], 3.0, {"gather": 96.0, "exchange": 36.0})
    assert data == {"not read": [12.0, 192.0, 3072.0], "break-even": {"gather": 32.0, "exchange": 12.0}}
    (ax,) = fig.axes
    points = [line.get_xydata().tolist() for line in ax.lines if line.get_marker() == "o"]
    assert points == [[[32.0, 96.0]], [[12.0, 36.0]]]
