"""A cache replayed over a trace: which leading blocks of each prompt were there before it came.

Without a limit a cache is a set of ids; with one, the blocks used longest ago give way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from cascade_lab import _checks
from cascade_lab.traces.read import BLOCK_SIZE, Request, _unfit

# ids that a map of one byte each may span, beyond which they go into a set of about 50 bytes each
_SPARE, _BYTES_PER_ID = 1 << 20, 8


def replay(
    requests: Iterable[Request], *, block_size: int = BLOCK_SIZE, capacity_tokens: int | None = None
) -> Iterator[tuple[int, int]]:
    """(N, H) of each request in order: H = min(k block_size, N - 1), k the leading ids that earlier requests left.

    A request finds what was cached before it came, never its own blocks; after it all its blocks are cached. Generated
    tokens count once they return inside a later prompt. A request that brings its hit keeps it, up to N - 1.

    Args:
        requests: in order of arrival.
        block_size: tokens per id; a block takes this much of the capacity, also one that the prompt does not fill.
        capacity_tokens: None for no limit. Otherwise the blocks used longest ago give way, of one request the last
            block first, so that what stays is a prefix.

    Memory without a limit is one to eight bytes per id where ids are numbered densely, as in the published traces, and
    about 80 bytes per id where they are hashes; with a limit about 120 bytes per block of the capacity.

    Raises:
        TypeError, ValueError: a size that is no integer in range; while reading, a request with neither ids nor hit, or
            whose ids do not fit its length.
    """
    block_size = _checks.integer("block_size", block_size, 1)
    if capacity_tokens is not None:
        capacity_tokens = _checks.integer("capacity_tokens", capacity_tokens, 0)
    return _replay(requests, block_size, capacity_tokens)


class _Unlimited:
    """Every id ever seen: a byte map where ids are dense, a set for the others."""

    def __init__(self) -> None:
        self._dense, self._sparse, self._count = bytearray(), set(), 0

    def leading(self, ids: Sequence[int]) -> int:
        dense, sparse, size = self._dense, self._sparse, len(self._dense)
        for k, i in enumerate(ids):
            if not (0 <= i < size and dense[i]) and i not in sparse:
                return k
        return len(ids)

    def insert(self, ids: Sequence[int], found: int) -> None:
        ids = ids[found:]
        if not ids:
            return
        self._count += len(ids)
        dense, room = self._dense, _SPARE + _BYTES_PER_ID * self._count
        if min(ids) < 0 or max(ids) >= room:
            self._sparse.update(i for i in ids if not 0 <= i < room)
            ids = [i for i in ids if 0 <= i < room]
        if ids and (highest := max(ids)) >= len(dense):
            dense.extend(bytes(highest + 1 + highest // 8 - len(dense)))
        for i in ids:
            dense[i] = 1


class _LeastRecentlyUsed:
    """The ids used last, at most `blocks` of them."""

    def __init__(self, blocks: int) -> None:
        self._blocks, self._order = blocks, OrderedDict()

    def leading(self, ids: Sequence[int]) -> int:
        order = self._order
        for k, i in enumerate(ids):
            if i not in order:
                return k
        return len(ids)

    def insert(self, ids: Sequence[int], found: int) -> None:
        order, move_to_end, pop = self._order, self._order.move_to_end, self._order.popitem
        for i in reversed(ids):
            if i in order:
                move_to_end(i)
            else:
                order[i] = None
        for _ in range(len(order) - self._blocks):
            pop(False)


def _replay(requests: Iterable[Request], block_size: int, capacity_tokens: int | None) -> Iterator[tuple[int, int]]:
    cache = _Unlimited() if capacity_tokens is None else _LeastRecentlyUsed(capacity_tokens // block_size)
    for number, request in enumerate(requests):
        n, ids, hit = request.input_tokens, request.block_ids, request.hit_tokens
        if hit is None:
            if ids is None:
                raise ValueError(f"requests[{number}]: expected block_ids or hit_tokens, given neither")
            if fault := _unfit(ids, n, block_size):
                raise ValueError(f"requests[{number}]: block_ids: {fault}")
            found = cache.leading(ids)
            hit = found * block_size
            cache.insert(ids, found)
        yield n, min(hit, n - 1)
