"""A speculative round by the public calls: draft tokens, acceptance, commit, and trees in the forms of engines."""

from __future__ import annotations

import math
import random as python_random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from cascade_lab import DraftTree, VerifyBatch, attention, cascade_attention, paging
from cascade_lab.drafts import PLANS, Accepted, pack_mask
from cascade_lab.evidence.reference import Reference, assert_state_close
from tests.cases import int32, offsets, random
from tests.verify import CHAIN, FORK, SHUFFLED, STAR, path_to

VOCABULARY, HEADS, KV_HEADS, DIM = 11, 4, 2, 16


@dataclass(frozen=True)
class Model:
    """One attention layer between random matrices: enough to have an answer that depends on every token before."""

    embedding: Tensor
    places: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    head: Tensor

    @classmethod
    def of(cls, seed: int, dtype=torch.float64, device="cpu") -> Model:
        width, shapes = 24, dict(embedding=(VOCABULARY, 24), places=(64, 24))
        shapes |= dict(q=(width, HEADS * DIM), k=(width, KV_HEADS * DIM), v=(width, KV_HEADS * DIM))
        shapes |= dict(head=(HEADS * DIM, VOCABULARY))
        drawn = (random(*shape, seed=100 * seed + i) for i, shape in enumerate(shapes.values()))
        return cls(*(x.to(dtype).to(device) for x in drawn))

    def project(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.embedding[tokens] + self.places[positions]
        heads = (self.q, HEADS), (self.k, KV_HEADS), (self.v, KV_HEADS)
        return tuple((x @ matrix).view(len(x), count, DIM) for matrix, count in heads)

    def predict(self, o: Tensor) -> Tensor:
        return (o.flatten(1) @ self.head).argmax(-1)

    def next_token(self, tokens: list[int]) -> int:
        """Greedy, from the definition: the last row over all keys, one head at a time."""
        q, k, v = self.project(torch.tensor(tokens), torch.arange(len(tokens)))
        rows = []
        for head in range(HEADS):
            keys, values = k[:, head * KV_HEADS // HEADS], v[:, head * KV_HEADS // HEADS]
            rows.append(((keys @ q[-1, head]) * DIM**-0.5).softmax(0) @ values)
        return int(self.predict(torch.stack(rows)[None]))

    def continued(self, tokens: list[int], count: int) -> list[int]:
        out = []
        for _ in range(count):
            out.append(self.next_token(tokens + out))
        return out


def drafted(model: Model, text: list[int], draw: python_random.Random, right: int) -> DraftTree:
    """A tree under the last token of `text`: `right` tokens that the model would say, wrong ones beside and behind."""
    said = model.continued(text, right + 1)
    parents, tokens = [-1], [text[-1]]

    def grow(parent: int, token: int) -> int:
        parents.append(parent)
        tokens.append(token)
        return len(tokens) - 1

    at = 0
    for step in range(right + 1):
        wrong = [token for token in range(VOCABULARY) if token != said[step]]
        side = grow(at, draw.choice(wrong))
        grow(side, draw.randrange(VOCABULARY))
        if step < right:
            at = grow(at, said[step])
    order = draw.sample(range(len(tokens)), len(tokens))
    moved, labels = [-1] * len(tokens), [0] * len(tokens)
    for i, place in enumerate(order):
        moved[place], labels[place] = -1 if parents[i] < 0 else order[parents[i]], tokens[i]
    return DraftTree(moved, labels)


@pytest.mark.parametrize(("rows", "layout"), [("node", "NHD"), ("branch", "HND")])
@pytest.mark.parametrize("plan", PLANS)
def test_rounds_of_six_lines_say_what_greedy_decoding_says(backend, device, loads, plan, rows, layout):
    """Two rounds over ragged requests with shuffled pages; one of them is not speculated on in the first round."""
    oracle, model = Model.of(3), Model.of(3, torch.float32, device)
    draw, page = python_random.Random(f"{plan} {rows} {layout}"), 4
    texts = [[draw.randrange(VOCABULARY) for _ in range(n)] for n in (9, 1, 14, 6)]
    table = int32(torch.randperm(40, generator=torch.Generator().manual_seed(1)).view(4, 10).tolist(), device)
    shape = (40, page, KV_HEADS, DIM) if layout == "NHD" else (40, KV_HEADS, page, DIM)
    k, v = (torch.full(shape, math.nan, device=device) for _ in range(2))
    # the last token of a text is drafted again as the root; all before are in the cache
    lens = [len(text) - 1 for text in texts]
    for r, text in enumerate(texts):
        _, new_k, new_v = model.project(torch.tensor(text[:-1], dtype=torch.int64), torch.arange(lens[r]))
        slots = paging.token_slots(table[r : r + 1], [lens[r]], page)
        paging.write(k, slots, new_k, layout=layout)
        paging.write(v, slots, new_v, layout=layout)
    said = [oracle.continued(text, 12) for text in texts]
    spoken = [0] * 4
    for step, rights in enumerate(((2, 0, 3, None), (1, 3, 0, 2))):
        trees = [
            None if right is None else drafted(oracle, text + said[r][: spoken[r]], draw, right)
            for r, (text, right) in enumerate(zip(texts, rights, strict=True))
        ]
        batch = VerifyBatch(lens, trees, page, rows, page_table=table, device=device)
        q, new_k, new_v = model.project(batch.tokens, batch.positions)
        paging.write(k, batch.draft_slots(), new_k[batch.node_rows], layout=layout)
        paging.write(v, batch.draft_slots(), new_v[batch.node_rows], layout=layout)
        o = cascade_attention(q, k, v, batch.levels(plan), layout=layout, backend=backend).o
        accepted = batch.accept(model.predict(o))
        committed = batch.commit(accepted)
        committed.move(k, v, layout=layout)

        assert accepted.lens.tolist() == [0 if right is None else right + 1 for right in rights]
        for r, right in enumerate(rights):
            if right is None:
                assert accepted.next_tokens[r] == -1
                continue
            path = accepted.tokens[r][: right + 1].tolist()
            assert [*path[1:], int(accepted.next_tokens[r])] == said[r][spoken[r] : spoken[r] + right + 1], step
            spoken[r] += right + 1
        lens = list(committed.prefix_lens)
    # what is in the cache is what prefilling the accepted text would have put there
    for r, text in enumerate(texts):
        whole = (text + said[r])[: lens[r]]
        assert lens[r] == len(text) - 1 + spoken[r]
        _, expected_k, expected_v = oracle.project(torch.tensor(whole), torch.arange(lens[r]))
        slots = paging.token_slots(committed.page_table[r : r + 1], [lens[r]], page)
        for cache, expected in ((k, expected_k), (v, expected_v)):
            kept = paging.read(cache, slots, layout=layout).cpu().double()
            torch.testing.assert_close(kept, expected, atol=1e-5, rtol=0)


def random_tree(draw: python_random.Random, size: int, vocabulary: int, rooted: bool) -> DraftTree:
    """A forest, or a tree, in random storage order; siblings may have the same token."""
    grown = [-1 if i == 0 else draw.choice([*range(i)] if rooted else [-1, *range(i)]) for i in range(size)]
    order = draw.sample(range(size), size)
    parents = [-1] * size
    for i, parent in enumerate(grown):
        parents[order[i]] = -1 if parent < 0 else order[parent]
    return DraftTree(parents, [draw.randrange(vocabulary) for _ in range(size)])


def longest(tree: DraftTree | None, allows, score=lambda node: 0.0) -> list[int]:
    """The longest path of allowed nodes by climbing each, best score first among equals, then the earliest end."""
    best: tuple = (0, -math.inf, 0, [])
    for end in range(0 if tree is None else tree.size):
        path = path_to(list(tree.parents), end)
        if all(allows(node) for node in path):
            best = max(best, (len(path), round(sum(map(score, path)), 9), -end, path))
    return best[3]


def batches(seed: int, vocabulary: int) -> tuple[VerifyBatch, list[DraftTree | None], bool]:
    draw = python_random.Random(seed)
    rooted = draw.random() < 0.5
    trees = [
        None if draw.random() < 0.2 else random_tree(draw, draw.randint(1, 9), vocabulary, rooted) for _ in range(4)
    ]
    lens = [draw.randint(0, 11) for _ in trees]
    return VerifyBatch(lens, trees, 4, draw.choice(["node", "branch"])), trees, rooted


def nodes_of(accepted: Accepted) -> list[list[int]]:
    paths = [row[:n] for row, n in zip(accepted.nodes.tolist(), accepted.lens.tolist(), strict=True)]
    assert all(set(row[n:]) <= {-1} for row, n in zip(accepted.nodes.tolist(), accepted.lens.tolist(), strict=True))
    return paths


@pytest.mark.parametrize("seed", range(40))
def test_greedy_acceptance_is_the_longest_agreeing_path(seed):
    batch, trees, rooted = batches(seed, vocabulary=2)
    generator = torch.Generator().manual_seed(seed)
    by_node = [torch.randint(2, (tree.size if tree else 0,), generator=generator).tolist() for tree in trees]
    request = torch.repeat_interleave(torch.arange(len(trees)), torch.tensor(batch.row_counts)).tolist()
    predicted = torch.tensor(
        [by_node[r][n] for r, n in zip(request, batch.row_nodes.tolist(), strict=True)], dtype=torch.int64
    )
    first = None if rooted else torch.randint(2, (len(trees),), generator=generator)
    accepted = batch.accept(predicted, first=first)
    for r, (tree, path) in enumerate(zip(trees, nodes_of(accepted), strict=True)):

        def agrees(node, r=r, tree=tree):
            parent = tree.parents[node]
            if parent < 0:
                return first is None or tree.labels[node] == int(first[r])
            return tree.labels[node] == by_node[r][parent]

        assert path == longest(tree, agrees)
        assert accepted.tokens[r].tolist()[: len(path)] == [tree.labels[node] for node in path]
        behind = by_node[r][path[-1]] if path else -1 if first is None else int(first[r])
        assert accepted.next_tokens[r] == behind


@pytest.mark.parametrize("rule", ["typical", "relaxed"])
@pytest.mark.parametrize("seed", range(20))
def test_acceptance_by_probabilities_follows_its_definition(seed, rule):
    batch, trees, rooted = batches(seed, vocabulary=6)
    tempered = random(sum(tree.size for tree in trees if tree), 6, seed=seed).double() * 2
    by_node = tempered.softmax(-1).split([tree.size if tree else 0 for tree in trees])
    request = torch.repeat_interleave(torch.arange(len(trees)), torch.tensor(batch.row_counts)).tolist()
    rows = [by_node[r][n] for r, n in zip(request, batch.row_nodes.tolist(), strict=True)]
    posterior = torch.stack(rows) if rows else torch.zeros(0, 6).double()
    first = None if rooted else (random(len(trees), 6, seed=seed + 99).double() * 2).softmax(-1)
    if rule == "typical":
        accepted = batch.accept_typical(posterior, first=first, epsilon=0.2, delta=0.6)
    else:
        accepted = batch.accept_relaxed(posterior, first=first, topk=3, delta=0.3)
    for r, (tree, path) in enumerate(zip(trees, nodes_of(accepted), strict=True)):

        def behind(node, r=r, tree=tree):
            parent = tree.parents[node]
            p = by_node[r][parent] if parent >= 0 else None if first is None else first[r]
            return p if p is None else p.tolist()

        def allows(node, tree=tree, behind=behind):
            p = behind(node)
            if p is None:
                return True
            x = p[tree.labels[node]]
            if rule == "typical":
                return x > min(0.2, 0.6 * math.exp(sum(one * math.log(one) for one in p)))
            return x in sorted(p)[-3:] and x >= max(p) - 0.3

        def score(node, tree=tree, behind=behind):
            p = behind(node)
            return 0.0 if p is None else math.log(p[tree.labels[node]])

        assert path == longest(tree, allows, score)
        if path:
            assert accepted.next_tokens[r] == int(by_node[r][path[-1]].argmax())


def test_typical_acceptance_takes_more_where_the_target_is_unsure():
    """Medusa's defaults: 0.02 passes behind a flat posterior over 64 tokens and not behind a peaked one."""
    flat = torch.full((64,), 0.98 / 63)
    flat[5] = 0.02
    peaked = torch.full((64,), 0.0)
    peaked[0], peaked[5] = 0.98, 0.02
    batch = VerifyBatch([7, 7], [DraftTree([-1, 0], [1, 5])] * 2, 4)
    rows = torch.stack((flat, flat, peaked, peaked))
    assert batch.accept_typical(rows).lens.tolist() == [2, 1]
    # 0.3 e^-H: e^H is nearly 64 tokens for the one, and 1.1 for the other
    assert 0.3 / 64 < 0.02 < 0.09 < 0.3 * math.exp(0.98 * math.log(0.98) + 0.02 * math.log(0.02))
    assert batch.accept_relaxed(rows, topk=1).lens.tolist() == [2, 1]
    assert batch.accept_relaxed(rows, topk=2, delta=0.97).lens.tolist() == [2, 2]


BATCH = VerifyBatch([5, 8], [DraftTree([-1, 0, 0], [1, 2, 3]), DraftTree([-1, 0], [0, 4])], 4)
SURE = torch.eye(5)[[2, 0, 0, 1, 1]]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: BATCH.accept(torch.zeros(4).long()),
            ValueError,
            r"predicted: expected \[T\] = \[5\], given shape \(4,\)",
        ),
        (lambda: BATCH.accept(torch.zeros(5)), TypeError, "predicted: expected int64 or int32, given torch.float32"),
        (
            lambda: BATCH.accept(torch.zeros(5).long(), first=torch.zeros(3).long()),
            ValueError,
            r"first: expected \[R\] = \[2\]",
        ),
        (
            lambda: VerifyBatch([5], [DraftTree([-1, -1], [1, 2])], 4).accept(torch.zeros(2).long()),
            ValueError,
            "first: expected the target's answer behind each prefix, for request 0 has 2 drafts on its prefix",
        ),
        (
            lambda: VerifyBatch([5], [DraftTree([-1])], 4).accept(torch.zeros(1).long()),
            ValueError,
            "tokens: expected one",
        ),
        (
            lambda: VerifyBatch([5], [DraftTree([-1])], 4).tokens,
            ValueError,
            "tokens: expected one per draft, given none",
        ),
        (
            lambda: VerifyBatch([5], [DraftTree([-1, 0], [1, 2])], 4, "leaf").accept(torch.zeros(1).long()),
            ValueError,
            "rows: expected 'node' or 'branch', where every node has a row, given 'leaf'",
        ),
        (
            lambda: VerifyBatch([5], [DraftTree([-1, 0])], 4, tokens=[1]),
            ValueError,
            r"tokens: expected one per draft \(2\)",
        ),
        (lambda: BATCH.accept_typical(SURE * 2), ValueError, "posterior: expected probabilities that add up to 1"),
        (lambda: BATCH.accept_typical(SURE[:, :4]), ValueError, "posterior: expected"),
        (lambda: BATCH.accept_typical(SURE.half()), TypeError, "posterior: expected float32 or float64"),
        (lambda: BATCH.accept_typical(SURE, epsilon=2), ValueError, r"epsilon: expected a number in \[0, 1\], given 2"),
        (lambda: BATCH.accept_typical(SURE, delta=-1), ValueError, "delta: expected a number >= 0, given -1"),
        (lambda: BATCH.accept_relaxed(SURE, topk=0), ValueError, "topk: expected a number >= 1, given 0"),
        (lambda: BATCH.accept_relaxed(SURE, first=SURE[:3]), ValueError, r"first: expected \[R, V\] = \[2, 5\]"),
        (lambda: BATCH.commit([[0]]), ValueError, r"accepted: expected one path per request \(2\), given 1"),
        (lambda: BATCH.commit([[0], [1]]), ValueError, r"accepted\[1\]: expected nodes of a tree of 2 from the prefix"),
        (lambda: BATCH.commit([[0, 2], [0, 2]]), ValueError, r"accepted\[1\]: expected nodes of a tree of 2"),
        (lambda: BATCH.commit([[0, 2.0], []]), TypeError, r"accepted\[0\]\[1\]: expected an integer, given 2.0"),
        (
            lambda: BATCH.commit([[], []], copied=VerifyBatch([5], [DraftTree(CHAIN)], 4).copied_tails()),
            ValueError,
            "copied: expected the copied tails of this batch, 5 virtual requests in pages of 4, given 3",
        ),
    ],
)
def test_what_cannot_be_accepted_or_committed_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_round_of_nobody_and_without_drafts():
    batch = VerifyBatch([6, 3], [None, None], 4)
    accepted = batch.accept(torch.zeros(0).long(), first=torch.tensor([3, 4]))
    assert accepted.lens.tolist() == [0, 0]
    assert accepted.next_tokens.tolist() == [3, 4]
    committed = batch.commit(accepted)
    assert committed.prefix_lens == (6, 3)
    assert committed.page_table.tolist() == [[0, 1], [2, -1]]
    assert len(committed.src) == len(committed.free_pages) == 0
    nobody = VerifyBatch([], [], 4)
    assert nobody.commit(nobody.accept(torch.zeros(0).long())).prefix_lens == ()
    assert nobody.draft_slots().tolist() == nobody.prefix_slots().tolist() == []


