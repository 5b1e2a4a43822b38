"""What a program that uses the package looks like: checked by mypy in strict mode, and run."""

from fractions import Fraction

import numpy as np
import torch

import cascade_lab as cl
from cascade_lab.drafts import Plan
from cascade_lab.paging import Layout


def verify(lens: list[int], plan: Plan, layout: Layout = "NHD") -> tuple[torch.Tensor, int]:
    """One verify round on random numbers: the tokens that follow, and how many token states moved."""
    trees = [cl.DraftTree.from_paths([[5, 3, 9], [5, 4, -1]]), cl.DraftTree.chain(3), None]
    tokens = torch.arange(sum(tree.size for tree in trees if tree is not None))
    batch = cl.VerifyBatch(lens, trees, page_size=16, tokens=tokens)
    k, v = torch.randn(2, batch.num_pages, 16, 2, 32).unbind()
    slots = batch.draft_slots()
    new = torch.randn(len(slots), 2, 32)
    cl.paging.write(k, slots, new, layout=layout)
    cl.paging.write(v, slots, new, layout=layout)
    q = torch.randn(batch.num_rows, 8, 32)
    state = cl.cascade_attention(q, k, v, batch.levels(plan), layout=layout)
    accepted = batch.accept(state.o.flatten(1).argmax(-1))
    committed = batch.commit(accepted)
    committed.move(k, v)
    return accepted.next_tokens, len(committed.src)


def report(n: int, hit: int) -> dict[str, float]:
    """What a hit is worth, by exact numbers and by arrays."""
    left: Fraction = cl.remaining(n, hit)
    pairs: int = cl.interactions(n, hit) - cl.Dense().total(n) + cl.Dense().total(hit)
    many: np.ndarray = cl.remaining(np.array([n, 2 * n]), hit)
    window = cl.SlidingWindow(1024)
    seen: np.ndarray = window.total(np.arange(1, 4))
    pages: int = cl.paging.pages_needed(n, 16)
    table = cl.paging.build_page_table([n], 16)
    held: torch.Tensor = cl.paging.pages_needed(torch.tensor([n]), 16)
    terms = cl.hand_over(hit, n, 16, rule="never the last page")
    assert pairs == 0
    assert pages == int(held) == table.shape[1]
    assert seen.tolist() == [1, 3, 6]
    return {
        "left": float(left),
        "of the longer one": float(many[1]),
        "window": float(window.remaining(n, hit)),
        "1 - h^2": cl.remaining_limit(hit / n),
        "reused": float(terms.effective_hit),
    }


if __name__ == "__main__":
    depth: int = cl.DraftTree.branches(2, 3).depth
    for plan in cl.drafts.PLANS:
        following, moved = verify([21, 13, 40], plan)
        print(plan, depth, list(following.shape), moved)
    decision = cl.should_cascade(cl.VerifyBatch([8000], [cl.DraftTree.branches(4, 5)]), cl.trigger.H100)
    print(decision.cascade, decision.predictions["cascade"].launches, report(4096, 2048))
    trace = cl.traces.replay(cl.traces.generate(requests=20), affinity="none")
    print(cl.traces.summarize(trace).requests, cl.sharding.split_tokens(8, 2, "zigzag"))
