"""The trigger: its bytes are the ledger's, its seconds the stated formula, its sign checked against published runs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cascade_lab import DraftTree, VerifyBatch, ledger
from cascade_lab.backends.triton.config import tile_for
from cascade_lab.drafts import PLANS, ROWS
from cascade_lab.rules import flashinfer_rule, rule_table, sglang_rule, vllm_rule
from cascade_lab.trigger import (
    A100,
    B200,
    DEVICES,
    H100,
    H200,
    DeviceModel,
    break_even_prefix,
    calibrate,
    predict_branches,
    should_cascade,
)
from tests.verify import CHAIN, FORK, SHUFFLED, STAR

HEADS = dict(num_q_heads=32, num_kv_heads=8, head_dim=128)
ROUND = DeviceModel("round", 1e9, 1e10, 1 << 30, 1e-3, 1e18, 1, "made up, for arithmetic by hand")


def branches(batch: int, topk: int, length: int, steps: int, rows: str = "branch", **options) -> VerifyBatch:
    return VerifyBatch([length] * batch, [DraftTree.branches(topk, steps)] * batch, rows=rows, **options)


BATCHES = {
    "worked": branches(1, 4, 1000, 3, rows="leaf"),
    "worked branches": branches(1, 4, 1000, 3),
    "nodes": branches(3, 4, 130, 3, rows="node"),
    "one branch": branches(2, 1, 40, 5, rows="node"),
    "ragged": VerifyBatch([13, 0, 5, 16], [DraftTree(t) if t else None for t in (FORK, SHUFFLED, None, STAR)], 4),
    "shared": VerifyBatch([9, 12, 8], [DraftTree(FORK), None, DraftTree(CHAIN)], 4, shared_prefix_len=8),
    "many rows": branches(1, 8, 600, 8, rows="node"),
    "ragged branches": VerifyBatch(
        [13, 0, 5, 16], [DraftTree(FORK), DraftTree(SHUFFLED), None, DraftTree(STAR)], 4, "branch"
    ),
    "shared branches": VerifyBatch(
        [9, 12, 8], [DraftTree(FORK), None, DraftTree(CHAIN)], 4, "branch", shared_prefix_len=8
    ),
    "long branches": branches(1, 2, 300, 40),
}


@pytest.mark.parametrize("heads", [(8, 8, 128), (32, 8, 128), (16, 2, 256), (8, 1, 576)], ids=str)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_predicted_bytes_are_those_of_the_ledger(batch, heads):
    """Lengths alone give what the page tables give: loads with row tiles counted, and distinct bytes."""
    H_q, H_kv, D = heads
    decision = should_cascade(
        batch, H100, num_q_heads=H_q, num_kv_heads=H_kv, head_dim=D, head_dim_v=64, dtype=torch.float16
    )
    per_token = H_kv * (D + 64) * 2
    for plan in PLANS:
        levels = batch.levels(plan)
        book = ledger(levels, num_q_heads=H_q, num_kv_heads=H_kv)
        loaded = 0
        for level, part in zip(levels, book.levels, strict=True):
            loaded += part.tile_tokens(
                tile_for(int(level.cu_seqlens_q.diff().max()) * H_q // H_kv, D, torch.bfloat16).block_m
            )
        prediction = decision.predictions[plan]
        assert prediction.plan == plan
        assert prediction.compulsory_bytes == book.kv_tokens_unique * per_token
        assert prediction.bytes == loaded * per_token
        assert prediction.reread_bytes == (loaded - book.kv_tokens_unique) * per_token
        assert prediction.seconds == pytest.approx(sum(prediction.terms.values()))
        assert min(prediction.terms.values()) >= 0


def test_rows_times_group_fill_tiles():
    """64 nodes x 8 heads are 512 packed rows, four tiles of 128: the prefix is loaded four times."""
    batch = branches(1, 8, 1024, 8, rows="node")
    fused = should_cascade(batch, H100, num_q_heads=8, num_kv_heads=1, head_dim=128).predictions["fused"]
    assert fused.bytes == 4 * (1024 + 64) * 512
    assert fused.compulsory_bytes == (1024 + 64) * 512


def test_seconds_by_hand():
    """L = 1000, topk = 4, S = 3, a row per leaf, one head of 64 in 16 bits: 256 bytes a token, 512 of queries."""
    decision = should_cascade(BATCHES["worked"], ROUND, num_q_heads=1, num_kv_heads=1, head_dim=64)
    naive, cascade, fused = (decision.predictions[plan] for plan in PLANS)
    assert (naive.launches, cascade.launches, fused.launches) == (1, 3, 1)
    assert (naive.bytes, cascade.bytes, fused.bytes) == (4012 * 256, 1012 * 256, 1012 * 256)
    memory = (1012 * 256 + 512 + 512) / 1e9
    assert naive.terms == pytest.approx(
        {"launch": 1e-3, "memory": memory, "reread": 3000 * 256 / 1e10, "compute": 0, "merge": 0}
    )
    # queries once per level; two states of 4 rows, 64 + 1 float32 each, written and read
    assert cascade.terms == pytest.approx(
        {"launch": 3e-3, "memory": memory + 512 / 1e9, "reread": 0, "compute": 0, "merge": 2 * 2 * 4 * 65 * 4 / 1e9}
    )
    assert fused.terms == pytest.approx({"launch": 1e-3, "memory": memory, "reread": 0, "compute": 0, "merge": 0})
    assert not decision.cascade
    assert decision.plan == "fused"
    free = replace(ROUND, launch=0.0)
    assert should_cascade(BATCHES["worked"], free, num_q_heads=1, num_kv_heads=1, head_dim=64).cascade


def test_seconds_of_branches_by_hand():
    """The same reads for three times the rows: 12 x 128 bytes of queries, and of outputs, and states of 12 rows."""
    decision = should_cascade(BATCHES["worked branches"], ROUND, num_q_heads=1, num_kv_heads=1, head_dim=64)
    naive, cascade, fused = (decision.predictions[plan] for plan in PLANS)
    assert (naive.bytes, cascade.bytes, fused.bytes) == (4012 * 256, 1012 * 256, 1012 * 256)
    memory = (1012 * 256 + 1536 + 1536) / 1e9
    assert naive.terms == pytest.approx(
        {"launch": 1e-3, "memory": memory, "reread": 3000 * 256 / 1e10, "compute": 0, "merge": 0}
    )
    assert cascade.terms == pytest.approx(
        {"launch": 3e-3, "memory": memory + 1536 / 1e9, "reread": 0, "compute": 0, "merge": 2 * 2 * 12 * 65 * 4 / 1e9}
    )
    assert fused.terms == pytest.approx({"launch": 1e-3, "memory": memory, "reread": 0, "compute": 0, "merge": 0})


def test_matrix_products_count_what_exceeds_the_loads():
    slow = replace(ROUND, matmul_rate=1e9)
    naive = should_cascade(BATCHES["worked"], slow, num_q_heads=1, num_kv_heads=1, head_dim=64).predictions["naive"]
    # 4012 keys x 16 padded rows x 2 x (64 + 64)
    assert naive.flops == 4012 * 16 * 256
    loads = (1012 * 256 + 512) / 1e9 + 3000 * 256 / 1e10
    assert naive.terms["compute"] == pytest.approx(4012 * 16 * 256 / 1e9 - loads)


def test_repeated_reads_hit_the_cache_when_it_fits_or_readers_run_in_step():
    def reread(device: DeviceModel) -> float:
        batch = branches(1, 4, 1000, 3, rows="leaf")
        terms = should_cascade(batch, device, num_q_heads=1, num_kv_heads=1, head_dim=64).predictions["naive"].terms
        return terms["reread"]

    hit, miss = 3000 * 256 / 1e10, 3000 * 256 / 1e9
    # one multiprocessor runs the four readers one after another
    assert reread(ROUND) == pytest.approx(hit)
    assert reread(replace(ROUND, l2_bytes=1012 * 256)) == pytest.approx(hit)
    assert reread(replace(ROUND, l2_bytes=1012 * 256 - 1)) == pytest.approx(miss)
    # four multiprocessors run them together
    assert reread(replace(ROUND, l2_bytes=0, num_sms=4)) == pytest.approx(hit)


def test_idle_multiprocessors_slow_a_small_launch():
    """8 heads of one long request cut into 15 parts are 120 programs; of a short one, uncut, they are 8."""
    for length, programs in ((4000, 8 * 15), (200, 8)):
        batch = VerifyBatch([length], [DraftTree([-1])])
        naive = should_cascade(batch, H100, num_q_heads=8, num_kv_heads=8, head_dim=128).predictions["naive"]
        busy = programs / 132
        fetched = ((length + 1) * 8 * 512 + 8 * 256) / 3.35e12 / busy + 8 * 256 / 3.35e12
        assert naive.terms["memory"] == pytest.approx(fetched)
        assert naive.launches == (2 if programs > 8 else 1)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_one_branch_is_never_a_cascade(device, rows):
    for length in (0, 100, 10_000, 1_000_000):
        decision = should_cascade(branches(16, 1, length, 5, rows), device, **HEADS)
        assert not decision.cascade
        assert decision.plan != "cascade"
        assert "topk = 1" in decision.reason
        assert "one causal call" in decision.reason


def test_one_row_per_request_is_never_a_cascade_unless_requests_share_a_prefix():
    trees = [DraftTree([-1])] * 64
    apart = should_cascade(VerifyBatch([8192] * 64, trees), H100, **HEADS)
    assert not apart.cascade
    together = should_cascade(VerifyBatch([8192] * 64, trees, shared_prefix_len=8192), H100, **HEADS)
    assert together.cascade
    assert together.plan == "cascade"
    assert together.predictions["cascade"].compulsory_bytes == (8192 + 64) * 4096
    assert together.predictions["fused"].bytes == 64 * 8193 * 4096


@pytest.mark.parametrize("trees", [[], [None, None]])
def test_nothing_to_verify_is_nothing_to_decide(trees):
    decision = should_cascade(VerifyBatch([7] * len(trees), trees), H100, **HEADS)
    assert (decision.cascade, decision.reason) == (False, "no query rows, nothing to read")
    assert {p.seconds for p in decision.predictions.values()} == {0.0}


def test_the_reason_holds_the_numbers_of_the_prediction():
    """K30 (tests/known_faults.md): which plan, for what reason, with bytes, launches and seconds of either."""
    decision = should_cascade(branches(8, 4, 4000, 3), H100, **HEADS)
    naive, cascade, fused = (decision.predictions[plan] for plan in PLANS)
    assert decision.cascade
    assert decision.plan == min(decision.predictions.values(), key=lambda p: p.seconds).plan
    for number in (
        f"{naive.seconds / cascade.seconds:.2f}x",
        f"{cascade.seconds * 1e6:.1f} us against {naive.seconds * 1e6:.1f} us",
        f"{cascade.bytes / 1e6:.3g} MB of KV instead of {naive.bytes / 1e6:.3g} MB",
        f"{cascade.launches} launches instead of {naive.launches}",
        f"{fused.seconds * 1e6:.1f} us",
    ):
        assert number in decision.reason


def test_launches_decide_short_prefixes_and_bytes_long_ones():
    """K30: the same batch wins or loses by its prefix and by the cost of a launch."""
    short, long = branches(8, 4, 400, 3), branches(8, 4, 16_384, 3)
    assert not should_cascade(short, H100, **HEADS).cascade
    assert should_cascade(long, H100, **HEADS).cascade
    assert should_cascade(short, replace(H100, launch=0.0), **HEADS).cascade
    assert not should_cascade(long, replace(H100, launch=1e-2), **HEADS).cascade
    # an implementation of seven kernels pays for them
    seven = should_cascade(long, H100, launches={"cascade": 7}, **HEADS)
    three = should_cascade(long, H100, **HEADS)
    assert seven.predictions["cascade"].launches == 7
    added = seven.predictions["cascade"].seconds - three.predictions["cascade"].seconds
    assert added == pytest.approx((7 - three.predictions["cascade"].launches) * H100.launch)
    assert seven.predictions["naive"] == three.predictions["naive"]


def test_large_batches_are_decided_without_page_tables_of_the_naive_plan():
    """Its table would hold 16384 rows of 32832 slots, two gigabytes; lengths are enough."""
    batch = branches(256, 8, 32_768, 8, rows="node")
    decision = should_cascade(batch, H200, **HEADS)
    naive = decision.predictions["naive"]
    assert naive.bytes == (256 * 64 * 32_768 + 256 * 8 * 36) * 4096
    assert decision.cascade


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("topk", [2, 4, 16])
def test_break_even_is_where_the_decision_turns(topk, rows):
    length = break_even_prefix(topk, 3, 4, device_model=H100, rows=rows, **HEADS)
    assert length > 0
    assert should_cascade(branches(4, topk, length, 3, rows), H100, **HEADS).cascade
    assert not should_cascade(branches(4, topk, length - 1, 3, rows), H100, **HEADS).cascade


def test_more_branches_break_even_earlier():
    lengths = [break_even_prefix(topk, 3, 4, device_model=H100, **HEADS) for topk in (2, 4, 8, 16, 64)]
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths)) == len(lengths)
    fused = [break_even_prefix(topk, 3, 4, device_model=H100, plan="fused", **HEADS) for topk in (2, 4, 8, 16, 64)]
    assert all(f <= c for f, c in zip(fused, lengths, strict=True))


def test_break_even_may_never_come():
    assert break_even_prefix(1, 3, 4, device_model=H100, **HEADS) is None
    assert break_even_prefix(4, 3, 4, device_model=replace(H100, launch=1e3), **HEADS) is None
    assert break_even_prefix(2, 3, 1, device_model=H100, max_prefix=64, **HEADS) is None
    # without the cost of launches, that of the merge is left
    free = break_even_prefix(4, 3, 4, device_model=replace(H100, launch=0.0), **HEADS)
    assert 0 < free < break_even_prefix(4, 3, 4, device_model=H100, **HEADS)


@pytest.mark.parametrize(
    ("common", "queries", "options", "answer"),
    [
        # multi-head attention is no FlashDecoding case: on from 256 tokens and 8 requests
        (256, [1] * 8, dict(num_q_heads=8, num_kv_heads=8), True),
        (255, [1] * 8, dict(num_q_heads=8, num_kv_heads=8), False),
        (271, [1] * 8, dict(num_q_heads=8, num_kv_heads=8), True),
        (260, [1] * 8, dict(num_q_heads=8, num_kv_heads=8, block_size=128), True),
        (260, [1] * 8, dict(num_q_heads=8, num_kv_heads=8, block_size=192), False),
        (4096, [1] * 7, dict(num_q_heads=8, num_kv_heads=8), False),
        (4096, [1] * 8, dict(num_q_heads=8, num_kv_heads=8, computed_lens=[4096] * 7 + [255]), False),
        (4096, [1] * 8, dict(num_q_heads=8, num_kv_heads=8, alibi=True), False),
        (4096, [1] * 8, dict(num_q_heads=8, num_kv_heads=8, sliding_window=True), False),
        (4096, [1] * 8, dict(num_q_heads=8, num_kv_heads=8, local_attention=True), False),
        (4096, [1] * 8, dict(num_q_heads=8, num_kv_heads=8, decode_context_parallel=2), False),
        # grouped heads and single queries, by waves: ceil(32 x 1 / 132) x 2 = 2 against ceil(8 x 8 x 2 / 132) = 1
        (256, [1] * 8, dict(num_q_heads=32, num_kv_heads=8), False),
        # the same 2 against ceil(64 x 8 x 2 / 132) = 8
        (256, [1] * 64, dict(num_q_heads=32, num_kv_heads=8), True),
        # 2 against ceil(16 x 8 x 2 / 132) = 2: equal is not less
        (256, [1] * 16, dict(num_q_heads=32, num_kv_heads=8), False),
        # one longer query and it is no FlashDecoding case
        (256, [1] * 7 + [2], dict(num_q_heads=32, num_kv_heads=8), True),
    ],
)
def test_vllm_rule(common, queries, options, answer):
    assert vllm_rule(common, queries, num_sms=132, **options) is answer


def test_sglang_rule_knows_only_topk_and_windows():
    assert [sglang_rule(topk) for topk in (0, 1, 2, 8)] == [False, False, True, True]
    assert not sglang_rule(8, sliding_window=True)


@pytest.mark.parametrize(
    ("packed", "head_dim", "fits", "tile"),
    [
        (65, 128, True, 128),
        (64, 128, True, 64),
        (65, 256, True, 64),
        (17, 64, True, 64),
        (16, 64, True, 16),
        (1, 64, False, 64),
    ],
)
def test_flashinfer_decides_a_tile_and_no_cascade(packed, head_dim, fits, tile):
    assert flashinfer_rule(packed, head_dim, step_fits=fits) == (None, tile)


@pytest.mark.parametrize("kind", ROWS)
def test_rule_table_sets_the_rules_side_by_side(kind):
    rows = rule_table((64, 1000, 16_000), (1, 4, 16), (1, 16), steps=3, device_model=H100, rows=kind, **HEADS)
    assert [(r.batch, r.topk, r.prefix_len) for r in rows] == [
        (b, k, n) for b in (1, 16) for k in (1, 4, 16) for n in (64, 1000, 16_000)
    ]
    for row in rows:
        decision = should_cascade(branches(row.batch, row.topk, row.prefix_len, 3, kind), H100, **HEADS)
        queries = {"branch": [3] * row.topk, "leaf": [1] * row.topk, "node": [1] * 3 * row.topk}[kind]
        assert (row.cascade, row.plan) == (decision.cascade, decision.plan)
        assert row.sglang is (row.topk > 1)
        assert row.vllm is (
            row.batch == 1 and vllm_rule(row.prefix_len, queries, num_sms=132, num_q_heads=32, num_kv_heads=8)
        )
        assert row.flashinfer is None
        if row.topk > 1:
            assert row.cascade is (row.speedup > 1)
        else:
            assert not row.cascade
    # a region where topk > 1 alone loses, and one where it wins
    assert any(r.sglang and not r.cascade for r in rows)
    assert any(r.sglang and r.cascade for r in rows)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("topk", "steps", "length", "size"), [(4, 3, 1000, 1), (1, 5, 40, 2), (8, 2, 0, 3)])
def test_branches_without_a_tree_cost_what_the_batch_of_trees_does(topk, steps, length, size, rows):
    batch = branches(size, topk, length, steps, rows=rows)
    launches = {"naive": 1, "cascade": 7}
    expected = should_cascade(batch, A100, launches=launches, **HEADS).predictions
    found = predict_branches(length, topk, steps, size, device_model=A100, rows=rows, launches=launches, **HEADS)
    assert found == expected


def test_datasheet_devices_say_where_their_numbers_come_from():
    assert [d.bandwidth for d in (A100, H100, H200, B200)] == [2.039e12, 3.35e12, 4.8e12, 8.0e12]
    for device in DEVICES.values():
        assert "datasheet" in device.source
        assert "assum" in device.source
        assert device.l2_bandwidth > device.bandwidth


def test_calibration_measures_this_machine():
    model = calibrate("cpu", large_bytes=1 << 22, small_bytes=1 << 16, matmul_size=64, repeats=3)
    assert model.name == "CPU"
    assert model.num_sms == torch.get_num_threads()
    for rate in (model.bandwidth, model.l2_bandwidth, model.launch, model.matmul_rate):
        assert math.isfinite(rate)
        assert rate > 0
    assert model.l2_bandwidth >= model.bandwidth
    assert model.launch < 1  # one addition takes microseconds, on any machine less than a second
    assert "cache size: assumption" in model.source
    assert calibrate(large_bytes=1 << 20, matmul_size=8, repeats=1, l2_bytes=123).l2_bytes == 123
    assert should_cascade(branches(2, 4, 64, 3), model, **HEADS).predictions["naive"].seconds > 0
    with pytest.raises(ValueError, match="device: expected cpu or cuda, given meta"):
        calibrate("meta")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: replace(H100, bandwidth=0.0), "bandwidth: expected a positive finite number, given 0.0"),
        (lambda: replace(H100, launch=-1e-6), "launch: expected a positive finite number, given -1e-06"),
        (lambda: replace(H100, matmul_rate=math.inf), "matmul_rate: expected a positive finite number, given inf"),
        (lambda: replace(H100, num_sms=0), "num_sms: expected a positive finite number, given 0"),
        (
            lambda: should_cascade(branches(1, 2, 3, 1), H100, num_q_heads=3, num_kv_heads=2, head_dim=64),
            "num_q_heads: expected a positive multiple of num_kv_heads = 2, given 3",
        ),
        (
            lambda: should_cascade(branches(1, 2, 3, 1), H100, num_q_heads=2, num_kv_heads=2, head_dim=0),
            "head_dim: expected an integer from 1 to 1024, given 0",
        ),
        (
            lambda: should_cascade(branches(1, 2, 3, 1), H100, launches={"tree": 1}, **HEADS),
            r"launches: expected plans of \('naive', 'cascade', 'fused'\), given \['tree'\]",
        ),
        (lambda: break_even_prefix(0, 3, 1, device_model=H100, **HEADS), "topk: expected a number >= 1, given 0"),
        (
            lambda: predict_branches(-1, 2, 3, 1, device_model=H100, **HEADS),
            "prefix_len: expected a number >= 0, given -1",
        ),
        (lambda: predict_branches(9, 2, 0, 1, device_model=H100, **HEADS), "steps: expected a number >= 1, given 0"),
        (lambda: break_even_prefix(2, 3, 1, device_model=H100, plan="naive", **HEADS), "plan: expected 'cascade' or"),
        (lambda: break_even_prefix(2, 3, 1, device_model=H100, rows="step", **HEADS), "rows: expected one of"),
        (lambda: predict_branches(9, 2, 3, 1, device_model=H100, rows="step", **HEADS), "rows: expected one of"),
        (lambda: flashinfer_rule(16, 512), "head_dim: expected an integer from 1 to 511, given 512"),
        (lambda: should_cascade([5], H100), r"batch: expected a VerifyBatch, given \[5\]"),
        (
            lambda: should_cascade(branches(1, 2, 3, 1), "H100"),
            "device_model: expected a DeviceModel such as trigger.H100, given 'H100'",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_heads_default_to_32_over_8_of_128():
    batch = branches(4, 4, 8192, 3)
    assert should_cascade(batch, H100) == should_cascade(batch, H100, num_q_heads=32, num_kv_heads=8, head_dim=128)
    by_plan = should_cascade(batch, H100).predictions
    assert by_plan["fused"].compulsory_bytes == ledger(batch.levels("fused")).kv_tokens_unique * 8 * 256 * 2


def test_vllm_rule_takes_no_requests_and_arrays():
    heads = dict(num_q_heads=32, num_kv_heads=8, num_sms=132)
    assert not vllm_rule(512, [], computed_lens=[], **heads)
    assert vllm_rule(512, [2] * 8, computed_lens=torch.full((8,), 300), **heads)
    assert not vllm_rule(512, [2] * 8, computed_lens=torch.full((8,), 255), **heads)