def token_cache(batch: VerifyBatch, pages: int) -> Tensor:
    """Each token state says whose it is: 1000 r + its place for a prefix token, and 500 more for draft node n."""
    cache = torch.full((pages, batch.page_size, 1, 1), math.nan)
    for r, length in enumerate(batch.prefix_lens):
        for slots, base in ((batch.prefix_slots(r), 1000 * r), (batch.draft_slots(r), 1000 * r + 500)):
            paging.write(cache, slots, (base + torch.arange(float(len(slots))))[:, None, None])
        assert len(batch.prefix_slots(r)) == length
    return cache


PATHS = [[3, 0, 2], [0], [], [2, 1]]
COMMITTED = [SHUFFLED, FORK, None, STAR]


def expected_states(prefix_lens, shared: int) -> list[list[float]]:
    return [
        [float((0 if n < shared else 1000 * r) + n) for n in range(length)]
        + [1000.0 * r + 500 + node for node in PATHS[r]]
        for r, length in enumerate(prefix_lens)
    ]


@pytest.mark.parametrize("shared", [0, 8])
@pytest.mark.parametrize("page", [1, 4])
def test_accepted_paths_close_up_behind_their_prefixes(page, shared):
    lens = [9, 12, 8, 15]
    trees = [parents and DraftTree(parents) for parents in COMMITTED]
    batch = VerifyBatch(lens, trees, page, shared_prefix_len=shared)
    cache = token_cache(batch, batch.num_pages)
    if shared:  # all requests wrote the shared slots, and the first one's are to stay
        paging.write(cache, batch.prefix_slots(0)[:shared], torch.arange(float(shared))[:, None, None])
    committed = batch.commit(PATHS)
    committed.move(cache)
    assert committed.prefix_lens == (12, 13, 8, 17)
    for r, expected in enumerate(expected_states(lens, shared)):
        slots = paging.token_slots(committed.page_table[r : r + 1], [committed.prefix_lens[r]], page)
        assert paging.read(cache, slots).flatten().tolist() == expected
    kept = set(committed.page_table[committed.page_table >= 0].tolist())
    assert kept | set(committed.free_pages.tolist()) == set(range(batch.num_pages))
    assert not kept & set(committed.free_pages.tolist())
    # only what is out of its place moves: 3, 0, 2 to 0, 1, 2 and 2, 1 to 0, 1
    assert len(committed.src) == 2 + 0 + 0 + 1


