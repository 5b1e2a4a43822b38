"""One rule for integers in every public function: what counts as one, what is refused, and how the refusal is said."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

import cascade_lab as cl
from cascade_lab import _checks, paging, regions, rules, sharding, traces, trigger
from cascade_lab.backends.triton.config import tiles
from cascade_lab.calibration import Calibration
from cascade_lab.levels import Level, sharing_order
from cascade_lab.prefix import executed_tiles, tile_remaining, uniform_scaling_errors
from cascade_lab.traces import CONVERSATION, MODELS, summarize

MODULES = (
    "attention",
    "levels",
    "drafts",
    "prefix",
    "applicability",
    "regions",
    "paging",
    "rules",
    "sharding",
    "states",
)
MODULES += ("trigger", "calibration", "runtime", "traces.read", "traces.replay", "traces.summary", "traces.generate")
MODULES += ("hf", "traces.bounds", "traces.models", "traces.seen", "traces.request")
TREE = cl.DraftTree.branches(2, 3)
BUCKETS = {"core": 3.0, "ffn": 5.0}, {"core": "interaction", "ffn": "linear"}
HEADS = dict(num_q_heads=8, num_kv_heads=2)
DEVICE = dict(device_model=trigger.H100, head_dim=64)
TABLE = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
LENGTHS = torch.tensor([7, 5], dtype=torch.int32)


@dataclass(frozen=True)
class Row:
    """A call with arguments that it takes; `integers` and `lists` (of integers) give the smallest value of each.

    `elementwise` arguments take arrays too, `optional` ones None.
    """

    call: Callable
    good: Mapping[str, object]
    integers: Mapping[str, int] = field(default_factory=dict)
    lists: Mapping[str, int | None] = field(default_factory=dict)
    elementwise: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


def plan(**changes) -> list[Level]:
    cu = torch.tensor([0, 2, 3], dtype=torch.int32)
    return [Level(cu, TABLE, LENGTHS, **{"page_size": 4} | changes)]


def attend(max_seqlen_q=2, num_splits=1, left=3, right=0):
    gen = torch.Generator().manual_seed(0)
    q, cache = torch.randn(3, 2, 4, generator=gen), torch.randn(4, 4, 1, 4, generator=gen)
    rows = torch.tensor([0, 2, 3], dtype=torch.int32)
    window = (left, right)
    options = dict(cu_seqlens_q=rows, max_seqlen_q=max_seqlen_q, num_splits=num_splits, window_size=window)
    return cl.attention(q, cache, cache, TABLE, LENGTHS, **options)


def cascade(num_splits=1, **changes):
    gen = torch.Generator().manual_seed(0)
    q, cache = torch.randn(3, 2, 4, generator=gen), torch.randn(4, 4, 1, 4, generator=gen)
    return cl.cascade_attention(q, cache, cache, plan(**changes), num_splits=num_splits)


def batch(**changes):
    made = cl.VerifyBatch(**dict(prefix_lens=[8, 9], trees=[TREE, TREE]) | changes)
    return made.prefix_lens, made.page_size, made.shared_prefix_len, made.num_pages, made.page_table


def hit_batch(**changes):
    made = cl.PrefixHitBatch(**dict(prompt_lens=[9, 6], hits=[4, 2]) | changes)
    return made.prompt_lens, made.hits, made.page_size, made.num_pages, made.page_table


def model(**changes):
    return summarize([(9, 4)], model=MODELS["Llama-3.1-8B"]._replace(**changes)).model_remaining


def made_up(**changes):
    return traces.generate(0, 3, traffic=replace(CONVERSATION, **changes))


def case(**changes):
    return cl.check_applicability(dict(n=12, cached_blocks=[True, False], block_size=8) | changes)


LEDGER = cl.ledger(plan(), num_q_heads=4, num_kv_heads=2)
VERIFY = cl.VerifyBatch([8, 9], [TREE, None], 4)
HITS = cl.PrefixHitBatch([9, 6], [4, 2], 4)
ROOTED = cl.VerifyBatch([8], [cl.DraftTree([-1, 0], [2, 1])], 4)
FIT = Calibration("area", 1.0, 0.0, 1e-3, 1e-6, 0.0, 0.0, 0.01)
AREA = {
    "SlidingWindow": dict(w=1),
    "SinkWindow": dict(s=0, w=1),
    "Chunked": dict(c=1),
    "TopK": dict(k=1),
    "TopKBlocks": dict(block=1, k=1),
    "Compressed": dict(m=1),
    "CSA": dict(m=1, k=1, window=1),
    "HCA": dict(m=1, window=1),
    "NSA": dict(length=1, stride=1, block=1, k=1, window=1),
    "MLA": dict(heads=1, latent=1, rope=0, nope=1, value=1),
}
ROWS = {
    "attention.attention": Row(
        attend,
        dict(max_seqlen_q=2, num_splits=3),
        dict(max_seqlen_q=0, num_splits=1),
        optional=("max_seqlen_q", "num_splits"),
    ),
    "levels.cascade_attention": Row(cascade, dict(num_splits=3), dict(num_splits=1), optional=("num_splits",)),
    "levels.Level": Row(
        cascade, dict(page_size=4, max_seqlen_q=2), dict(page_size=1, max_seqlen_q=0), optional=("max_seqlen_q",)
    ),
    "levels.ledger": Row(lambda **x: cl.ledger(plan(), **x), HEADS, dict(num_q_heads=1, num_kv_heads=1)),
    "levels.ledger, page_size": Row(
        lambda page_size: cl.ledger(plan(page_size=page_size)), dict(page_size=4), dict(page_size=1)
    ),
    "levels.shared_prefix_levels": Row(
        lambda **x: cl.shared_prefix_levels(TABLE, LENGTHS, torch.tensor([0, 2, 3], dtype=torch.int32), None, **x),
        dict(page_size=4, max_shared_levels=2, min_shared_tokens=4),
        dict(page_size=1, max_shared_levels=0, min_shared_tokens=1),
        optional=("max_shared_levels",),
    ),
    "levels.sharing_order": Row(
        lambda page_size: sharing_order(TABLE, LENGTHS, LENGTHS, page_size), dict(page_size=4), dict(page_size=1)
    ),
    "levels.Ledger.tile_tokens": Row(LEDGER.tile_tokens, dict(block_m=4), dict(block_m=1)),
    "levels.Ledger.kv_bytes": Row(
        lambda **x: LEDGER.kv_bytes(dtype=torch.float16, **x),
        dict(head_dim=8, head_dim_v=4),
        dict(head_dim=1, head_dim_v=1),
        optional=("head_dim_v",),
    ),
    "drafts.DraftTree": Row(cl.DraftTree, dict(parents=[-1, 0, 0]), lists=dict(parents=None)),
    "drafts.DraftTree.branches": Row(cl.DraftTree.branches, dict(topk=2, steps=3), dict(topk=1, steps=1)),
    "drafts.DraftTree.chain": Row(cl.DraftTree.chain, dict(n=3), dict(n=1)),
    "drafts.DraftTree.ancestors": Row(TREE.ancestors, dict(i=2), dict(i=0)),
    "drafts.DraftTree.positions": Row(TREE.positions, dict(prefix_len=3), dict(prefix_len=0)),
    "drafts.DraftTree.dense_mask": Row(TREE.dense_mask, dict(prefix_len=3), dict(prefix_len=0)),
    "drafts.DraftTree.packed_mask": Row(TREE.packed_mask, dict(prefix_len=3), dict(prefix_len=0)),
    "drafts.VerifyBatch": Row(
        batch,
        dict(prefix_lens=[8, 9], page_size=4, shared_prefix_len=4, num_pages=20, tokens=[*range(12)]),
        dict(page_size=1, shared_prefix_len=0, num_pages=0),
        dict(prefix_lens=0, tokens=0),
        optional=("num_pages", "tokens"),
    ),
    "drafts.VerifyBatch.prefix_slots": Row(VERIFY.prefix_slots, dict(r=1), dict(r=0), optional=("r",)),
    "drafts.VerifyBatch.draft_slots": Row(VERIFY.draft_slots, dict(r=0), dict(r=0), optional=("r",)),
    "drafts.VerifyBatch.accept_relaxed": Row(
        lambda topk: ROOTED.accept_relaxed(torch.eye(4)[:2], topk=topk), dict(topk=2), dict(topk=1)
    ),
    "drafts.DraftTree.from_retrieve_links": Row(
        cl.DraftTree.from_retrieve_links,
        dict(next_token=[1, -1], next_sibling=[-1, -1]),
        lists=dict(next_token=None, next_sibling=None),
    ),
    "prefix.PrefixHitBatch": Row(
        hit_batch,
        dict(prompt_lens=[9, 6], hits=[4, 2], page_size=4, num_pages=9),
        dict(page_size=1, num_pages=0),
        dict(prompt_lens=1, hits=0),
        optional=("num_pages",),
    ),
    "prefix.PrefixHitBatch.prefix_slots": Row(HITS.prefix_slots, dict(r=1), dict(r=0), optional=("r",)),
    "prefix.PrefixHitBatch.suffix_slots": Row(HITS.suffix_slots, dict(r=1), dict(r=0), optional=("r",)),
    "prefix.interactions": Row(cl.interactions, dict(n=8, hit=3), dict(n=0, hit=0), elementwise=("n", "hit")),
    "prefix.remaining": Row(cl.remaining, dict(n=8, hit=3), dict(n=1, hit=0), elementwise=("n", "hit")),
    "prefix.linear_remaining": Row(cl.linear_remaining, dict(n=8, hit=3), dict(n=1, hit=0), elementwise=("n", "hit")),
    "prefix.remaining_scattered": Row(lambda n: cl.remaining_scattered(n, [(1, 3)]), dict(n=8), dict(n=1)),
    "prefix.remaining_scattered, intervals": Row(
        lambda intervals: cl.remaining_scattered(8, [(1, intervals)]), dict(intervals=5), dict(intervals=0)
    ),
    "prefix.executed_tiles": Row(
        executed_tiles,
        dict(n=40, hit=9, block_m=16, block_n=8, group=2, window=12),
        dict(n=1, hit=0, block_m=1, block_n=1, group=1, window=1),
        optional=("window",),
    ),
    "prefix.tile_remaining": Row(
        tile_remaining,
        dict(n=40, hit=9, block_m=16, block_n=8, group=2, window=12),
        dict(n=1, hit=0, block_m=1, block_n=1, group=1, window=1),
        optional=("window",),
    ),
    "prefix.effective_hit": Row(
        cl.effective_hit, dict(cached_tokens=9, n=12, page_size=4), dict(cached_tokens=0, n=1, page_size=1)
    ),
    "prefix.prefix_hit_levels": Row(
        cl.prefix_hit_levels,
        dict(prompt_lens=[8, 12], hits=[3, 4], page_size=4),
        dict(page_size=1),
        dict(prompt_lens=1, hits=0),
    ),
    "prefix.scale_breakdown": Row(lambda **x: cl.scale_breakdown(*BUCKETS, **x), dict(n=8, hit=3), dict(n=1, hit=0)),
    "prefix.uniform_scaling_errors": Row(
        lambda **x: uniform_scaling_errors(*BUCKETS, **x), dict(n=8, hit=3), dict(n=1, hit=0)
    ),
    "prefix.hand_over": Row(
        cl.hand_over,
        dict(cached_tokens=9, n=12, page_size=4, replay_tokens=2, kv_bytes_per_token=5),
        dict(cached_tokens=0, n=1, page_size=1, replay_tokens=0, kv_bytes_per_token=0),
    ),
    "applicability.Case": Row(
        case,
        dict(n=12, block_size=8, kv_bytes_per_token=7),
        dict(n=1, block_size=1, kv_bytes_per_token=0),
    ),
    "regions.Region.visible": Row(cl.Chunked(3).visible, dict(t=8), dict(t=1), elementwise=("t",)),
    "regions.Region.total": Row(cl.Chunked(3).total, dict(n=8), dict(n=0), elementwise=("n",)),
    "regions.Region.remaining": Row(
        cl.Chunked(3).remaining, dict(n=9, hit=8), dict(n=1, hit=0), elementwise=("n", "hit")
    ),
    "regions.Region.exponent": Row(cl.Chunked(3).exponent, dict(n=8, hit=3), dict(n=1, hit=0)),
    **{f"regions.{name}": Row(getattr(regions, name), dict.fromkeys(lows, 8), lows) for name, lows in AREA.items()},
    "regions.MLA.token_bytes": Row(cl.MLA().token_bytes, dict(itemsize=2), dict(itemsize=1)),
    "regions.MLA.prefill_flops": Row(cl.MLA().prefill_flops, dict(n=8, hit=3), dict(n=1, hit=0)),
    "regions.Mixture": Row(lambda weight: regions.Mixture(((weight, cl.Dense()),)), dict(weight=3), dict(weight=1)),
    "regions.deepseek_sparse": Row(
        regions.deepseek_sparse,
        dict(core_flops=7, indexer_flops=3, k=16),
        dict(core_flops=1, indexer_flops=1, k=1),
    ),
    "paging.pages_needed": Row(
        paging.pages_needed, dict(length=9, page_size=4), dict(length=0, page_size=1), elementwise=("length",)
    ),
    "paging.build_page_table": Row(
        paging.build_page_table,
        dict(lengths=[9, 3], page_size=4, first_page=2),
        dict(page_size=1, first_page=0),
        dict(lengths=0),
    ),
    "paging.dense_page_table": Row(paging.dense_page_table, dict(batch=3), dict(batch=0)),
    "paging.token_slots": Row(
        lambda **x: paging.token_slots(TABLE, **x),
        dict(row=1, length=5, page_size=4),
        dict(row=0, length=0, page_size=1),
        optional=("length", "page_size"),
    ),
    "paging.token_slots, all rows": Row(
        lambda lens, starts, page_size: paging.token_slots(TABLE, lens, page_size, starts=starts),
        dict(lens=[7, 5], starts=[1, 2], page_size=4),
        dict(page_size=1),
        dict(lens=0, starts=0),
        optional=("starts",),
    ),
    "paging.split_kv_cache": Row(
        lambda num_kv_heads: paging.split_kv_cache(torch.zeros(3, 2, 4, 2, 8), num_kv_heads=num_kv_heads),
        dict(num_kv_heads=2),
        dict(num_kv_heads=1),
        optional=("num_kv_heads",),
    ),
    "paging.branch_capacity": Row(
        paging.branch_capacity,
        dict(prefix_len=30, branches=4, steps=5, page_size=16),
        dict(prefix_len=0, branches=0, steps=0, page_size=1),
    ),
    "paging.shared_prefix_len": Row(
        lambda page_size: paging.shared_prefix_len(TABLE, LENGTHS, LENGTHS, page_size),
        dict(page_size=4),
        dict(page_size=1),
    ),
    "paging.page_table_from_csr": Row(
        lambda page_size: paging.page_table_from_csr(*paging.page_table_to_csr(TABLE, LENGTHS, 4), page_size),
        dict(page_size=4),
        dict(page_size=1),
    ),
    "paging.page_table_to_csr": Row(
        lambda page_size: paging.page_table_to_csr(TABLE, LENGTHS, page_size), dict(page_size=4), dict(page_size=1)
    ),
    "paging.check_page_table": Row(
        lambda **x: paging.check_page_table(TABLE, LENGTHS, **x),
        dict(num_pages=4, page_size=4),
        dict(num_pages=0, page_size=1),
    ),
    "rules.sglang_rule": Row(rules.sglang_rule, dict(topk=2), dict(topk=0)),
    "rules.vllm_rule": Row(
        rules.vllm_rule,
        dict(
            common_prefix_len=512,
            query_lens=[1] * 9,
            num_sms=132,
            block_size=16,
            computed_lens=[600] * 9,
            decode_context_parallel=1,
        )
        | HEADS,
        dict(common_prefix_len=0, num_q_heads=1, num_kv_heads=1, num_sms=1, block_size=1, decode_context_parallel=1),
        dict(query_lens=0, computed_lens=0),
        optional=("computed_lens",),
    ),
    "rules.flashinfer_rule": Row(
        lambda head_dim: rules.flashinfer_rule(17.5, head_dim), dict(head_dim=128), dict(head_dim=1)
    ),
    "rules.rule_table": Row(
        lambda **x: rules.rule_table(device_model=trigger.H100, **x),
        dict(prefix_lens=[64, 9], topks=[2], batches=[1, 2], steps=3, head_dim=64) | HEADS,
        dict(steps=1, num_q_heads=1, num_kv_heads=1, head_dim=1),
        dict(prefix_lens=0, topks=1, batches=1),
    ),
    "trigger.DeviceModel": Row(
        lambda **x: replace(trigger.H100, **x), dict(l2_bytes=1 << 20, num_sms=9), dict(l2_bytes=0, num_sms=1)
    ),
    "trigger.should_cascade": Row(
        lambda **x: cl.should_cascade(VERIFY, trigger.H100, **x),
        dict(head_dim=64, head_dim_v=32) | HEADS,
        dict(num_q_heads=1, num_kv_heads=1, head_dim=1, head_dim_v=1),
        optional=("head_dim_v",),
    ),
    "trigger.should_cascade, launches": Row(
        lambda n: cl.should_cascade(VERIFY, trigger.H100, launches={"naive": n}), dict(n=2), dict(n=0)
    ),
    "trigger.break_even_prefix": Row(
        lambda **x: trigger.break_even_prefix(**DEVICE | x),
        dict(topk=8, steps=3, batch=2, head_dim=64, head_dim_v=32, max_prefix=4096) | HEADS,
        dict(topk=1, steps=1, batch=1, num_q_heads=1, num_kv_heads=1, head_dim=1, head_dim_v=1, max_prefix=0),
        optional=("head_dim_v",),
    ),
    "trigger.break_even_prefix, launches": Row(
        lambda n: trigger.break_even_prefix(8, 3, 2, launches={"naive": n}, **DEVICE, **HEADS), dict(n=2), dict(n=0)
    ),
    "trigger.predict_branches": Row(
        lambda **x: trigger.predict_branches(**DEVICE | x),
        dict(prefix_len=99, topk=8, steps=3, batch=2, head_dim=64, head_dim_v=32) | HEADS,
        dict(prefix_len=0, topk=1, steps=1, batch=1, num_q_heads=1, num_kv_heads=1, head_dim=1, head_dim_v=1),
        optional=("head_dim_v",),
    ),
    "trigger.predict_branches, launches": Row(
        lambda n: trigger.predict_branches(99, 8, 3, 2, launches={"naive": n}, **DEVICE, **HEADS), dict(n=2), dict(n=0)
    ),
    "trigger.calibrate": Row(
        lambda **x: trigger.calibrate(**x).l2_bytes,
        dict(large_bytes=1 << 14, small_bytes=1 << 12, l2_bytes=9, matmul_size=4, repeats=1),
        dict(large_bytes=1, small_bytes=1, l2_bytes=1, matmul_size=1, repeats=1),
        optional=("large_bytes", "small_bytes", "l2_bytes", "matmul_size"),
    ),
    "sharding.shard_levels": Row(
        lambda **x: sharding.shard_levels(plan(), **x),
        dict(rank=1, world_size=2, replicated=[0]),
        dict(rank=0, world_size=1),
        dict(replicated=0),
    ),
    "sharding.split_tokens": Row(sharding.split_tokens, dict(n=17, world_size=2), dict(n=0, world_size=1)),
    "sharding.rank_pairs": Row(sharding.rank_pairs, dict(n=17, world_size=2), dict(n=0, world_size=1)),
    "sharding.imbalance": Row(sharding.imbalance, dict(pairs=[3, 5]), lists=dict(pairs=0)),
    "sharding.ring_levels": Row(
        sharding.ring_levels,
        dict(prompt_lens=[16, 9], rank=1, holder=0, world_size=2),
        dict(rank=0, holder=0, world_size=1),
        dict(prompt_lens=0),
    ),
    "sharding.sharded_ledgers": Row(
        lambda **x: sharding.sharded_ledgers(plan(), **x),
        dict(world_size=2, replicated=[0]),
        dict(world_size=1),
        dict(replicated=0),
    ),
    "sharding.sharded_ledgers, bytes_sent": Row(
        lambda bytes_sent: sharding.sharded_ledgers(plan(), 2, bytes_sent=bytes_sent),
        dict(bytes_sent=[7, 9]),
        lists=dict(bytes_sent=0),
    ),
    "sharding.ring_ledgers": Row(
        sharding.ring_ledgers,
        dict(prompt_lens=[16, 9], world_size=2, bytes_per_token=8),
        dict(world_size=1, bytes_per_token=0),
        dict(prompt_lens=0),
    ),
    "sharding.held_rows": Row(
        sharding.held_rows,
        dict(prompt_lens=[16, 9], rank=1, world_size=2),
        dict(rank=0, world_size=1),
        dict(prompt_lens=0),
    ),
    "sharding.held_tokens": Row(
        sharding.held_tokens, dict(prompt_lens=[16, 9], world_size=2), dict(world_size=1), dict(prompt_lens=0)
    ),
    "traces.read.read_trace": Row(
        lambda block_size: traces.read_trace("tests/data/turns.jsonl", block_size=block_size) is not None,
        dict(block_size=64),
        dict(block_size=1),
        optional=("block_size",),
    ),
    "traces.read.read_mooncake": Row(
        lambda block_size: traces.read_mooncake("tests/data/turns.jsonl", block_size=block_size) is not None,
        dict(block_size=64),
        dict(block_size=1),
    ),
    "traces.read.read_logs": Row(
        lambda block_size: list(traces.read_logs(["tests/data/turns.jsonl"], block_size=block_size).requests),
        dict(block_size=64),
        dict(block_size=1),
        optional=("block_size",),
    ),
    "traces.read.read_table": Row(
        lambda block_size: list(
            traces.read_table({"input_tokens": [9], "block_ids": [[1, 2, 3]]}, block_size=block_size).requests
        ),
        dict(block_size=4),
        dict(block_size=1),
        optional=("block_size",),
    ),
    "traces.replay.replay": Row(
        lambda **x: list(traces.replay([traces.Request(0.0, 9, 1, (1, 2, 3), None)] * 2, **x)),
        dict(block_size=4, capacity_tokens=64, page_size=4, workers=2),
        dict(block_size=1, capacity_tokens=0, page_size=1, workers=1),
        optional=("capacity_tokens", "page_size"),
    ),
    "traces.bounds.bounds_of_lengths": Row(
        traces.bounds_of_lengths, dict(lengths=[9, 4], hit_tokens=5), dict(hit_tokens=0), dict(lengths=1)
    ),
    "traces.bounds.bounds_of_totals": Row(
        lambda max_tokens: traces.bounds_of_totals([traces.Totals(None, 3, 90, 40)], max_tokens),
        dict(max_tokens=50),
        dict(max_tokens=1),
        optional=("max_tokens",),
    ),
    "traces.summary.summarize": Row(lambda pairs: summarize([(9, 4), (9, pairs)]), dict(pairs=5), dict(pairs=0)),
    "traces.summary.ModelShape": Row(
        model,
        dict(layers=2, hidden=8, heads=4, kv_heads=2, head_dim=8, ffn=16, experts=3, q_rank=2),
        dict(layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, ffn=0, experts=0, q_rank=0),
    ),
    "traces.generate.Traffic": Row(
        made_up,
        dict(block_size=64, system_tokens=64, system_prompts=2, max_turns=3, max_tokens=9999),
        dict(block_size=1, system_tokens=0, system_prompts=1, max_turns=1, max_tokens=1),
    ),
    "traces.generate.generate": Row(traces.generate, dict(requests=3), dict(requests=1)),
    "calibration.Calibration.time": Row(FIT.time, dict(prefix=40, new=7), dict(prefix=0, new=0)),
}
# what these functions fill in themselves, and arguments whose numbers another row gives
RESULTS = {
    "Ledger",
    "Accepted",
    "Committed",
    "CopiedTails",
    "VirtualRequests",
    "PrefillTerms",
    "Prediction",
    "Decision",
    "RuleRow",
    "Shard",
}
RESULTS |= {"RankLedger", "TraceSummary", "Request", "TraceError", "Calibration", "Finding", "State"}
RESULTS |= {"Totals", "Bounds", "Log", "Seen"}
ELSEWHERE = {
    "drafts.DraftTree.retrieve_indices": {"pad": "test_broken_forms_of_a_tree_are_named"},
    "drafts.DraftTree.from_retrieve_indices": dict.fromkeys(
        ("indices", "pad"), "test_broken_forms_of_a_tree_are_named"
    ),
    "drafts.VerifyBatch.commit": {"accepted": "test_what_cannot_be_accepted_or_committed_is_named"},
    "hf.PagedModel": dict.fromkeys(("num_pages", "page_size"), "test_what_is_no_model_or_pass_is_refused"),
    "levels.PassShape.tile_tokens": dict.fromkeys(("block_m", "group"), "is asked through `Ledger.tile_tokens`"),
    "runtime.Target": dict.fromkeys(("multiprocessors", "shared_bytes"), "a table of the package's own"),
    "attention.attention": {"window_size": "test_windows_are_pairs_of_integers"},
    "levels.cascade_attention": {"window_size": "no window is taken"},
    "prefix.remaining_scattered": {"intervals": "prefix.remaining_scattered, intervals"},
    "regions.Mixture": {"parts": "regions.Mixture, weight"},
    "regions.triangle": {"n": "arithmetic for a region's own rule, whose numbers are checked before"},
    "trigger.should_cascade": {"launches": "trigger.should_cascade, launches"},
    "trigger.break_even_prefix": {"launches": "trigger.break_even_prefix, launches"},
    "trigger.predict_branches": {"launches": "trigger.predict_branches, launches"},
    "sharding.sharded_ledgers": {"bytes_sent": "sharding.sharded_ledgers, bytes_sent"},
    "traces.read.read_trace": {"progress": "is called with integers"},
    "traces.read.read_mooncake": {"progress": "is called with integers"},
    "traces.read.read_hits_csv": {"progress": "is called with integers"},
    "traces.read.read_logs": {"progress": "is called with integers"},
    "traces.read.unfit": dict.fromkeys(("ids", "n", "block_size"), "is asked by the readers, of checked numbers"),
    "traces.seen.Seen.leading": {"prompts": "ids are any integers or strings, as `traces.replay.replay` has them"},
    "traces.bounds.bounds_of_totals": {"totals": "carry the numbers of a reader"},
    "traces.summary.ModelShape.attention_flops": {"pairs": "are what `summarize` counted"},
    "traces.summary.Sums.add": dict.fromkeys(("n", "hit"), "are what `replay` gave; `summarize` checks its own"),
    "traces.generate.generate": {"seed": "test_seeds_are_any_integers"},
    "traces.summary.summarize": {"pairs": "as a list of pairs"},
}
NO_INTEGERS = ["8", 2.5, True, None, np.True_, np.float64(8), np.array([8, 8]), np.array([8.0])]
NO_INTEGERS += [torch.tensor([8]), torch.tensor(True), torch.tensor(8.0), torch.empty((), device="meta"), [8], 8j]


def pieces(x):
    """What a result is made of, so that two can be compared; NumPy's and torch's numbers differ from Python's."""
    if isinstance(x, torch.Tensor):
        return "tensor", str(x.dtype), x.tolist()
    if isinstance(x, np.ndarray):
        return "array", str(x.dtype), x.tolist()
    if dataclasses.is_dataclass(x):
        return type(x).__name__, {name: pieces(value) for name, value in vars(x).items() if name[0] != "_"}
    if isinstance(x, (tuple, list)):
        return [pieces(y) for y in x]
    return repr(x)


