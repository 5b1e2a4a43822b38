"""Models of transformers on these passes say what they say eagerly: under any mask, in pages, and by every plan.

Models are tiny, their weights random and large enough that scores differ. The reference is transformers' own eager
attention on a copy of the model.
"""

import copy
import sys

import pytest
import torch

import cascade_lab as cl
from cascade_lab import hf, runtime
from cascade_lab.evidence.reads import record_loads

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
WINDOWED = {"sliding_window": 5}
FAMILIES = {
    "Llama": {},
    "Qwen2": {**WINDOWED, "use_sliding_window": True, "max_window_layers": 1},
    "Qwen3": {"head_dim": 16},
    "Mistral": WINDOWED,
    "Gemma2": {**WINDOWED, "head_dim": 16, "attn_logit_softcapping": 1.5},
    "GptOss": {**WINDOWED, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
}
PROMPTS = (9, 5)  # two sequences of one batch, the second padded on the left


def pair(family, **changes):
    """A random model with this package's attention, and its eager copy."""
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family] | changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    model.set_attn_implementation(hf.register())
    return model, eager


def padded():
    ids = torch.randint(3, 61, (2, PROMPTS[0]), generator=torch.Generator().manual_seed(3))
    there = torch.arange(PROMPTS[0]) >= PROMPTS[0] - torch.tensor(PROMPTS)[:, None]
    return ids * there, there.long()


def alone(eager, tokens):
    """Eager logits `[n, V]` of one sequence."""
    with torch.no_grad():
        return eager(torch.as_tensor(tokens)[None]).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_what_it_says_eagerly(family):
    """Ragged by left padding and unpadded, logits of every token and greedy generation; windows and softcap bite."""
    model, eager = pair(family)
    ids, there = padded()
    with torch.no_grad():
        for given in ({"attention_mask": there}, {}):
            ours, theirs = model(ids, **given).logits, eager(ids, **given).logits
            seen = there.bool() if given else torch.ones_like(ids).bool()
            torch.testing.assert_close(ours[seen], theirs[seen], atol=3e-5, rtol=0)
        if family != "Llama" and family != "Qwen3":
            free, _ = pair(family, **{"sliding_window": 64} if family != "Gemma2" else {"attn_logit_softcapping": None})
            assert (free(ids, attention_mask=there).logits - theirs)[0].abs().max() > 0.1
        options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": there}
        assert torch.equal(model.generate(ids, **options), eager.generate(ids, **options))


