"""What proves the claims: oracle, load recorder, masks, ranks, claims. Nothing that computes imports it.

`claims`, `reference` and `reads` are public, and loaded when first asked for: with them anyone proves claims of their
own. Importing the package registers the executor that CASCADE_LAB_TARGET asks for; it starts with the first kernel.
"""

import importlib
from typing import TYPE_CHECKING

from cascade_lab import runtime

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


def _execute() -> None:
    from cascade_lab.evidence.ptx.launch import install

    install()


if runtime.environment_executes():
    runtime.set_executor(_execute)
