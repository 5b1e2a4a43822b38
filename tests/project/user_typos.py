"""What a type checker has to refuse: one mistake on each line that says so. It is checked and never run."""

import numpy as np
import torch

import cascade_lab as cl

batch = cl.VerifyBatch([21], [cl.DraftTree.chain(3)], rows="nodes")  # wrong: rows are "node"
plan = batch.levels("casacde")  # wrong: no such plan
tails = batch.copied_tails("fused")  # wrong: a fused pass copies nothing
hits = cl.PrefixHitBatch([21], [5]).levels("cascade")  # wrong: a plan of drafts
q, k = torch.randn(3, 8, 32), torch.randn(4, 16, 2, 32)
state = cl.cascade_attention(q, k, k, plan, layout="HDN")  # wrong: no such layout
merged = cl.merge_state(*state, *state, backend="cuda")  # wrong: no such backend
reused = cl.effective_hit(5, 21, 16, rule="whole page")  # wrong: no such rule
label: str = cl.DraftTree.chain(3).depth  # wrong: a number
total: np.ndarray = cl.Dense().total(8)  # wrong: a number of a number
pages: int = cl.paging.pages_needed(torch.tensor([8]), 16)  # wrong: a tensor of a tensor
left: float = cl.remaining(np.array([8]), 4)  # wrong: an array of an array
slices = cl.sharding.split_tokens(8, 2, "zig-zag")  # wrong: no such layout
pays = cl.should_cascade(batch, "H100")  # wrong: a name in place of a device
pairs = cl.traces.replay([], affinity="sessions")  # wrong: no such affinity
level = cl.Level(state.lse, state.lse, state.lse, page_size="16")  # wrong: text for a number
nothing = cl.no_such_name  # wrong: no such name
plan.append(batch)  # wrong: plans are tuples
