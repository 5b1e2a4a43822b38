"""The numbers behind the pictures of the other regions are those of the laws they show."""

import pytest

from cascade_lab.regions import CSA, HCA, Chunked, Dense, Mixture, SlidingWindow, TopKBlocks

figures = pytest.importorskip("cascade_lab.pictures.regions")
style = pytest.importorskip("cascade_lab.pictures.style")
pytest.importorskip("matplotlib")


def test_masks_draw_every_pair_once():
    regions = {str(r): r for r in (Dense(), SlidingWindow(5), TopKBlocks(4, 2), CSA(4, 2, 3), HCA(5, 4))}
    fig, data = figures.region_masks(regions, 24, 10)
    assert data == {name: (r.total(10), r.total(24) - r.total(10)) for name, r in regions.items()}
    for ax, name in zip(fig.axes, regions, strict=False):
        pixels = ax.images[0].get_array()
        assert ((pixels == 1).sum(), (pixels == 2).sum()) == data[name]
        assert pixels[:10].max() == 1
        assert set(pixels[10:].ravel().tolist()) == {0, 2}


def test_one_region_fills_one_panel():
    _, data = figures.region_masks({"dense": Dense()}, 8, 4)
    assert data == {"dense": (10, 26)}


def test_laws_are_drawn_over_lengths_and_over_hits():
    regions = {"dense": Dense(), "window": SlidingWindow(64), "chunks": Chunked(512)}
    fig, data = figures.region_laws(regions, [64, 256, 1024], 2048, hit_ratio=0.25)
    for name, region in regions.items():
        assert data[name]["lengths"] == [float(region.remaining(n, n // 4)) for n in (64, 256, 1024)]
        assert data[name]["hits"] == [float(region.remaining(2048, 32 * i)) for i in range(65)]
    left, right = fig.axes
    assert [list(line.get_ydata()) for line in left.lines[:3]] == [found["lengths"] for found in data.values()]
    assert [text.get_text() for text in right.get_legend().get_texts()] == list(regions)


def test_mixes_are_labelled_apart():
    models = {name: Mixture(((k, Dense()), (1, SlidingWindow(16)))) for name, k in (("a", 1), ("b", 2), ("c", 3))}
    fig, data = figures.mix_laws(models, [256, 1024], 0.5)
    assert data == {name: [float(mix.remaining(n, n // 2)) for n in (256, 1024)] for name, mix in models.items()}
    heights = sorted(text.get_position()[1] for text in fig.axes[0].texts if text.get_text() in models)
    assert all(above - below > 0.0139 for below, above in zip(heights, heights[1:], strict=False))


def test_recorded_ratios_say_how_far_they_are_between_the_laws():
    _, data = figures.recorded_ratios({"on 1 - h^2": {"0.5": 0.75}, "on 1 - h": {"0.25": 0.75, "0.5": 0.5}})
    assert data == {"on 1 - h^2": [(0.5, 0.75, 1.0)], "on 1 - h": [(0.25, 0.75, 0.0), (0.5, 0.5, 0.0)]}


@pytest.mark.parametrize(("n", "text"), [(512, "512"), (1024, "1K"), (32768, "32K"), (2**20, "1M"), (1500, "1500")])
def test_lengths_are_written_short(n, text):
    assert style.tokens(n) == text
