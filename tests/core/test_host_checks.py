"""What the checks of a call cost a device: the host waits for it once, however many levels and checks there are."""

import pytest
import torch
from torch.utils._pytree import tree_map

from cascade_lab import DraftTree, Level, VerifyBatch, runtime
from cascade_lab._passes import check_pass
from cascade_lab.levels import passes_of


class Elsewhere(torch.Tensor):
    """A tensor on a device that is not there: computed on the CPU, and every number that comes over is counted."""

    waits = 0

    @staticmethod
    def __new__(cls, here):
        made = torch.Tensor._make_wrapper_subclass(
            cls, here.shape, strides=here.stride(), dtype=here.dtype, device="cuda"
        )
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        to_host = kwargs.get("device") == torch.device("cpu")
        args, kwargs = tree_map(lambda x: x.here if isinstance(x, cls) else x, (args, kwargs))
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        name = function.name()
        if to_host or name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal"):
            cls.waits += 1
            return function(*args, **kwargs)
        return tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, function(*args, **kwargs))


@pytest.fixture
def batch():
    Elsewhere.waits = 0
    return VerifyBatch([13, 5], [DraftTree.branches(2, 3), DraftTree.chain(2)], page_size=4, rows="branch")


def elsewhere(level):
    tensors = (level.cu_seqlens_q, level.page_table, level.cache_seqlens, level.tree_mask, level.tail_seqlens)
    cu, table, lens, mask, tails = (None if x is None else Elsewhere(x) for x in tensors)
    return Level(cu, table, lens, level.page_size, level.causal, mask, tails, level.name, level.max_seqlen_q)


@pytest.mark.parametrize("plan", ["naive", "cascade", "fused"])
def test_a_checked_call_waits_for_the_device_once(plan, batch):
    q, k = Elsewhere(torch.zeros(batch.num_rows, 4, 16)), Elsewhere(torch.zeros(batch.num_pages, 4, 2, 16))
    levels = [elsewhere(level) for level in batch.levels(plan)]
    passes, _ = passes_of(q, k, k, levels, "torch")
    assert Elsewhere.waits == 1
    assert [one.max_seqlen_q for one in passes] == [int(x.cu_seqlens_q.diff().max()) for x in batch.levels(plan)]
    (first, *_) = levels
    Elsewhere.waits = 0
    names = ("tree_mask", "tail_seqlens")
    masks = {name: getattr(first, name) for name in names}
    fine = Elsewhere(torch.zeros(batch.num_pages * 4, 1, 2, 16)) if first.page_size == 1 else k
    check_pass(q, fine, fine, first.page_table, first.cache_seqlens, first.cu_seqlens_q, causal=first.causal, **masks)
    assert Elsewhere.waits == 1


def test_an_unchecked_call_never_waits(batch):
    q, k = Elsewhere(torch.zeros(batch.num_rows, 4, 16)), Elsewhere(torch.zeros(batch.num_pages, 4, 2, 16))
    with runtime.unchecked():
        passes_of(q, k, k, [elsewhere(level) for level in batch.levels("cascade")], "torch")
    assert Elsewhere.waits == 0


def test_what_the_checks_find_elsewhere_is_named_as_it_is_here(batch):
    q, k = Elsewhere(torch.zeros(batch.num_rows, 4, 16)), Elsewhere(torch.zeros(batch.num_pages, 4, 2, 16))
    prefix, drafts = (elsewhere(level) for level in batch.levels("cascade"))
    wrong = Level(prefix.cu_seqlens_q, prefix.page_table, Elsewhere(prefix.cache_seqlens.here + 90), prefix.page_size)
    with pytest.raises(ValueError, match=r"levels\[0\] '': cache_seqlens: expected 0 to \d+ tokens .* given 103 for"):
        passes_of(q, k, k, [wrong, drafts], "torch")
