"""cascade_lab: how attention splits, what a cascade saves, and what a prefix-cache hit is worth.

A computation is a list of levels, passes of query rows over cached tokens, whose states merge by log-sum-exp. The
package's modules are attributes, loaded when first asked for; `attention` is the function. Examples begin with
`import torch` and `import cascade_lab as cl`.
"""

import importlib
from typing import TYPE_CHECKING

from cascade_lab import regions, runtime
from cascade_lab.applicability import check_applicability
from cascade_lab.attention import attention
from cascade_lab.drafts import DraftTree, VerifyBatch
from cascade_lab.levels import Ledger, Level, cascade_attention, check_plan, ledger, shared_prefix_levels
from cascade_lab.planning import Plan, plan
from cascade_lab.prefix import (
    PrefixHitBatch,
    effective_hit,
    hand_over,
    interactions,
    linear_remaining,
    prefix_hit_levels,
    remaining,
    remaining_limit,
    remaining_scattered,
    scale_breakdown,
)
from cascade_lab.regions import (
    CSA,
    HCA,
    MLA,
    NSA,
    Chunked,
    Dense,
    SinkWindow,
    SlidingWindow,
    TopK,
    TopKBlocks,
)
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
from cascade_lab.trigger import DeviceModel, should_cascade

__version__ = "0.1.0"

__all__ = [
    "CSA",
    "Chunked",
    "Dense",
    "DeviceModel",
    "DraftTree",
    "HCA",
    "Ledger",
    "Level",
    "MLA",
    "NSA",
    "Plan",
    "PrefixHitBatch",
    "SinkWindow",
    "SlidingWindow",
    "State",
    "TopK",
    "TopKBlocks",
    "VerifyBatch",
    "attention",
    "cascade_attention",
    "check_applicability",
    "check_plan",
    "effective_hit",
    "hand_over",
    "interactions",
    "ledger",
    "linear_remaining",
    "lse_from_base2",
    "lse_from_heads_first",
    "lse_from_padded",
    "lse_to_base2",
    "lse_to_heads_first",
    "merge_state",
    "merge_states",
    "plan",
    "prefix_hit_levels",
    "regions",
    "remaining",
    "remaining_limit",
    "remaining_scattered",
    "runtime",
    "scale_breakdown",
    "shared_prefix_levels",
    "should_cascade",
]

_MODULES = (
    "applicability",
    "calibration",
    "distributed",
    "drafts",
    "evidence",
    "hf",
    "levels",
    "paging",
    "planning",
    "prefix",
    "rules",
    "sharding",
    "states",
    "traces",
    "trigger",
)

if TYPE_CHECKING:
    from cascade_lab import (  # isort: skip
        applicability as applicability,
        calibration as calibration,
        distributed as distributed,
        drafts as drafts,
        evidence as evidence,
        hf as hf,
        levels as levels,
        paging as paging,
        planning as planning,
        prefix as prefix,
        rules as rules,
        sharding as sharding,
        states as states,
        traces as traces,
        trigger as trigger,
    )
else:

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__version__"])