@pytest.mark.parametrize("rows", ["node", "branch", "leaf"])
@pytest.mark.parametrize("plan", ["naive", "cascade"])
def test_after_copied_tails_the_accepted_pages_take_their_place(plan, rows):
    """Nothing moves: the virtual request that owns tail and path in order becomes the request."""
    lens, page = [9, 12, 8, 15], 4
    batch = VerifyBatch(lens, [parents and DraftTree(parents) for parents in COMMITTED], page, rows)
    copied = batch.copied_tails(plan)
    cache = token_cache(batch, copied.num_pages)
    paging.move(cache, copied.src, copied.dst)
    committed = batch.commit(PATHS, copied=copied)
    assert len(committed.src) == 0
    assert committed.prefix_lens == (12, 13, 8, 17)
    for r, expected in enumerate(expected_states(lens, 0)):
        slots = paging.token_slots(committed.page_table[r : r + 1], [committed.prefix_lens[r]], page)
        assert paging.read(cache, slots).flatten().tolist() == expected
    kept = committed.page_table[committed.page_table >= 0].tolist()
    assert len(set(kept)) == len(kept)
    assert sorted([*kept, *committed.free_pages.tolist()]) == list(range(copied.num_pages))


def test_slots_tokens_and_rows_of_all_requests():
    trees = [DraftTree(SHUFFLED, range(10, 17)), None, DraftTree(FORK, range(20, 25))]
    for rows in ("node", "branch"):
        batch = VerifyBatch([13, 4, 0], trees, 4, rows)
        assert batch.draft_slots().tolist() == sum((batch.draft_slots(r).tolist() for r in range(3)), [])
        assert batch.prefix_slots().tolist() == sum((batch.prefix_slots(r).tolist() for r in range(3)), [])
        assert batch.tokens.tolist() == [
            (10 if t < batch.row_counts[0] else 20) + n for t, n in enumerate(batch.row_nodes.tolist())
        ]
        assert batch.tokens[batch.node_rows].tolist() == [*range(10, 17), *range(20, 25)]
        given = VerifyBatch([13, 4, 0], trees, 4, rows, tokens=torch.arange(12))
        assert given.tokens[given.node_rows].tolist() == list(range(12))
    assert batch.num_rows > 12