SCALARS = [(name, argument) for name, row in ROWS.items() for argument in row.integers]


SEQUENCES = [(name, argument) for name, row in ROWS.items() for argument in row.lists]


def refused(row: Row, argument: str, value, error: type[Exception], name: str | None = None) -> None:
    """The call raises exactly this error, in the form of all its kind, before or after the level that it is in."""
    with pytest.raises((TypeError, ValueError, ArithmeticError, RuntimeError, AttributeError)) as caught:
        row.call(**dict(row.good) | {argument: value})
    assert type(caught.value) is error, caught.value
    wanted = name or (r"launches\['naive'\]" if argument == "n" and "launches" in str(caught.value) else argument)
    assert re.search(rf"(^|: |\.){wanted}(\[\d+\])?: expected .*given ", str(caught.value)), caught.value


@pytest.mark.parametrize(("name", "argument"), SCALARS)
def test_what_is_no_integer_is_a_type_error(name, argument):
    row = ROWS[name]
    for value in NO_INTEGERS:
        whole_array = isinstance(value, np.ndarray) and value.dtype.kind == "i" or isinstance(value, torch.Tensor)
        if value is None and argument in row.optional or whole_array and argument in row.elementwise:
            continue
        refused(row, argument, value, TypeError)


@pytest.mark.parametrize(("name", "argument"), SCALARS)
def test_integers_out_of_range_are_value_errors(name, argument):
    row = ROWS[name]
    for value in (row.integers[argument] - 1, np.int64(row.integers[argument] - 1), -(10**40)):
        refused(row, argument, value, ValueError)


