"""What proves the claims: oracle, load recorder, masks, ranks, claims. Nothing that computes imports it.

`claims`, `reference` and `reads` are public, and loaded when first asked for: with them anyone proves claims of their
own.
"""

import importlib
from typing import TYPE_CHECKING

_MODULES = (
    "claims",
    "reads",
    "reference",
)

if TYPE_CHECKING:
    from cascade_lab.evidence import (  # isort: skip
        claims as claims,
        reads as reads,
        reference as reference,
    )
else:

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_MODULES)
