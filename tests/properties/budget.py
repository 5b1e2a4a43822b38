"""How many cases each property is tried on, and from which seed.

`make test` takes the number each property states and one fixed seed, so every run tries the same cases. `make fuzz`
deals EXAMPLES cases out in the same proportions, from a seed of its own. Both print what they took, and a failure
prints the line that repeats it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from hypothesis import seed, settings

# What the properties of this folder state together; `test_budget` adds it up.
STATED_CASES = 6576
FIXED_SEED = 20_241_104

SEED = int(os.environ.get("FUZZ_SEED") or FIXED_SEED)
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES") or STATED_CASES)
FUZZING = "FUZZ_SEED" in os.environ


def cases(stated: int) -> Callable:
    """Try a property, already under `given`, on `stated` cases in `make test`, and fail unless they all ran."""
    budget = -(-stated * EXAMPLES // STATED_CASES)

    def decorate(test: Callable) -> Callable:
        inner = test.hypothesis.inner_test
        finished = 0

        @functools.wraps(inner)
        def counted(*args, **kwargs):
            nonlocal finished
            inner(*args, **kwargs)
            finished += 1

        test.hypothesis.inner_test = counted
        limited = settings(max_examples=budget)(seed(SEED)(test))

        @functools.wraps(limited)
        def run(*args, **kwargs):
            nonlocal finished
            finished = 0
            limited(*args, **kwargs)
            # a small strategy may hold fewer cases than `make fuzz` asks for
            assert finished >= min(budget, stated), f"only {finished} of {min(budget, stated)} cases could be drawn"

        run.stated_cases = stated
        return run

    return decorate


def header() -> str:
    """One line for the top of a test report."""
    if FUZZING:
        return f"properties: {EXAMPLES} cases, make fuzz SEED={SEED} EXAMPLES={EXAMPLES} repeats them"
    return f"properties: {STATED_CASES} cases, seed {SEED}"
