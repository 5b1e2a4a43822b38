"""The numbers behind the pictures of the prefix hit are those of the laws they show."""

import pytest

from cascade_lab import interactions, remaining
from cascade_lab.evidence.timing import Ratio
from cascade_lab.prefix import executed_tiles

figures = pytest.importorskip("cascade_lab.pictures.prefix")
pytest.importorskip("matplotlib")


@pytest.mark.parametrize(("n", "hit"), [(8, 4), (8, 7), (5, 1), (12, 5)])
def test_triangle_draws_every_pair_once(n, hit):
    fig, data = figures.hit_triangle(n, hit)
    assert data == {
        "saved": interactions(hit),
        "rectangle": (n - hit) * hit,
        "triangle": interactions(n - hit),
    }
    assert len(fig.axes[0].patches) == interactions(n)


def test_exact_points_lie_below_the_limit_by_at_most_a_quarter_of_a_token():
    _, data = figures.hit_limit([8, 32, 64], steps=4)
    assert data[8]["exact"] == [1, float(remaining(8, 2)), float(remaining(8, 4)), float(remaining(8, 6)), 0]
    assert data[32]["h"] == [0, 0.25, 0.5, 0.75, 1]
    for n in (8, 32, 64):
        assert data[n]["gap"] == pytest.approx(1 / (4 * (n + 1)))


@pytest.mark.parametrize(("n", "hit", "block_m", "block_n"), [(24, 10, 4, 4), (20, 3, 8, 4), (9, 8, 4, 2)])
def test_drawn_tiles_are_the_executed_ones(n, hit, block_m, block_n):
    _, data = figures.hit_tiles(n, hit, block_m, block_n)
    assert data == {
        "skipping": executed_tiles(n, hit, block_m, block_n),
        "masking": -(-(n - hit) // block_m) * -(-n // block_n),
        "pairs": interactions(n, hit),
    }


def test_tile_deviation_is_the_derived_one():
    _, data = figures.tile_deviation([512, 1024, 2048], [0.25, 0.5], 128)
    for h, values in data.items():
        assert values == pytest.approx([-h * 128 / ((1 + h) * (n + 128)) for n in (512, 1024, 2048)])


def test_measured_points_stand_beside_their_own_law():
    interaction = {0: Ratio(1, 1, 1), 0.5: Ratio(0.8, 0.7, 0.9)}
    _, data = figures.measured_laws(interaction, {0.25: Ratio(0.7, 0.6, 0.9)})
    assert data == {"attention": [(0, 1, 1), (0.5, 0.8, 0.75)], "linear layer": [(0.25, 0.7, 0.75)]}
