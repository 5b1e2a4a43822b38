"""What a notebook says of parameters that it does not accept: the name, what it takes, what it got, and the remedy."""

import math

import pytest

from cascade_lab.evidence.ranges import accept, as_many, multiple, one_of, rule, within


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (within(1, 32, topk=16), []),
        (within(1, 32, topk=1, head_dim=32), []),
        (within(0, steps=[0, 7]), []),
        (within(0.1, 0.9, hit_ratio=0.5), []),
        (within(1, 32, topk=33), ["topk: expected from 1 to 32, given 33: lower it to 32 or less"]),
        (within(1, topk=0), ["topk: expected 1 or more, given 0: raise it to 1 or more"]),
        (within(0, 9, n=[3, 12, 10]), ["n: expected each from 0 to 9, given 12: lower it to 9 or less"]),
        (within(0, 9, n=[-1, 12]), ["n: expected each from 0 to 9, given -1: raise it to 0 or more"]),
        (within(0, 9, n=[]), ["n: expected at least one value, each from 0 to 9, given []: add one"]),
        (within(0, 1, x=math.nan), ["x: expected from 0 to 1, given nan: raise it to 0 or more"]),
        (within(1, a=0, b=1, c=-2)[1:], ["c: expected 1 or more, given -2: raise it to 1 or more"]),
        (as_many(hits=[1], lengths=[5]), []),
        (
            as_many(hits=[1, 2], lengths=[5]),
            ["lengths: expected 2 values, as hits has, given [5]: add or remove some, or change hits"],
        ),
        (multiple(num_q_heads=6, num_kv_heads=3), []),
        (
            multiple(num_q_heads=8, num_kv_heads=3),
            ["num_q_heads: expected a positive multiple of num_kv_heads = 3, given 8: 9 is one"],
        ),
        (
            multiple(num_q_heads=0, num_kv_heads=2),
            ["num_q_heads: expected a positive multiple of num_kv_heads = 2, given 0: 2 is one"],
        ),
        (
            multiple(num_q_heads=4, num_kv_heads=0),
            ["num_q_heads: expected a multiple of a positive num_kv_heads, given 4: raise num_kv_heads, given 0"],
        ),
        (one_of(["a", "b"], traffic="a"), []),
        (one_of({"a": 1}, traffic="c"), ["traffic: expected one of a, given 'c': choose one of these"]),
        (rule(True, "n", "less", 3, "lower it"), []),
        (rule(False, "n", "less", 3, "lower it"), ["n: expected less, given 3: lower it"]),
    ],
)
def test_a_rule_names_the_parameter_and_the_remedy_or_says_nothing(found, expected):
    assert found == expected


def test_all_that_is_wrong_is_said_at_once():
    accept(within(1, topk=1), multiple(num_q_heads=4, num_kv_heads=2))
    with pytest.raises(ValueError, match=r"^parameters: topk: expected .*: raise it to 1 or more; steps: expected .*"):
        accept(within(1, topk=0), within(1, 2, page_size=2), within(1, 2, steps=[9]))
