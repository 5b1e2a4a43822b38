"""A run is judged by what its card allows: a perfect kernel meets every bound, and one that is 1.5x slower does not."""

from __future__ import annotations

import pytest

from cascade_lab.bench.gpu import batches, limits, report
from cascade_lab.bench.gpu.prefill import prefill_points
from cascade_lab.bench.gpu.session import PRESETS
from cascade_lab.bench.gpu.verify import verify_points
from cascade_lab.trigger import A100, B200
from tests.bench.perfect import CARD, ceilings, record_of

SCALE = {"num_kv_heads": 2, "head_dim": 8, "steps": 3, "merge_heads": 4}


def verdicts(record):
    return {bound["name"]: bound["verdict"] for bound in report.judge(record)}


@pytest.mark.parametrize("preset", ["full", "quick"])
@pytest.mark.parametrize("card", [CARD, A100, B200], ids=lambda card: card.name)
def test_a_kernel_as_fast_as_the_model_meets_every_bound(preset, card):
    record = record_of(PRESETS[preset], card)
    bounds = report.judge(record)
    assert [bound["name"] for bound in bounds if bound["verdict"] != "holds"] == []
    assert all(bound["of"] > 0 for bound in bounds)
    points = len(verify_points(PRESETS[preset]))
    assert len(record["sections"]["verify"]["rows"]) == points
    # all verify plans, prefills, batches, merges and the linear layers are held to the card's limit
    scale = PRESETS[preset]
    others = len(prefill_points(scale)) + len(batches.batch_points(scale)) + len(scale.linear_rows)
    assert bounds[0]["of"] == 3 * points + others + len(scale.merge_rows) * len(scale.merge_parts)


@pytest.mark.parametrize("preset", ["full", "quick"])
@pytest.mark.parametrize(
    ("section", "missed"),
    [
        (
            "verify",
            {
                "verify, cascade and fused: time over the model",
                "verify, cascade and fused where the model adds little: share of the limit",
            },
        ),
        ("batches", {"batches: time over the limit and launches"}),
        ("prefill", {"prefill: time over the model"}),
        ("linear", {"linear layer of most rows: time over the limit"}),
        ("costs", {"merges: time over the limit"}),
        ("peers", {"ours over the fastest other kernel: time ratio"}),
        (
            "counters",
            {
                "L2 sectors that attention read against the ledger, tiles counted: deviation",
                "DRAM bytes that cascade and fused read over the distinct ones",
            },
        ),
    ],
)
def test_a_kernel_that_takes_half_as_long_again_misses_a_bound_of_its_section(preset, section, missed):
    found = verdicts(record_of(PRESETS[preset], CARD, {section: 1.5}))
    assert {name for name, verdict in found.items() if verdict == "fails"} == missed


def test_a_time_that_no_card_can_reach_is_a_fault_of_the_clock():
    bounds = report.judge(record_of(PRESETS["quick"], CARD, {"prefill": 0.5}))
    assert bounds[0]["verdict"] == "fails"
    assert 1.5 < bounds[0]["worst"] <= 2.0


@pytest.mark.parametrize(("factor", "verdict"), [(1.1, "holds"), (1.3, "fails"), (0.9, "holds"), (0.7, "fails")])
def test_repeated_reads_cost_between_all_of_them_in_the_l2_and_none(factor, verdict):
    """The naive plan beyond both ends of what the L2 can make of it, by more than the slack."""
    record = record_of(PRESETS["quick"], CARD, {"verify": 1.0})
    for row in record["sections"]["verify"]["rows"]:
        low, high = limits.verify_ratios(CARD, record["scale"], row)
        row["plans"]["cascade"]["ratio_measured"] = factor * (high if factor > 1 else low)
    assert verdicts(record)["verify, naive / cascade beyond the L2: outside what the L2 can make of it"] == verdict