@pytest.mark.parametrize(("name", "argument"), SCALARS)
def test_integers_of_numpy_and_torch_are_integers(name, argument):
    """The result is the same to the type of its numbers."""
    row = ROWS[name]
    value = row.good[argument]
    expected = pieces(row.call(**row.good))
    for same in (np.int64(value), np.int32(value), np.array(value), torch.tensor(value)):
        if argument in row.elementwise and isinstance(same, torch.Tensor):
            continue
        assert pieces(row.call(**dict(row.good) | {argument: same})) == expected, repr(same)


@pytest.mark.parametrize(("name", "argument"), SEQUENCES)
def test_elements_are_named_by_their_place(name, argument):
    row = ROWS[name]
    good = list(row.good[argument])
    for value in NO_INTEGERS:
        refused(row, argument, [*good[:-1], value], TypeError, rf"{argument}(\[{len(good) - 1}\])?")
    for value in (8, 2.5, None, torch.tensor(3)):
        if not (value is None and argument in row.optional) and argument != "bytes_sent":
            refused(row, argument, value, TypeError)
    if row.lists[argument] is not None:
        refused(row, argument, [*good[:-1], row.lists[argument] - 1], ValueError)
    assert pieces(row.call(**dict(row.good) | {argument: [np.int64(n) for n in good]})) == pieces(row.call(**row.good))


