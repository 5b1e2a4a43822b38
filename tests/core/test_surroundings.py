"""What surrounds a call changes nothing of it: threads, modes and settings of torch, copies and views."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from cascade_lab import merge_state, merge_states, runtime
from tests.cases import attention_case, random, run

BACKENDS = [
    "torch",
    pytest.param(
        "triton", marks=pytest.mark.skipif(runtime.triton_mode() == "absent", reason="Triton is not installed")
    ),
]


def equal(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", BACKENDS)
def test_threads_give_what_each_gives_alone(kind):
    """F2 (tests/known_faults.md): four threads at once, three calls each, against the same calls one by one.

    The launches take turns under one lock, so an exception in one thread leaves nothing for the others.
    """
    device = runtime.device() if kind == "triton" else torch.device("cpu")

    def calls(seed: int) -> list:
        case = attention_case([2 + seed, 1], [9, 4 + seed], seed=seed, device=device)
        state = run(case, kind)
        other = run(case.with_options(causal=True), kind)
        both = torch.stack([state.o, other.o], 1), torch.stack([state.lse, other.lse], 1)
        bad = random(2, 1, 8, seed=seed, device=device)
        with pytest.raises(ValueError, match="lse_b"):
            merge_state(bad, bad[..., 0], bad, bad[:1, :, 0], backend=kind)
        return [*state, *merge_state(*state, *other, backend=kind), *merge_states(*both, backend=kind)]

    alone = [calls(seed) for seed in range(4)]
    barrier = Barrier(4)

    def together(seed: int) -> list:
        barrier.wait()
        return calls(seed)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(together, range(4)))
    assert all(equal(a, b) for a, b in zip(found, alone, strict=True))