def test_greedy_verification_as_sglang_tests_it():
    """Its two requests of six candidates: the target's tokens 3, 4, 5 and 11, 12 are on a path, 18 is on none."""
    next_token = [[1, 2, -1, 4, 5, -1], [4, 2, 3, -1, 5, -1]]
    next_sibling = [[-1, 3, -1, -1, -1, -1], [-1, -1, -1, -1, 1, -1]]
    trees = [DraftTree.from_retrieve_links(*links) for links in zip(next_token, next_sibling, strict=True)]
    assert [tree.parents for tree in trees] == [(-1, 0, 1, 0, 3, 4), (-1, 0, 1, 2, 0, 4)]
    # its second tree keeps the later sibling first, and ours are always in storage order
    assert trees[0].retrieve_links()[1].tolist() == next_sibling[0]
    assert trees[1].retrieve_links()[0].tolist() == [1, 2, 3, -1, 5, -1]
    predicted = torch.full((2, 6), 18)
    for (r, node), token in {(0, 0): 3, (0, 3): 4, (0, 4): 5, (1, 0): 11, (1, 4): 12}.items():
        predicted[r, node] = token
    batch = VerifyBatch([30, 17], trees, 16, tokens=[*range(6), *range(7, 13)])
    accepted = batch.accept(predicted.flatten())
    assert accepted.nodes.tolist() == [[0, 3, 4, 5], [0, 4, 5, -1]]
    assert (accepted.lens - 1).tolist() == [3, 2]
    assert accepted.next_tokens.tolist() == [18, 18]