@pytest.mark.parametrize("side", ["left", "right"])
def test_windows_are_pairs_of_integers(side):
    row = Row(attend, {"left": 3, "right": 0}, {"left": -1, "right": -1})
    for value in NO_INTEGERS:
        if value is not None:
            refused(row, side, value, TypeError, "window_size")
    refused(row, side, -2, ValueError, "window_size")
    assert pieces(attend(**{side: torch.tensor(2)})) == pieces(attend(**{side: 2}))


def test_seeds_are_any_integers():
    assert traces.generate(np.int64(-5), 3) == traces.generate(-5, 3)
    for value in NO_INTEGERS:
        refused(Row(traces.generate, {"requests": 3}), "seed", value, TypeError)


def signatures() -> Iterator[tuple[str, str]]:
    """(qualified name, argument) of every public function, constructor and method whose annotation names an integer."""
    for where in MODULES:
        module = importlib.import_module(f"cascade_lab.{where}")
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", None) != module.__name__ or not callable(value):
                continue
            found = {name: value}
            if inspect.isclass(value):
                methods = inspect.getmembers(value, callable)
                own = {key for base in value.__mro__ if base.__module__ == module.__name__ for key in vars(base)}
                found |= {f"{name}.{key}": x for key, x in methods if key in own and not key.startswith("_")}
            for label, function in found.items():
                if function is value and name in RESULTS:
                    continue
                for argument in inspect.signature(function).parameters.values():
                    if re.search(r"\b(int|Count)\b", str(argument.annotation)):
                        yield f"{where}.{label}", argument.name