def test_ratios_are_judged_only_where_the_prefixes_exceed_the_l2():
    record = record_of(PRESETS["quick"], CARD, {"verify": 1.0})
    rows = record["sections"]["verify"]["rows"]
    beyond = [row for row in rows if row["topk"] > 1 and limits.verify_work(record["scale"], row).bytes > (
        CARD.l2_bytes * row["batch"])]  # fmt: skip
    assert 0 < len(beyond) < len(rows)
    assert report.judge(record)[3]["of"] == len(beyond)


def test_a_record_without_ceilings_is_not_judged_and_sections_that_are_missing_are_not_measured():
    assert report.judge({"sections": {}}) == []
    found = report.judge({"scale": SCALE, **ceilings(CARD)})
    assert {bound["verdict"] for bound in found} == {"not measured here"}


def test_the_limit_is_the_bytes_that_must_move_or_the_operations_that_must_be_done():
    # rows by branch: 2 x 3 rows on a prefix of 10, each with 1, 2, 3 drafts of its branch, in 5 requests
    point = {"length": 10, "topk": 2, "batch": 5, "group": 4, "rows": "branch"}
    work = limits.verify_work(SCALE, point)
    tokens, rows, pairs = 5 * (10 + 6), 5 * 6, 5 * (6 * 10 + 2 * (1 + 2 + 3))
    # K and V of two heads of 8 in two bytes; q and o likewise for 8 query heads, and a float32 lse
    assert work.bytes == 2 * tokens * 2 * 8 * 2 + rows * 8 * (2 * 8 * 2 + 4)
    assert work.flops == 4 * 8 * pairs * 8
    leaf = limits.verify_work(SCALE, point | {"rows": "leaf"})
    assert leaf.flops == 4 * 8 * 5 * (2 * 10 + 2 * 3) * 8
    assert work.limit(CARD) == work.bytes / CARD.bandwidth
    prefill = limits.prefill(CARD, SCALE, 4096, 0, 4)
    assert prefill.limit == 4 * 8 * (4096 * 4097 // 2) * 8 / CARD.matmul_rate


def test_a_batch_needs_the_sum_of_what_its_requests_need():
    prompts, hits = (7, 40, 12), (6, 32, 0)
    whole = limits.batch_work(SCALE, 4, prompts, hits)
    parts = [limits.batch_work(SCALE, 4, (n,), (hit,)) for n, hit in zip(prompts, hits, strict=True)]
    assert (whole.bytes, whole.flops) == (sum(x.bytes for x in parts), sum(x.flops for x in parts))
    assert parts[1].flops == 4 * 8 * 8 * sum(range(33, 41))


@pytest.mark.parametrize(
    ("count", "mean", "spread"), [(1, 100, 1.0), (2, 50, 1.0), (16, 16384, 1.0), (64, 16384, 1.0), (5, 1000, 0.2)]
)
def test_lognormal_lengths_have_their_mean_and_spread(count, mean, spread):
    lengths = batches.lognormal_lengths(count, mean, spread)
    assert len(lengths) == count
    assert sum(lengths) / count == pytest.approx(mean, rel=0.01)
    assert len(set(lengths)) == count
    if count > 2:
        assert sorted(lengths) != list(lengths) != sorted(lengths, reverse=True)


def test_the_batches_are_those_that_engines_have():
    """At full size: equal, lognormal, two long tails, rows beside decodes, and a prompt beside many decodes."""
    found = {mix.name: mix for mix in batches.mixes(PRESETS["full"])}
    tail = found["1 decode of 131072, 63 of 2048"]
    assert sorted(tail.prompts) == [2048] * 63 + [131072]
    assert [n - hit for n, hit in zip(tail.prompts, tail.hits, strict=True)] == [1] * 64
    mixed = found["255 decodes of 2048, a prompt of 8192"]
    rows = [n - hit for n, hit in zip(mixed.prompts, mixed.hits, strict=True)]
    assert sorted(rows) == [1] * 255 + [8192]
    beside = found["15 decodes of 16384, 64 rows over 16384"]
    assert (beside.prompts[-1], beside.hits[-1]) == (16448, 16384)
    assert len(found["64 decodes, lognormal around 16384"].prompts) == 64
