"""The picture of the collection draws what the plans read and what a hit leaves."""

import pytest

from cascade_lab.pictures import thesis


@pytest.mark.parametrize(("topk", "steps"), [(1, 3), (2, 2), (4, 1)])
def test_every_branch_reads_the_prefix_or_one_pass_does(topk, steps):
    _, bars = thesis.who_reads(5, topk, steps)
    assert bars == {"naive": [["prefix", "draft"]] * topk, "cascade": [["prefix"], *[["draft"]] * topk]}


def test_widths_and_titles_are_the_tokens_that_are_read():
    fig, bars = thesis.who_reads(7, 3, 2)
    for ax, (plan, parts) in zip(fig.axes, bars.items(), strict=True):
        tokens = sum({"prefix": 7, "draft": 2}[part] for each in parts for part in each)
        assert sum(bar.get_width() for bar in ax.patches) == pytest.approx(tokens)
        assert f"= {tokens} tokens read" in ax.get_title("left")
        assert ax.get_title("left").startswith(plan)


@pytest.mark.parametrize(("n", "hit"), [(8, 4), (6, 1), (5, 4)])
def test_shares_are_those_of_the_closed_forms(n, hit):
    _, data = thesis.two_savings(24, 4, 3, n, hit)
    assert data["saved by a cascade"] == {"reads": pytest.approx((24 + 12) / 108), "pairs": 1}
    left = 1 - hit * (hit + 1) / (n * (n + 1))
    assert data["saved by a hit"] == {"reads": 1, "pairs": pytest.approx(left)}
    assert data["naive"] == [["prefix", "draft"]] * 4
    assert data["cascade"] == [["prefix"], *[["draft"]] * 4]


def test_the_triangle_has_a_square_for_each_pair():
    fig, _ = thesis.two_savings(6, 2, 1, 7, 3)
    (triangle,) = [ax for ax in fig.axes if ax.get_xlabel() == "key token"]
    assert len(triangle.patches) == 7 * 8 // 2
    assert "22 of 28 pairs are left" in triangle.get_title("left")