def test_every_public_function_with_integers_has_a_row():
    """One that inherits a method is tried through the class that defines it."""
    missing = []
    for name, argument in signatures():
        where, *rest = name.rsplit(".", 1)
        inherited = f"regions.Region.{rest[0]}" if name.startswith("regions.") else name
        for label in (name, inherited):
            row = ROWS.get(label)
            if row and argument in {*row.integers, *row.lists} or argument in ELSEWHERE.get(label, {}):
                break
        else:
            missing.append((name, argument))
    assert missing == []
    assert len(list(signatures())) > 100


def test_a_long_value_is_shown_in_one_short_line():
    for value in ("x\n" * 1000, list(range(10000)), 10**5000, np.zeros((300, 300)), torch.zeros(9, 9)):
        assert len(_checks.shown(value)) <= 90
        assert "\n" not in _checks.shown(value)
    assert _checks.shown(torch.zeros(2, 3)) == "a tensor of float32 with shape (2, 3)"


def test_tensors_are_refused_by_kind_dtype_shape_and_device():
    x = torch.zeros(2, 3)
    assert _checks.tensor("x", x, "[T, H]", (2, 3), dtypes=(torch.float32,), like=("y", x)) is x
    for error, message, given in (
        (TypeError, "x: expected a tensor, given list", dict(x=[[1.0]])),
        (
            TypeError,
            "x: expected float16 or float64, given torch.float32",
            dict(dtypes=(torch.float16, torch.float64)),
        ),
        (ValueError, r"x: expected \[T\], given shape \(2, 3\)", dict(layout="[T]")),
        (ValueError, r"x: expected \[T, H\] = \[2, 4\], given shape \(2, 3\)", dict(layout="[T, H]", sizes=(2, 4))),
        (ValueError, "x: expected device meta as y, given cpu", dict(like=("y", torch.empty(1, device="meta")))),
    ):
        with pytest.raises(error, match=message):
            _checks.tensor("x", **{"x": x} | given)
    with pytest.raises(ValueError, match=r"x: expected unit stride in the last dim, given strides \(1, 3\)"):
        _checks.unit_stride("x", x.t())