def test_a_tree_is_rebuilt_from_its_mask_as_sglang_tests_it():
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    tree = DraftTree.from_dense_mask(mask)
    assert [x.tolist() for x in tree.retrieve_links()] == [[1, -1, 3, -1], [-1, 2, -1, -1]]
    assert tree.positions(12).tolist() == [12, 13, 13, 14]


@pytest.mark.parametrize("seed", range(12))
def test_trees_come_back_from_the_forms_that_engines_keep(seed):
    draw = python_random.Random(seed)
    tree = random_tree(draw, draw.randint(1, 12), 9, rooted=seed % 2 == 0)
    links = tree.retrieve_links()
    assert {x.dtype for x in links} == {torch.int64}
    assert DraftTree.from_retrieve_links(*links) == tree
    indices = tree.retrieve_indices()
    assert indices.shape == (len(tree.leaves), tree.depth)
    for leaf, row in zip(tree.leaves, indices.tolist(), strict=True):
        path = path_to(list(tree.parents), leaf)
        assert row == path + [-1] * (tree.depth - len(path))
    shuffled = indices[torch.randperm(len(indices), generator=torch.Generator().manual_seed(seed))]
    assert DraftTree.from_retrieve_indices(shuffled) == tree
    assert DraftTree.from_retrieve_indices(tree.retrieve_indices(pad=-2).tolist(), pad=-2) == tree
    # tokens along the branches, and back
    tokens = tree.tokens()
    along = torch.where(indices >= 0, tokens[indices.clamp(min=0)], -7)
    assert torch.equal(tree.tokens(paths=along), tokens)
    assert torch.equal(tree.tokens(paths=torch.stack((along, along + 1))), torch.stack((tokens, tokens + 1)))


