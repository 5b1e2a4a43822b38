"""What a measured time is held to: the least that the card allows, and what the trigger's model predicts on it.

    limit = max(bytes / copy rate, flops / matrix rate)

has the bytes that must move once and the operations of visible pairs alone. A perfect kernel may still need longer, for
launches, rows that do not fill their tile, keys that another tile reads again, and too few programs for the card: these
are in `trigger.predict_branches`, here with the rates that the same run measured. Everything follows from the record,
and nothing is fitted to the times that are judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cascade_lab.bench.gpu.session import DTYPE
from cascade_lab.prefix import interactions
from cascade_lab.regions import triangle
from cascade_lab.trigger import DeviceModel, Prediction, predict_branches

# a pass and the reduction of its splits
PASS_LAUNCHES = 2
_ALL_CACHED = 1 << 62


@dataclass(frozen=True)
class Expected:
    """Seconds of one piece of work on one card.

    Attributes:
        limit: no kernel is faster.
        predicted: by the model, never below the limit.
        launches: the part of `predicted` that is launches, whose true cost a graph hides in part.
    """

    limit: float
    predicted: float
    launches: float


@dataclass(frozen=True)
class Work:
    """Bytes that must move once, and operations of the visible pairs."""

    bytes: int
    flops: int

    def limit(self, card: DeviceModel) -> float:
        return max(self.bytes / card.bandwidth, self.flops / card.matmul_rate)


def card(record: Mapping) -> DeviceModel:
    """The device of a record, from its ceilings and its provenance.

    Raises:
        KeyError: a record without its ceilings.
    """
    rates = {row["what"]: row for row in record["sections"]["ceilings"]["rows"]}
    copies = [rates[name]["bytes_per_s"] for name in ("copy memory", "copy L2")]
    return DeviceModel(
        name="measured",
        bandwidth=copies[0],
        l2_bandwidth=max(copies),
        l2_bytes=int(record["provenance"]["L2 bytes"]),
        launch=rates["one-element addition"]["seconds"],
        matmul_rate=max(row["flops_per_s"] for row in rates.values() if "flops_per_s" in row),
        num_sms=int(record["provenance"]["multiprocessors"]),
        source="ceilings of this record",
    )


def pass_work(scale: Mapping, group: int, rows: int, tokens: int, pairs: int) -> Work:
    """Work of `rows` query rows on `tokens` distinct cached tokens, of which they see `pairs` per query head.

    Args:
        scale: of the record: heads, head dim.
        group: query heads per KV head.
    """
    heads, dim = scale["num_kv_heads"], scale["head_dim"]
    state_rows = rows * group * heads
    # q and o in the cache's dtype, lse in float32
    moved = 2 * tokens * heads * dim * DTYPE.itemsize + state_rows * (2 * dim * DTYPE.itemsize + 4)
    return Work(moved, 4 * dim * pairs * group * heads)


def verify_work(scale: Mapping, point: Mapping) -> Work:
    """Work of a point of section verify, the same for all plans."""
    length, topk, steps = point["length"], point["topk"], scale["steps"]
    rows = topk if point["rows"] == "leaf" else topk * steps
    paths = topk * (steps if point["rows"] == "leaf" else triangle(steps))
    tokens, pairs = length + topk * steps, rows * length + paths
    return pass_work(scale, point["group"], *(point["batch"] * n for n in (rows, tokens, pairs)))


def verify(card: DeviceModel, scale: Mapping, point: Mapping) -> dict[str, Expected]:
    """Per plan what is expected at a point of section verify."""
    limit = verify_work(scale, point).limit(card)
    return {plan: _expected(limit, found) for plan, found in _predictions(card, scale, point).items()}


def verify_ratios(card: DeviceModel, scale: Mapping, point: Mapping) -> tuple[float, float]:
    """The naive plan's time over the cascade's when every repeated read is in the L2, and when none is; rising."""
    cached = replace(card, l2_bytes=_ALL_CACHED)
    uncached = replace(card, l2_bandwidth=card.bandwidth)
    found = [_predictions(model, scale, point) for model in (cached, uncached)]
    low, high = sorted(plans["naive"].seconds / plans["cascade"].seconds for plans in found)
    return low, high


def _predictions(card: DeviceModel, scale: Mapping, point: Mapping) -> dict[str, Prediction]:
    return predict_branches(
        point["length"],
        point["topk"],
        scale["steps"],
        point["batch"],
        device_model=card,
        num_q_heads=point["group"] * scale["num_kv_heads"],
        num_kv_heads=scale["num_kv_heads"],
        head_dim=scale["head_dim"],
        dtype=DTYPE,
        rows=point["rows"],
    )


def prefill(card: DeviceModel, scale: Mapping, new: int, hit: int, group: int) -> Expected:
    """One prompt's suffix of `new` rows over a hit: one causal pass, which is a single branch of so many tokens."""
    work = pass_work(scale, group, new, new + hit, interactions(new + hit, hit))
    heads = scale["num_kv_heads"]
    found = predict_branches(
        hit,
        1,
        new,
        1,
        device_model=card,
        num_q_heads=group * heads,
        num_kv_heads=heads,
        head_dim=scale["head_dim"],
        dtype=DTYPE,
    )
    return _expected(work.limit(card), found["naive"])


def batch_work(scale: Mapping, group: int, prompts: Sequence[int], hits: Sequence[int]) -> Work:
    """Work of one causal call on requests of any lengths: rows hits[r] to prompts[r] - 1 of each."""
    rows = sum(n - hit for n, hit in zip(prompts, hits, strict=True))
    pairs = sum(interactions(n, hit) for n, hit in zip(prompts, hits, strict=True))
    return pass_work(scale, group, rows, sum(prompts), pairs)


def balanced(card: DeviceModel, work: Work) -> Expected:
    """What is expected of a pass whose programs end together: its limit, and the launches."""
    limit, launches = work.limit(card), PASS_LAUNCHES * card.launch
    return Expected(limit, limit + launches, launches)


def linear(card: DeviceModel, width: int, out_width: int, rows: int) -> Expected:
    """A linear layer: weights, inputs and outputs once, one launch."""
    moved = DTYPE.itemsize * (width * out_width + rows * (width + out_width))
    limit = Work(moved, 2 * rows * width * out_width).limit(card)
    return Expected(limit, limit + card.launch, card.launch)


def merge_bytes(scale: Mapping, rows: int, parts: int) -> int:
    """What a merge of `parts` float32 states moves: all of them, and one state with o in the cache's dtype."""
    heads, dim = scale["merge_heads"], scale["head_dim"]
    return rows * heads * (parts * (dim + 1) * 4 + dim * DTYPE.itemsize + 4)


def merge(card: DeviceModel, scale: Mapping, rows: int, parts: int) -> Expected:
    """One merge: its bytes, one launch."""
    limit = Work(merge_bytes(scale, rows, parts), 0).limit(card)
    return Expected(limit, limit + card.launch, card.launch)


def _expected(limit: float, found: Prediction) -> Expected:
    return Expected(limit, max(limit, found.seconds), found.terms["launch"])