@pytest.mark.parametrize("value", [0.5, 1, np.float32(0.5), np.int64(1), torch.tensor(1)])
def test_numbers_are_real_ones(value):
    assert _checks.number("h", value, 0, 1) == value
    for bad in ("0.5", True, np.True_, None, 1j, [0.5], torch.tensor([1])):
        with pytest.raises(TypeError, match="h: expected a number, given "):
            _checks.number("h", bad)
    with pytest.raises(ValueError, match=r"h: expected a number in \[0, 1\], given 1.5"):
        _checks.number("h", 1.5, 0, 1)
    with pytest.raises(ValueError, match="h: expected a number >= 0, given nan"):
        _checks.number("h", float("nan"), 0)


CASE = dict(n=8, cached_blocks=[True, False], block_size=4)
DRAFTS = cl.VerifyBatch([5], [TREE], 4)


def wide(backend: str, dim: int, value_dim: int):
    k, v = torch.zeros(2, 1, 1, dim), torch.zeros(2, 1, 1, value_dim)
    return cl.attention(torch.zeros(2, 1, dim), k, v, TABLE[:, :1] % 2, LENGTHS % 2, backend=backend)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: wide("triton", 1025, 8), ValueError, "q: expected D of at most 1024 on backend 'triton', given 1025"),
        (lambda: wide("triton", 8, 2048), ValueError, "v_cache: expected D_v of at most 1024 .*, given 2048"),
        (lambda: tiles("sm_90", 2048), ValueError, "head_dim: expected at most 1024, given 2048"),
        (
            lambda: trigger.should_cascade(DRAFTS, trigger.H100, head_dim=4096),
            ValueError,
            "head_dim: expected an integer from 1 to 1024, given 4096",
        ),
        (
            lambda: trigger.should_cascade(DRAFTS, trigger.H100, head_dim_v=1025),
            ValueError,
            "head_dim_v: expected an integer from 1 to 1024, given 1025",
        ),
    ],
)
def test_a_head_dim_without_tiles_is_named_with_the_limit(call, error, message):
    """F4 (tests/known_faults.md): before any kernel, and by no exception that an iterator takes for its end."""
    if "triton" in message and cl.runtime.triton_mode() == "absent":
        pytest.skip("Triton is not installed")
    with pytest.raises(error, match=message):
        list(map(lambda _: call(), range(2)))
    assert wide("torch", 1030, 2048).o.shape == (2, 1, 2048)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: cl.check_applicability(CASE | dict(cached_blocks="10")),
            TypeError,
            "cached_blocks: expected a sequence of bool, given '10'",
        ),
        (
            lambda: cl.check_applicability(CASE | dict(cached_blocks=["1", "0"])),
            TypeError,
            r"cached_blocks\[0\]: expected an integer, given '1'",
        ),
        (
            lambda: cl.check_applicability(CASE | dict(cached_blocks=[True, 2])),
            ValueError,
            r"cached_blocks\[1\]: expected an integer from 0 to 1, given 2",
        ),
        (lambda: paging.build_page_table([3.5], 2), TypeError, r"lengths\[0\]: expected an integer, given 3.5"),
        (
            lambda: paging.build_page_table([2**31 - 1] * 2, 1),
            ValueError,
            "lengths: expected page ids below 2..31, given 4294967294 pages",
        ),
        (
            lambda: cl.prefix_hit_levels([2**31 - 1] * 2, [0, 0]),
            ValueError,
            "prompt_lens: expected fewer than 2..31 tokens in each and rows in all, given 2147483647 and 4294967294",
        ),
        (
            lambda: trigger.should_cascade(DRAFTS, trigger.H100, launches={"naive": -5}),
            ValueError,
            r"launches\['naive'\]: expected a number >= 0, given -5",
        ),
        (
            lambda: trigger.should_cascade(DRAFTS, trigger.H100, launches=["naive"]),
            TypeError,
            r"launches: expected a mapping from plans to numbers, given \['naive'\]",
        ),
    ],
)
def test_values_of_the_wrong_kind_or_range_are_named(call, error, message):
    """F11: nothing is read as something else, and no count overflows in silence."""
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("blocks", [[True, False], np.array([True, False]), torch.tensor([True, False]), [1, 0]])
def test_cached_blocks_of_any_sequence_are_read_alike(blocks):
    """F11: bools of Python, NumPy and torch, and 0 and 1."""
    assert cl.check_applicability(CASE | dict(cached_blocks=blocks)) == cl.check_applicability(CASE)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: trigger.should_cascade(DRAFTS, "H100"), TypeError, "such as trigger.H100, given 'H100'"),
        (
            lambda: trigger.should_cascade(DRAFTS, "H100 SXM"),
            TypeError,
            "trigger.A100 or trigger.H100 or .* 'H100 SXM'",
        ),
        (lambda: trigger.should_cascade(DRAFTS, None), TypeError, "device_model: expected a DeviceModel such as"),
        (
            lambda: cl.check_applicability(CASE | dict(blocksize=4)),
            ValueError,
            "case: expected n, .* kv_bytes_per_token, tolerance, given the unknown 'blocksize'",
        ),
        (lambda: cl.check_applicability(dict(n=8, block_size=4)), ValueError, "case: .* given no 'cached_blocks'"),
    ],
)
def test_what_was_probably_meant_is_said(call, error, message):
    """F24: the device model of that name, and the field that is unknown or missing."""
    with pytest.raises(error, match=message):
        call()