def dense(mask, *, q=None, seed=1, **options):
    """`attention_forward` of 2 sequences, 4 heads on 2, 3 rows over 6 keys, and the softmax by its definition."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(2, h, n, 8, generator=generator) for h, n in ((4, 3), (2, 6), (2, 6)))
    o, weights = hf.attention_forward(torch.nn.Identity(), query, key, value, mask, is_causal=False, **options)
    assert weights is None
    scores = torch.einsum("bhqd,bhkd->bhqk", query.double(), key.repeat_interleave(2, 1).double()) / 8**0.5
    if mask is not None:
        seen = mask if mask.dtype == torch.bool else mask == 0
        scores = scores.masked_fill(~seen, -torch.inf)
    values = value.repeat_interleave(2, 1).double()
    return o, torch.einsum("bhqk,bhkd->bqhd", scores.softmax(-1).nan_to_num(0), values)


def random_mask(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.6


LOWEST = torch.finfo(torch.float32).min
MASKS = {
    "none": None,
    "random": random_mask(2, 1, 3, 6),
    "causal at the end": torch.ones(3, 6).tril(3).bool()[None, None],
    "one for all rows, as padding": random_mask(2, 1, 1, 6),
    "the same for every head": random_mask(1, 1, 3, 6).expand(2, 4, 3, 6),
    "a row that sees nothing": random_mask(2, 1, 3, 6) & (torch.arange(3) != 1)[:, None],
    "lowest numbers": torch.where(random_mask(2, 1, 3, 6), 0.0, LOWEST),
    "minus infinity": torch.where(random_mask(2, 1, 3, 6), 0.0, -torch.inf),
}


@pytest.mark.parametrize("name", MASKS)
def test_any_mask_hides_exactly_what_it_hides(name):
    o, expected = dense(MASKS[name])
    torch.testing.assert_close(o.double(), expected, atol=1e-6, rtol=0)
    if name == "a row that sees nothing":
        assert (o[:, 1] == 0).all()


def test_without_a_mask_rows_are_causal_from_the_first_key_and_a_single_row_sees_all():
    """transformers leaves the mask out for a prompt, also into a longer empty cache, and for one new token."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, h, 6, 8, generator=generator) for h in (4, 2, 2))
    layer = torch.nn.Identity()
    layer.is_causal = True
    whole, _ = hf.attention_forward(layer, q, k, v, torch.ones(6, 6).tril().bool()[None, None])
    for rows in (6, 4):
        found, _ = hf.attention_forward(layer, q[:, :, :rows], k, v)
        torch.testing.assert_close(found, whole[:, :rows], atol=1e-6, rtol=0)
    last, _ = hf.attention_forward(layer, q[:, :, 5:], k, v)
    torch.testing.assert_close(last, whole[:, 5:], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"dropout": 0.1}, ValueError, "dropout: expected 0, given 0.1"),
        ({"output_attentions": True}, ValueError, "output_attentions: expected False"),
        ({"position_bias": torch.zeros(1)}, ValueError, "position_bias: expected None"),
        ({"s_aux": torch.zeros(3)}, ValueError, r"sinks: expected \[H_q\] = \[4\]"),
        ({"mask": torch.zeros(2, 1, 3, 5).bool()}, ValueError, "attention_mask: expected .* = .2, 1 or 4, 3, 6."),
        ({"mask": torch.zeros(2, 3, 3, 6).bool()}, ValueError, "attention_mask: expected .* = .2, 1 or 4, 3, 6."),
        ({"mask": torch.zeros(3, 6).bool()}, ValueError, r"attention_mask: expected \[B, heads, Q, K\], given shape"),
        ({"mask": torch.zeros(2, 1, 3, 6).long()}, TypeError, "attention_mask: expected bool or a floating dtype"),
        ({"mask": torch.full((2, 1, 3, 6), -2.5)}, ValueError, "attention_mask: expected 0 .* given -2.5"),
        ({"mask": random_mask(2, 4, 3, 6)}, ValueError, "attention_mask: expected the same for all heads"),
    ],
)
def test_what_would_change_the_answer_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        dense(given.pop("mask", None), **given)


def test_gradients_are_those_of_the_eager_model():
    grads = []
    ids, there = padded()
    # a row of padding, which predicts the first token, sees nothing here and is an even mean there
    labels = ids.masked_fill(there.cumsum(1) < 2, -100)
    for model in pair("Mistral"):
        model(ids, attention_mask=there, labels=labels).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_the_name_and_the_backend_are_the_callers(monkeypatch):
    assert hf.register("cascade_lab_torch", backend="torch") == "cascade_lab_torch"
    assert "cascade_lab_torch" in transformers.AttentionInterface().valid_keys()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"transformers: expected it installed, as by cascade-lab\[transformers\]"):
        hf.register()


def prompts(*lengths):
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, 61, (n,), generator=generator) for n in lengths]


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2"])
@pytest.mark.parametrize("plan", ["causal", "split"])
def test_tokens_behind_a_hit_have_the_logits_of_whole_prompts(family, plan):
    """Hits of 4, 8 and 0 of 13, 9 and 3 tokens: pairs by the area law, reads of every layer by the ledger."""
    model, eager = pair(family, **{"sliding_window": 64} if family == "Gemma2" else {})
    paged = hf.PagedModel(model, num_pages=9, page_size=4)
    whole, hits = prompts(13, 9, 3), (4, 8, 0)
    lens = [len(p) for p in whole]
    table = cl.paging.build_page_table(lens, 4)
    first = cl.PrefixHitBatch([4, 8], [0, 0], 4, page_table=table[:2])
    paged.prefill(first, torch.cat([p[:h] for p, h in zip(whole, hits, strict=True)]))
    batch = cl.PrefixHitBatch(lens, hits, 4, page_table=table)
    reads = torch.zeros(2, 2, dtype=torch.int64)
    rest = torch.cat([p[h:] for p, h in zip(whole, hits, strict=True)])
    logits = paged.prefill(batch, rest, plan, reads=reads)
    expected = torch.cat([alone(eager, p)[h:] for p, h in zip(whole, hits, strict=True)])
    torch.testing.assert_close(logits, expected, atol=3e-5, rtol=0)
    book = cl.ledger(batch.levels(plan))
    assert book.pairs == sum(cl.interactions(n, h) for n, h in zip(lens, hits, strict=True))
    # the rows of a request are one tile, so the kernel loads what the ledger has per request
    assert reads.tolist() == [[book.kv_tokens] * 2] * 2


