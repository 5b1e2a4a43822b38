"""When engines cascade: the rules of SGLang, vLLM and FlashInfer beside the prediction of `trigger` (claim 2).

Each rule is restated from its engine's source as a function of lengths and options; none is tuned here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from cascade_lab.drafts import DraftTree, VerifyBatch
from cascade_lab.trigger import DeviceModel, should_cascade

__all__ = ["RuleRow", "flashinfer_rule", "rule_table", "sglang_rule", "vllm_rule"]


def sglang_rule(topk: int, *, sliding_window: bool = False) -> bool:
    """SGLang's FlashAttention-3 backend in target verification: topk > 1 and no sliding-window layer. Nothing else."""
    return topk > 1 and not sliding_window


def vllm_rule(
    common_prefix_len: int,
    query_lens: Sequence[int],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    num_sms: int,
    block_size: int = 16,
    computed_lens: Sequence[int] | None = None,
    alibi: bool = False,
    sliding_window: bool = False,
    local_attention: bool = False,
    decode_context_parallel: int = 1,
) -> bool:
    """vLLM's use_cascade_attention for requests that all share a prefix; its global switch is off by default since
    pull request 36318 (2026-03), and this is the rule behind the switch.

    Args:
        common_prefix_len: tokens shared by all running requests, capped here by the smallest of computed_lens and
            floored to whole blocks.
        query_lens: query tokens per request.
    """
    if computed_lens is not None:
        common_prefix_len = min((common_prefix_len, *computed_lens))
    common = common_prefix_len // block_size * block_size
    requests = len(query_lens)
    if common < 256 or alibi or sliding_window or local_attention or requests < 8 or decode_context_parallel > 1:
        return False
    group = num_q_heads // num_kv_heads
    if not (group > 1 and all(n == 1 for n in query_lens)):
        return True
    tiles = math.ceil(common / 128)
    cascade = math.ceil(num_q_heads * math.ceil(requests / 128) / num_sms) * tiles
    flash_decoding = math.ceil(requests * num_kv_heads * math.ceil(group / 128) * tiles / num_sms)
    return cascade < flash_decoding


def flashinfer_rule(packed_len: float, head_dim: int, *, step_fits: bool = True) -> tuple[None, int]:
    """FlashInfer has no trigger (None: its caller decides); what it does choose is the query tile.

    Args:
        packed_len: mean of query length x GQA group over the requests.
        head_dim: of q, k and v alike, below 512; larger value dims follow another rule, which is not modelled.
        step_fits: one KV step of a 16-row tile fits the shared memory that a kernel may opt into.

    Returns:
        (None, rows of the query tile).
    """
    if not 1 <= head_dim < 512:
        raise ValueError(f"head_dim: expected 1 to 511, given {head_dim}")
    if packed_len > 64 and head_dim < 256:
        return None, 128
    if packed_len > 16:
        return None, 64
    return None, 16 if step_fits else 64


@dataclass(frozen=True)
class RuleRow:
    """One line of `rule_table`: what each rule answers for B requests of topk branches over prefixes of L tokens."""

    prefix_len: int
    topk: int
    batch: int
    cascade: bool
    plan: str
    speedup: float
    sglang: bool
    vllm: bool
    flashinfer: None


def rule_table(
    prefix_lens: Iterable[int],
    topks: Iterable[int],
    batches: Iterable[int],
    *,
    steps: int,
    device_model: DeviceModel,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    rows: str = "branch",
) -> list[RuleRow]:
    """The engines' rules beside the prediction over (L, topk, batch), for virtual requests as `rows` says.

    `speedup` is the predicted naive time over that of the cascade. vLLM knows requests only: every virtual request
    counts as one, and they share a prefix only if there is a single request (batch = 1).
    """
    heads = dict(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads)
    lengths, topks = tuple(prefix_lens), tuple(topks)
    table = []
    for size in batches:
        for topk in topks:
            for length in lengths:
                batch = VerifyBatch([length] * size, [DraftTree.branches(topk, steps)] * size, rows=rows)
                decision = should_cascade(batch, device_model, head_dim=head_dim, dtype=dtype, **heads)
                by_plan = decision.predictions
                queries = batch.virtual_requests.rows.tolist()
                table.append(
                    RuleRow(
                        length,
                        topk,
                        size,
                        decision.cascade,
                        decision.plan,
                        by_plan["naive"].seconds / by_plan["cascade"].seconds,
                        sglang_rule(topk),
                        vllm_rule(length if size == 1 else 0, queries, num_sms=device_model.num_sms, **heads),
                        flashinfer_rule(batch.num_rows / size * num_q_heads / num_kv_heads, head_dim)[0],
                    )
                )
    return table
