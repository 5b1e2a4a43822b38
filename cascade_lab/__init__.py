"""cascade_lab: how attention splits, what a cascade saves, and what a prefix-cache hit is worth.

A computation is a list of levels, passes of query rows over cached tokens, whose states merge by log-sum-exp.
"""

from cascade_lab import runtime  # first: it sets Triton's interpreter switch
from cascade_lab.attention import attention
from cascade_lab.drafts import DraftTree, VerifyBatch
from cascade_lab.levels import Ledger, Level, cascade_attention, ledger
from cascade_lab.states import (
    State,
    lse_from_base2,
    lse_from_heads_first,
    lse_from_padded,
    lse_to_base2,
    lse_to_heads_first,
    merge_state,
    merge_states,
)

__version__ = "0.1.0"

__all__ = [
    "DraftTree",
    "Ledger",
    "Level",
    "State",
    "VerifyBatch",
    "attention",
    "cascade_attention",
    "ledger",
    "lse_from_base2",
    "lse_from_heads_first",
    "lse_from_padded",
    "lse_to_base2",
    "lse_to_heads_first",
    "merge_state",
    "merge_states",
    "runtime",
]