TREES = (cl.DraftTree([-1, 0, 0, 1, 2, 1]), cl.DraftTree([-1, 0, 1]))


def closed_forms(plan, lens, trees):
    """Reads of one layer per KV head, written out: the rows of nodes over prefixes and paths."""
    depths = [[len(tree.ancestors(i)) + 1 for i in range(tree.size)] for tree in trees]
    each = zip(lens, depths, strict=True)
    if plan == "naive":
        return sum(n * len(own) + sum(own) for n, own in each)
    return sum(n + (sum(own) if plan == "cascade" else len(own)) for n, own in each)


def drafted(tree, token, truth, seed):
    """Tokens of a tree under `token`: along one random path what greedy decoding says, elsewhere anything."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 61, (tree.size,), generator=generator).tolist()
    leaf = tree.leaves[seed % len(tree.leaves)]
    for step, node in enumerate((*tree.ancestors(leaf), leaf)):
        tokens[node] = token if step == 0 else truth[step - 1]
    return tokens


@pytest.mark.parametrize("plan", cl.drafts.PLANS)
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GptOss"])
def test_rounds_of_tree_verification_end_where_greedy_decoding_does(family, plan):
    """Every node's logits are those of its own sequence, run eagerly; reads and pairs are the ledger's and by hand."""
    changes = {} if family == "Llama" else {"sliding_window": 64}
    model, eager = pair(family, **changes)
    paged = hf.PagedModel(model, num_pages=16, page_size=4)
    starts, new = prompts(10, 5), 6
    greedy = [eager.generate(p[None], max_new_tokens=new, do_sample=False)[0].tolist() for p in starts]
    lens = [len(p) for p in starts]
    table = cl.paging.build_page_table([n + 16 for n in lens], 4)
    logits = paged.prefill(cl.PrefixHitBatch(lens, [0, 0], 4, page_table=table), torch.cat(starts))
    ends = torch.tensor(lens).cumsum(0) - 1
    out = [[*p.tolist(), int(t)] for p, t in zip(starts, logits[ends].argmax(-1), strict=True)]
    reads, expected, accepted_lens = torch.zeros(2, 2, dtype=torch.int64), 0, []
    for round_ in range(2):
        tokens = []
        for r, tree in enumerate(TREES):
            truth = [*greedy[r][len(out[r]) :], 3, 3, 3]
            tokens += drafted(tree, out[r][-1], truth, round_ + r)
        batch = cl.VerifyBatch(lens, TREES, 4, page_table=table, tokens=tokens)
        logits, row = paged.verify(batch, plan, reads=reads), 0
        for r, tree in enumerate(TREES):
            for node in range(tree.size):
                path = [batch.tokens[row + n].item() for n in (*tree.ancestors(node), node)]
                own = alone(eager, [*out[r][:-1], *path])[-1]
                torch.testing.assert_close(logits[row + node], own, atol=3e-5, rtol=0)
            row += tree.size
        book = cl.ledger(batch.levels(plan))
        depths = [len(tree.ancestors(i)) + 1 for tree in TREES for i in range(tree.size)]
        assert book.pairs == sum(n * tree.size for n, tree in zip(lens, TREES, strict=True)) + sum(depths)
        assert book.kv_tokens == closed_forms(plan, lens, TREES)
        expected += book.kv_tokens
        accepted = batch.accept(logits.argmax(-1))
        done = batch.commit(accepted)
        done.move(*paged.caches)
        lens = list(done.prefix_lens)
        accepted_lens += accepted.lens.tolist()
        for r in range(2):
            path = accepted.tokens[r][: accepted.lens[r]].tolist()
            out[r] += [*path[1:], int(accepted.next_tokens[r])]
    assert min(accepted_lens) >= 2
    for r in range(2):
        n = min(len(out[r]), len(greedy[r]))
        assert out[r][:n] == greedy[r][:n]
        assert n >= len(starts[r]) + 4
    assert reads.tolist() == [[expected] * 2] * 2


def test_rows_of_branches_verify_as_nodes_do():
    model, _ = pair("Llama")
    (prompt,), tree = prompts(7), cl.DraftTree.from_paths([[5, 9, 4], [5, 9, 8], [5, 6]])
    found = {}
    for rows in ("node", "branch"):
        paged = hf.PagedModel(model, num_pages=4, page_size=4)
        table = torch.tensor([[3, 0, 2]], dtype=torch.int32)
        paged.prefill(cl.PrefixHitBatch([7], [0], 4, page_table=table), prompt)
        batch = cl.VerifyBatch([7], [tree], 4, rows=rows, page_table=table)
        logits = paged.verify(batch, "naive")
        found[rows] = logits[batch.node_rows]
        assert len(logits) == (5 if rows == "node" else 8)
    torch.testing.assert_close(found["branch"], found["node"], atol=1e-5, rtol=0)


def test_a_window_that_a_position_outgrows_is_refused():
    model, eager = pair("Mistral", sliding_window=6)
    (prompt,) = prompts(6)
    paged = hf.PagedModel(model, 2, 4)
    logits = paged.prefill(cl.PrefixHitBatch([6], [0], 4), prompt)
    torch.testing.assert_close(logits, alone(eager, prompt), atol=3e-5, rtol=0)
    (longer,) = prompts(7)
    with pytest.raises(ValueError, match="positions: expected at most 6 tokens, the window of layer 0, .* given 7"):
        paged.prefill(cl.PrefixHitBatch([7], [0], 4), longer)


def test_what_is_no_model_or_pass_is_refused():
    model, _ = pair("Llama")
    with pytest.raises(TypeError, match="model: expected one of transformers with a head, given Linear"):
        hf.PagedModel(torch.nn.Linear(2, 2), 4)
    with pytest.raises(TypeError, match="model: expected one of transformers with a head, given LlamaModel"):
        hf.PagedModel(model.model, 4)
    for name, given in (("num_pages", {"num_pages": 0}), ("page_size", {"num_pages": 4, "page_size": 0})):
        with pytest.raises(ValueError, match=f"{name}: expected a number >= 1, given 0"):
            hf.PagedModel(model, **given)
        with pytest.raises(TypeError, match=f"{name}: expected an integer, given True"):
            hf.PagedModel(model, **given | {name: True})
    paged, batch = hf.PagedModel(model, 2, 4), cl.PrefixHitBatch([3], [0], 4)
    (tokens,) = prompts(3)
    for change, message in (
        ({"positions": batch.positions[:2]}, r"positions: expected \[T\] = \[3\]"),
        ({"slots": batch.suffix_slots() + 6}, "slots: expected slots from 0 to 7"),
        ({"reads": torch.zeros(2, 4, dtype=torch.int64)}, r"reads: expected \[layers, H_kv\] = \[2, 2\]"),
    ):
        given = {"positions": batch.positions, "slots": batch.suffix_slots(), "levels": batch.levels()} | change
        with pytest.raises(ValueError, match=message):
            paged(tokens, **given)
    nothing = paged.prefill(cl.PrefixHitBatch([3], [3], 4), tokens[:0])
    assert nothing.shape == (0, 61)


@pytest.mark.skipif(runtime.triton_mode() != "interpreted", reason="the recorder sees interpreted launches alone")
@pytest.mark.parametrize("plan", ["cascade", "fused"])
def test_kernels_load_in_every_layer_what_the_ledger_says(plan):
    """The recorder of loads beside the kernel's counter, on one verification after a prefill by torch."""
    model, eager = pair("Llama")
    starts = prompts(6, 3)
    table = cl.paging.build_page_table([14, 10], 4)
    logits, reads = {}, torch.zeros(2, 2, dtype=torch.int64)
    for backend in ("torch", "triton"):
        paged = hf.PagedModel(model, 8, 4, backend="torch")
        paged.prefill(cl.PrefixHitBatch([6, 3], [0, 0], 4, page_table=table), torch.cat(starts))
        paged.backend = backend
        batch = cl.VerifyBatch([6, 3], TREES, 4, page_table=table, tokens=[4, 8, 9, 7, 7, 5, 3, 6, 6])
        if backend == "torch":
            logits[backend] = paged.verify(batch, plan)
            continue
        with record_loads(reads=reads, **{f"cache {i}": x for i, x in enumerate(paged.caches)}) as record:
            logits[backend] = paged.verify(batch, plan, reads=reads)
        book = cl.ledger(batch.levels(plan), num_q_heads=4, num_kv_heads=2)
        assert reads.tolist() == [[book.kv_tokens] * 2] * 2
        row = paged.k_caches[0].shape[-1] * 4
        assert [record[f"cache {i}"].loaded_bytes for i in range(4)] == [book.kv_tokens * 2 * row] * 4
    torch.testing.assert_close(logits["triton"], logits["torch"], atol=3e-5, rtol=0)
    path = [*starts[1].tolist(), 3, 6, 6]
    torch.testing.assert_close(logits["triton"][8], alone(eager, path)[-1], atol=3e-5, rtol=0)
