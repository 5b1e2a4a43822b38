"""When engines cascade: the rules of SGLang, vLLM and FlashInfer beside the prediction of `trigger` (claim 2).

Each rule is restated from its engine's source as a function of lengths and options; none is tuned here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from cascade_lab import _checks
from cascade_lab.drafts import DraftTree, Plan, Rows, VerifyBatch
from cascade_lab.trigger import DeviceModel, should_cascade

__all__ = ["RuleRow", "flashinfer_rule", "rule_table", "sglang_rule", "vllm_rule"]


def sglang_rule(topk: int, *, sliding_window: bool = False) -> bool:
    """SGLang's FlashAttention-3 backend in target verification: topk > 1 and no sliding-window layer. Nothing else.

    Raises:
        TypeError, ValueError: a topk that is no integer >= 0.

    Example:
        >>> cl.rules.sglang_rule(topk=4), cl.rules.sglang_rule(topk=1)
        (True, False)
    """
    return _checks.integer("topk", topk, 0) > 1 and not sliding_window


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

    Raises:
        TypeError, ValueError: lengths that are no integers >= 0, other numbers that are none >= 1, or head counts that
            do not divide.

    Example:
        >>> heads = dict(num_q_heads=32, num_kv_heads=8, num_sms=132)
        >>> cl.rules.vllm_rule(4096, [1] * 64, **heads), cl.rules.vllm_rule(4096, [1] * 4, **heads)  # 8 at least
        (True, False)
    """
    common_prefix_len = _checks.integer("common_prefix_len", common_prefix_len, 0)
    query_lens = _checks.integer_list("query_lens", query_lens)
    num_q_heads, num_kv_heads = _checks.heads(num_q_heads, num_kv_heads)
    num_sms, block_size = _checks.integer("num_sms", num_sms, 1), _checks.integer("block_size", block_size, 1)
    decode_context_parallel = _checks.integer("decode_context_parallel", decode_context_parallel, 1)
    if computed_lens is not None:
        common_prefix_len = min((common_prefix_len, *_checks.integer_list("computed_lens", computed_lens)))
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

    Raises:
        TypeError, ValueError: a packed_len that is no number >= 0, or a head_dim that is no integer from 1 to 511.

    Example:
        >>> cl.rules.flashinfer_rule(20, 128)
        (None, 64)
    """
    packed_len, head_dim = _checks.number("packed_len", packed_len, 0), _checks.integer("head_dim", head_dim, 1, 511)
    if packed_len > 64 and head_dim < 256:
        return None, 128
    if packed_len > 16:
        return None, 64
    return None, 16 if step_fits else 64


@dataclass(frozen=True)
class RuleRow:
    """One line of `rule_table`: what each rule answers for R requests of topk branches over prefixes of L tokens.

    Example:
        >>> heads = dict(num_q_heads=32, num_kv_heads=8, head_dim=128)
        >>> (row,) = cl.rules.rule_table([8192], [4], [8], steps=5, device_model=cl.trigger.H100, **heads)
        >>> row.topk, row.batch, row.sglang, row.cascade == (row.speedup > 1)
        (4, 8, True, True)
    """

    prefix_len: int
    topk: int
    batch: int
    cascade: bool
    plan: Plan
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
    rows: Rows = "branch",
) -> list[RuleRow]:
    """The engines' rules beside the prediction over (L, topk, batch), for virtual requests as `rows` says.

    `speedup` is the predicted naive time over that of the cascade. vLLM knows requests only: every virtual request
    counts as one, and they share a prefix only if there is a single request (batch = 1).

    Raises:
        TypeError, ValueError: prefix lengths that are no integers >= 0, other numbers that are none >= 1, or arguments
            that `should_cascade` refuses.

    Example:
        >>> heads = dict(num_q_heads=32, num_kv_heads=8, head_dim=128)
        >>> table = cl.rules.rule_table([256, 8192], [4], [1], steps=5, device_model=cl.trigger.H100, **heads)
        >>> [(row.prefix_len, row.sglang, row.vllm) for row in table]
        [(256, True, False), (8192, True, False)]
    """
    num_q_heads, num_kv_heads = _checks.heads(num_q_heads, num_kv_heads)
    heads = dict(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads)
    lengths, topks = _checks.integer_list("prefix_lens", prefix_lens), _checks.integer_list("topks", topks, 1)
    steps, head_dim = _checks.integer("steps", steps, 1), _checks.integer("head_dim", head_dim, 1, 511)
    table = []
    for size in _checks.integer_list("batches", batches, 1):
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
