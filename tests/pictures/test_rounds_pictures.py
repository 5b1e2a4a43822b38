"""The numbers behind the pictures of speculative rounds are those of the tree and of the reads that they show."""

import pytest

from cascade_lab import DraftTree

figures = pytest.importorskip("cascade_lab.pictures.rounds")
pytest.importorskip("matplotlib")


def test_the_accepted_path_is_drawn_apart_from_what_is_refused():
    tree = DraftTree([1, -1, 1, 2])
    fig, data = figures.accepted_path(tree, ["b", "a", "c", "d"], ["q", "c", "e", "f"], [1, 2])
    assert data == {"accepted": ["a", "c"], "next": ["e"], "refused": [0, 3]}
    (ax,) = fig.axes
    wide = [line for line in ax.lines if line.get_linewidth() > 2]
    assert [line.get_xdata().tolist() for line in wide] == [[0, 1]]
    assert len(ax.lines) == 3
    texts = [text.get_text() for text in ax.texts]
    assert texts == ["b", "says q", "a", "says c", "c", "says e", "d", "says f"]
    assert {text.get_position()[0] for text in ax.texts if text.get_text() in "abcd"} == {0, 1, 2}


def test_nothing_accepted_leaves_nothing_to_say():
    _, data = figures.accepted_path(DraftTree.chain(2), ["a", "b"], ["c", "d"], [])
    assert data == {"accepted": [], "next": [], "refused": [0, 1]}


def test_reads_are_shared_out_over_the_tokens_of_all_rounds():
    rounds = [{"naive": 30, "cascade": 12}, {"naive": 40, "cascade": 13}]
    fig, data = figures.round_reads(rounds, [3, 2])
    assert data == {"tokens": [3, 2], "per token": {"naive": 14.0, "cascade": 5.0}}
    (ax,) = fig.axes
    assert [bar.get_height() for bar in ax.patches] == [30, 40, 12, 13]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["3 tokens", "2 tokens"]
