"""Mutants: the package with one plausible mistake each, and the two that must notice it, a claim and a unit test.

A row is a mistake that people make in this field, as one replacement in one file of the package. The claim is the one
that fails in its notebook (the number before the point names it), the node is a test of this folder. What neither
notices is a hole in the proof, so it is closed there and not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TRITON_ATTENTION = "backends/triton/attention.py"
TRITON_MERGE = "backends/triton/merge.py"
TORCH = "backends/torch.py"


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        mistake: what is wrong with it, in a few words.
        path: file inside the package.
        before, after: source replaced, found exactly once, and what takes its place.
        claim: id of the notebook claim that fails.
        node: the unit test that fails, as pytest names it inside tests/.
    """

    mistake: str
    path: str
    before: str
    after: str
    claim: str
    node: str

    def apply(self, package: Path) -> None:
        """Make the mistake in the copy of the package at `package`; a text gone or repeated would test nothing."""
        file = package / self.path
        source = file.read_text()
        found = source.count(self.before)
        assert found == 1, f"{self.path}: expected one occurrence of {self.before!r}, found {found}"
        file.write_text(source.replace(self.before, self.after))


MUTANTS = (
    # the kernel of a pass
    Mutant(
        "the softmax scale applied twice",
        TRITON_ATTENTION,
        "to_log2 = scale * LOG2_E",
        "to_log2 = scale * scale * LOG2_E",
        "1.26",
        "core/test_attention.py::test_scale_and_softcap[triton-{'softmax_scale': 1.7}]",
    ),
    Mutant(
        "lse left in base 2",
        TRITON_ATTENTION,
        "tl.log2(tl.where(empty, 1.0, b_sum))) * LN_2)",
        "tl.log2(tl.where(empty, 1.0, b_sum))))",
        "1.2",
        "core/test_attention.py::test_repeated_keys_add_ln_2[triton]",
    ),
    Mutant(
        "< for <= in the causal comparison",
        TRITON_ATTENTION,
        "o_n[None, :] <= i_pos[:, None] + right",
        "o_n[None, :] < i_pos[:, None] + right",
        "1.26",
        "core/test_attention.py::test_causal_is_aligned_to_the_bottom_right[triton]",
    ),
    Mutant(
        "causal mask aligned to the top left",
        TRITON_ATTENTION,
        "i_pos = i_q + K - Q",
        "i_pos = i_q",
        "1.26",
        "core/test_attention.py::test_causal_is_aligned_to_the_bottom_right[triton]",
    ),
    Mutant(
        "window one key short",
        TRITON_ATTENTION,
        "o_n[None, :] >= i_pos[:, None] - left",
        "o_n[None, :] > i_pos[:, None] - left",
        "4.18",
        "core/test_attention.py::test_minus_one_is_no_window[triton]",
    ),
    Mutant(
        "output never rescaled to the new maximum",
        TRITON_ATTENTION,
        "b_acc = b_acc * keep[:, None]",
        "b_acc = b_acc * 1.0",
        "1.26",
        "core/test_attention.py::test_shifted_scores_shift_only_the_lse[triton-full-300.0]",
    ),
    Mutant(
        "output accumulated in half precision",
        TRITON_ATTENTION,
        "b_acc = b_acc * keep[:, None]",
        "b_acc = (b_acc * keep[:, None]).to(tl.float16).to(tl.float32)",
        "1.26",
        "core/test_attention.py::test_float32_products_are_float32[triton]",
    ),
    Mutant(
        "tiles of the tree's tail skip the mask",
        TRITON_ATTENTION,
        "all_hi = K - tail",
        "all_hi = K",
        "4.23",
        "core/test_attention.py::test_tree_begins_anywhere_in_a_tile[triton-30]",
    ),
    Mutant(
        "last key left out",
        TRITON_ATTENTION,
        "m_n = (o_n >= lo) & (o_n < hi)",
        "m_n = (o_n >= lo) & (o_n < hi - 1)",
        "1.2",
        "core/test_attention.py::test_padding_rows_are_empty_and_harmless[triton]",
    ),
    Mutant(
        "query heads dealt to KV heads modulo instead of in groups",
        TRITON_ATTENTION,
        "i_h = (i_kv * GROUP + o_m % GROUP).to(tl.int64)",
        "i_h = (i_kv + o_m % GROUP * tl.num_programs(1)).to(tl.int64)",
        "1.26",
        "core/test_attention.py::test_query_heads_share_their_key_head[triton-(6, 2)]",
    ),
    Mutant(
        "splits too short to reach the last keys",
        TRITON_ATTENTION,
        "share = (t_hi - t_lo + num_splits - 1) // num_splits",
        "share = (t_hi - t_lo) // num_splits",
        "1.31",
        "core/test_attention.py::test_number_of_splits_does_not_matter[triton-full-2]",
    ),
    Mutant(
        "lse of a row without keys 0 instead of -inf",
        TRITON_ATTENTION,
        "b_lse = tl.where(empty, NEG_INF,",
        "b_lse = tl.where(empty, 0.0,",
        "2.15-branch-triton",
        "core/test_attention.py::test_padding_rows_are_empty_and_harmless[triton]",
    ),
    Mutant(
        "reads counted in whole tiles",
        TRITON_ATTENTION,
        "loaded = tl.minimum(hi, t_hi * BLOCK_N) - tl.maximum(lo, t_lo * BLOCK_N)",
        "loaded = t_hi * BLOCK_N - t_lo * BLOCK_N",
        "2.31-naive",
        "core/test_attention.py::test_read_counter_matches_the_recorder[triton-1-full]",
    ),
    # the merge
    Mutant(
        "maximum added instead of subtracted",
        TRITON_MERGE,
        "w_b = tl.exp(b_lseb - shift)",
        "w_b = tl.exp(b_lseb + shift)",
        "1.2",
        "core/test_states.py::test_exponentials_are_shifted[triton-100.0]",
    ),
    Mutant(
        "merged lse in base 2",
        TRITON_MERGE,
        "b_max + tl.log(tl.where(empty, 1.0, b_sum))",
        "b_max + tl.log2(tl.where(empty, 1.0, b_sum))",
        "1.3",
        "core/test_states.py::test_lse_base_is_natural[triton]",
    ),
    Mutant(
        "last split dropped",
        TRITON_MERGE,
        "for _ in tl.range(S, num_stages=STAGES):",
        "for _ in tl.range(S - 1, num_stages=STAGES):",
        "1.13",
        "core/test_states.py::test_order_and_grouping_do_not_matter[triton]",
    ),
    Mutant(
        "states absorbed before not rescaled",
        TRITON_MERGE,
        "return b_acc * keep + b_o",
        "return b_acc + b_o",
        "1.13",
        "core/test_states.py::test_order_and_grouping_do_not_matter[triton]",
    ),
    Mutant(
        "output of an empty side loaded",
        TRITON_MERGE,
        "mask=(b_lse != NEG_INF) & m_d",
        "mask=m_row & m_d",
        "1.11",
        "core/test_states.py::test_empty_side_is_neutral[triton-nan--inf]",
    ),
    Mutant(
        "+inf taken for a weight instead of for no keys",
        TRITON_MERGE,
        "b_lse = tl.where(b_lse == POS_INF, NEG_INF, b_lse)",
        "b_lse = tl.where(b_lse == POS_INF, POS_INF, b_lse)",
        "1.11",
        "core/test_states.py::test_positive_infinity_means_no_keys[triton]",
    ),
    Mutant(
        "exponentials not shifted",
        "states.py",
        "shift = torch.where(peak == -math.inf, 0.0, peak)",
        "shift = torch.zeros_like(peak)",
        "1.11",
        "core/test_states.py::test_exponentials_are_shifted[torch-100.0]",
    ),
    # the torch backend
    Mutant(
        "torch: causal mask aligned to the top left",
        TORCH,
        "and key a + y.\n        first = i0 + self.keys - self.rows",
        "and key a + y.\n        first = i0",
        "1.26",
        "core/test_attention.py::test_causal_is_aligned_to_the_bottom_right[torch]",
    ),
    Mutant(
        "torch: output never rescaled to the new maximum",
        TORCH,
        "acc.mul_(decay).baddbmm_(p, block.v)",
        "acc.baddbmm_(p, block.v)",
        "1.28",
        "core/test_torch_backend.py::test_every_length_around_a_block_edge[7-33]",
    ),
    Mutant(
        "torch: tree bits one key late",
        TORCH,
        "bit = torch.arange(a, b, device=like.device) - (self.keys - self.tail)",
        "bit = torch.arange(a, b, device=like.device) - (self.keys - self.tail) - 1",
        "4.23",
        "core/test_attention.py::test_node_sees_ancestors_and_itself[torch]",
    ),
    # trees and tables
    Mutant(
        "siblings visible in the tree mask",
        "drafts.py",
        "return seen[:, :-1]",
        "return seen[:, :-1] | (np.asarray(self.parents)[:, None] == np.asarray(self.parents))",
        "2.1",
        "core/test_drafts.py::test_node_sees_its_ancestors_and_itself_but_no_sibling_or_cousin",
    ),
    Mutant(
        "positions by storage order",
        "drafts.py",
        'return _checks.integer("prefix_len", prefix_len, 0) - 1 + torch.from_numpy(self._path_lens)',
        'return _checks.integer("prefix_len", prefix_len, 0) + torch.arange(self.size)',
        "2.2",
        "core/test_drafts.py::test_children_stand_below_their_parents_wherever_they_are_stored",
    ),
    Mutant(
        "a page too many for a length of whole pages",
        "paging.py",
        "return (length + page_size - 1) // page_size",
        "return length // page_size + 1",
        "2.4-naive",
        "core/test_paging.py::test_pages_needed[8-4-2]",
    ),
    # the ledgers
    Mutant(
        "ledger: pages for tokens",
        "levels.py",
        "kv_tokens=int(shape.keys.sum())",
        "kv_tokens=int(paging.pages_needed(shape.keys, level.page_size).sum())",
        "2.3-cascade",
        "core/test_levels.py::test_the_worked_numbers[1000-3-4012-1012]",
    ),
    Mutant(
        "ledger: a slot counted each time it is read",
        "levels.py",
        "kv_tokens_unique=_size(*_united(starts, ends))",
        "kv_tokens_unique=sum(x.kv_tokens for x in parts)",
        "2.5",
        "core/test_levels.py::test_distinct_slots_of_levels_inside_each_other",
    ),
    Mutant(
        "ledger: a causal row does not count itself",
        "levels.py",
        "seen * keys - seen * (seen - 1) // 2",
        "seen * keys - seen * (seen + 1) // 2",
        "3.17",
        "core/test_prefix.py::test_a_hit_moves_pairs_and_leaves_reads",
    ),
    Mutant(
        "ledger: every draft pair counted, visible or not",
        "levels.py",
        "(bits & within).sum(dtype=np.int64)",
        "within.sum(dtype=np.int64)",
        "2.6",
        "core/test_levels.py::test_tree_levels_count_only_set_bits_of_the_tail",
    ),
    Mutant(
        "ledger: row tiles without the group",
        "levels.py",
        "tiles = -(-self.rows * group // block_m)",
        "tiles = -(-self.rows // block_m)",
        "2.31-cascade",
        "core/test_levels.py::test_ledger_of_causal_levels_against_brute_force[False-5-heads1]",
    ),
    Mutant(
        "first suffix key in both levels",
        "prefix.py",
        'Level(rows, page_table, cached, page_size, name="rectangle"',
        'Level(rows, page_table, cached + 1, page_size, name="rectangle"',
        "3.16",
        "core/test_prefix.py::test_a_hit_moves_pairs_and_leaves_reads",
    ),
    # geometry
    Mutant(
        "H (H - 1) for H (H + 1)",
        "regions.py",
        "whole, saved = self.total(n), self.total(hit)",
        "whole, saved = self.total(n), self.total(hit - 1) if isinstance(hit, int) and hit else self.total(hit)",
        "3.7",
        "core/test_prefix.py::test_limit_is_reached_like_one_over_n",
    ),
    Mutant(
        "a row does not see itself",
        "regions.py",
        "return n * (n + 1) // 2",
        "return n * (n - 1) // 2",
        "3.2",
        "core/test_prefix.py::test_the_eight_by_eight_triangle_cut_at_four",
    ),
    Mutant(
        "band of a window one key narrow",
        "regions.py",
        "triangle(head) + (n - head) * cap",
        "triangle(head) + (n - head) * (cap - 1)",
        "4.2",
        "core/test_regions.py::test_visible_and_total_equal_the_mask_written_out[SlidingWindow(w=64)]",
    ),
    Mutant(
        "layers of a mix counted alike",
        "regions.py",
        "sum(weight * region._total(n) for weight, region in self.parts)",
        "sum(region._total(n) for weight, region in self.parts)",
        "4.24",
        "core/test_regions.py::test_mixture_is_the_weighted_sum",
    ),
    Mutant(
        "a prompt found whole leaves nothing to compute",
        "prefix.py",
        "hit = min(cached_tokens, n - 1) // page_size * page_size",
        "hit = min(cached_tokens, n) // page_size * page_size",
        "3.62",
        "core/test_prefix.py::test_effective_hit_always_leaves_a_token_and_whole_pages",
    ),
    Mutant(
        "key tiles rounded down at the diagonal",
        "prefix.py",
        "hit * group + block_m + unit - 1, unit)",
        "hit * group + block_m, unit)",
        "3.27",
        "core/test_prefix.py::test_executed_tiles_equal_a_walk_over_row_tiles[None]",
    ),
    Mutant(
        "the interaction bucket scaled as linear",
        "prefix.py",
        '{"interaction": float(remaining(n, hit))',
        '{"interaction": float(linear_remaining(n, hit))',
        "3.45",
        "core/test_prefix.py::test_breakdown_is_scaled_bucket_by_bucket",
    ),
    Mutant(
        "a kernel that only masks passes for calibrated",
        "applicability.py",
        "holds = fitted.cv_error <= case.tolerance and abs(ratio - law) <= case.tolerance",
        "holds = fitted.cv_error <= case.tolerance",
        "3.54",
        "core/test_prefix.py::test_uncalibrated_kernels_fail_with_what_they_do_instead",
    ),
    Mutant(
        "half of the prefix left out of a chunk's cost",
        "calibration.py",
        '"triangle": lambda L, x: 2 * L * x + x * x',
        '"triangle": lambda L, x: L * x + x * x',
        "3.54",
        "core/test_calibration.py::test_features_by_hand",
    ),
    # traces
    Mutant(
        "mean length squared for the sum of squares",
        "traces/summary.py",
        "hit_squares += sum(x * x for x in hit)",
        "hit_squares += sum(hit) ** 2 // len(hit)",
        "5.13",
        "core/test_traces.py::test_what_is_left_is_the_sum_over_requests[pairs0]",
    ),
    Mutant(
        "mean over requests for the ratio of sums",
        "traces/summary.py",
        "token_hit=hits / tokens,",
        "token_hit=math.fsum(self._ratios) / self.requests,",
        "5.14",
        "core/test_traces.py::test_weightings_are_told_apart",
    ),
    Mutant(
        "a request hits the blocks it brings",
        "traces/seen.py",
        "(owner[first][where] < owner)",
        "(owner[first][where] <= owner)",
        "5.11",
        "core/test_traces.py::test_a_request_never_hits_its_own_blocks",
    ),
    # work shared out to ranks
    Mutant(
        "a rank's second slice shifted instead of mirrored",
        "sharding.py",
        "(slices[r], slices[-1 - r])",
        "(slices[r], slices[world_size + r])",
        "6.24",
        "core/test_sharding.py::test_zigzag_slices_hold_the_same_area[3]",
    ),
    Mutant(
        "a merge's way back left out of the bytes sent",
        "distributed.py",
        '"exchange": (n - own) * full + (W - 1) * own * back}',
        '"exchange": (n - own) * full}',
        "6.18",
        "core/test_distributed.py::test_fewest_bytes_and_then_fewest_steps",
    ),
    # the walk
    Mutant(
        "tokens one place late in their page",
        "paging.py",
        "[token // page_size] * page_size + token % page_size",
        "[token // page_size] * page_size + (token + 1) % page_size",
        "7.7",
        "core/test_paging.py::test_slots_start_at_whole_pages_not_at_the_sum_of_lengths",
    ),
    # a model of transformers
    Mutant(
        "reads of every layer counted on the first",
        "hf.py",
        "else self.reads[layer]",
        "else self.reads[0]",
        "8.8",
        "core/test_hf.py::test_rounds_of_tree_verification_end_where_greedy_decoding_does[Llama-cascade]",
    ),
    Mutant(
        "accepted states left where they were drafted",
        "drafts.py",
        "moved = node != step",
        "moved = node < 0",
        "8.3",
        "core/test_hf.py::test_rounds_of_tree_verification_end_where_greedy_decoding_does[Llama-fused]",
    ),
)