def test_padding_is_no_node():
    """K93 (tests/known_faults.md): EAGLE's padded retrieve_indices and Medusa's, padded by -2, as paths of labels."""
    tree = DraftTree.from_paths([[0, 1, 3], [0, 2, -1]])
    assert tree.parents == (-1, 0, 1, 0)
    assert tree.labels == (0, 1, 3, 2)
    assert DraftTree.from_paths(torch.tensor([[0, 1, 3], [0, 2, -2]]), pad=-2) == tree
    assert DraftTree.from_paths([torch.tensor([0, 1, 3]), [torch.tensor(0), 2]]).labels == (0, 1, 3, 2)
    assert DraftTree.from_paths([[0, 1, 3], [0, 2, -1]], pad=None).parents == (-1, 0, 1, 0, 3)
    with pytest.raises(ValueError, match=r"paths\[1\]: expected -1 at the end alone, given \[0, -1, 3\]"):
        DraftTree.from_paths([[0, 1, 3], [0, -1, 3]])
    with pytest.raises(ValueError, match="parents: expected at least one node"):
        DraftTree.from_paths([[-1, -1]])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: DraftTree.from_retrieve_links([1, -1], [-1]),
            ValueError,
            "next_sibling: expected 2 links as next_token",
        ),
        (
            lambda: DraftTree.from_retrieve_links([2, -1], [-1, -1]),
            ValueError,
            "next_token: expected ids below 2, given 2",
        ),
        (
            lambda: DraftTree.from_retrieve_links([2, 2, -1], [-1, -1, -1]),
            ValueError,
            "next_token: expected one link to node 2, given another from node 1",
        ),
        (lambda: DraftTree.from_retrieve_links([-1, -1], [1, 0]), ValueError, "next_sibling: expected no cycle"),
        (lambda: DraftTree.from_retrieve_links([1, 0], [-1, -1]), ValueError, "parents: expected no cycle"),
        (lambda: DraftTree.from_retrieve_links([1.0], [-1]), TypeError, r"next_token\[0\]: expected an integer"),
        (
            lambda: DraftTree.from_retrieve_indices([[0, 1], [1, 0]]),
            ValueError,
            r"indices\[1\]: expected node 1 under 0",
        ),
        (
            lambda: DraftTree.from_retrieve_indices([[0, -1, 1]]),
            ValueError,
            r"indices\[0\]: expected node ids, then -1",
        ),
        (lambda: DraftTree.from_retrieve_indices([[0, -2]]), ValueError, r"indices\[0\]: expected node ids, then -1"),
        (
            lambda: DraftTree.from_retrieve_indices([[0, 2]]),
            ValueError,
            "indices: expected every node up to 2, given none",
        ),
        (lambda: DraftTree.from_retrieve_indices([[0.5]]), TypeError, r"indices\[0\]\[0\]: expected an integer"),
        (lambda: DraftTree.from_retrieve_indices([[0]], pad=None), TypeError, "pad: expected an integer, given None"),
        (lambda: DraftTree([-1, 0]).retrieve_indices(pad=0.5), TypeError, "pad: expected an integer, given 0.5"),
        (lambda: DraftTree([-1, 0], [4]), ValueError, r"labels: expected one per node \(2\), given 1"),
        (
            lambda: DraftTree([-1, 0]).tokens(),
            ValueError,
            "steps: expected candidates or paths for a tree without labels",
        ),
        (lambda: DraftTree([-1], ["a"]).tokens(), TypeError, r"labels\[0\]: expected an integer, given 'a'"),
        (lambda: DraftTree(STAR).tokens(torch.zeros(2, 2)), ValueError, r"steps: expected .*at least 2, at least 3"),
        (lambda: DraftTree([-1], [-1]).tokens(torch.zeros(2, 2)), ValueError, r"labels\[0\]: expected a number >= 0"),
        (
            lambda: DraftTree(FORK).tokens(torch.zeros(3, 3), paths=torch.zeros(2, 3)),
            ValueError,
            "paths: expected None beside steps, given both",
        ),
        (lambda: DraftTree(FORK).tokens(paths=torch.zeros(3, 3)), ValueError, r"paths: expected \[..., 2, 3\]"),
        (
            lambda: DraftTree(FORK).tokens(paths=torch.arange(6).view(2, 3)),
            ValueError,
            "paths: expected one token for node 0 on all its branches, given another on branch 1",
        ),
    ],
)
def test_broken_forms_of_a_tree_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_tokens_are_looked_up_by_step_and_rank():
    """Medusa's choices name ranks, some of them skipped; without labels a node's rank is its place among siblings."""
    steps = torch.arange(12).view(3, 4) * 10
    choices = DraftTree.from_paths([(0,), (0, 1), (0, 3), (0, 1, 2)])
    assert choices.tokens(steps).tolist() == [0, 50, 70, 100]
    assert DraftTree([-1, 0, 0, 1]).tokens(steps).tolist() == [0, 40, 50, 80]
    batched = torch.stack((steps, steps + 1))
    assert choices.tokens(batched).tolist() == [[0, 50, 70, 100], [1, 51, 71, 101]]
    assert DraftTree(FORK).tokens(steps.float()).dtype == torch.float32
    assert DraftTree.chain(3).depth == 3
    assert DraftTree.__annotations__["depth"] == "int"


MASKS = [(3, 70), (1, 1), (4, 9), (2, 0)]


def test_any_mask_is_a_tree_mask_over_all_keys(backend, device, loads):
    """Holes, unseen first keys, rows that see nothing, more than 64 keys; the oracle is the dense formula."""
    lens, rows = [keys for _, keys in MASKS], [count for count, _ in MASKS]
    generator = torch.Generator().manual_seed(5)
    masks = [torch.rand(*shape, generator=generator) < 0.4 for shape in MASKS]
    masks[0][1] = False
    k, v = random(sum(lens), 2, 16, seed=1, device=device), random(sum(lens), 2, 8, seed=2, device=device)
    q = random(sum(rows), 4, 16, seed=3, device=device)
    words = pack_mask([mask.to(device) for mask in masks])
    assert words.dtype == torch.int64
    assert words.shape == (sum(rows), 2)
    arguments = (q, *paging.ragged_kv(k, v, offsets(lens, device)))
    options = dict(cu_seqlens_q=offsets(rows, device), tree_mask=words, tail_seqlens=int32(lens, device))
    state = attention(*arguments, **options, backend=backend)
    o, lse = torch.zeros(sum(rows), 4, 8).double(), torch.full((sum(rows), 4), -math.inf).double()
    for r, mask in enumerate(masks):
        at, first = sum(rows[:r]), sum(lens[:r])
        for i in range(rows[r]):
            seen = first + mask[i].nonzero()[:, 0]
            for head in range(4 if len(seen) else 0):
                scores = k[seen, head // 2].cpu().double() @ q[at + i, head].cpu().double() / 4
                o[at + i, head] = scores.softmax(0) @ v[seen, head // 2].cpu().double()
                lse[at + i, head] = scores.logsumexp(0)
    assert_state_close(state, Reference(o, lse))
    assert torch.equal(pack_mask(masks[0]), words[:3].cpu())


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (torch.ones(2, 3), TypeError, "mask: expected bool, given torch.float32"),
        ([torch.ones(2, 3).bool(), torch.ones(3).bool()], ValueError, r"mask\[1\]: expected \[Q, K\], given shape"),
        ([[True]], TypeError, "mask: expected a tensor, given list"),
    ],
)
def test_what_is_no_mask_is_refused(mask, error, message):
    with pytest.raises(error, match=message):
        pack_mask(mask)
    assert pack_mask([]).shape == (0, 1)
    assert pack_mask(torch.ones(2, 2, 65).bool()).tolist() == [[-1, 1]] * 4
