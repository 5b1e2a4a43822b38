"""A cache replayed over a trace: which leading blocks of each prompt were there before it came.

Without limits a cache is every id ever seen. With a capacity the blocks used longest ago give way, with a time to live
those not used for so long, and with several workers each has a cache of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Literal

from cascade_lab import _checks
from cascade_lab.traces.read import unfit
from cascade_lab.traces.request import BLOCK_SIZE, Request
from cascade_lab.traces.seen import Seen

Affinity = Literal["none", "session", "prefix"]
AFFINITIES: tuple[Affinity, ...] = ("none", "session", "prefix")
"""How requests are given to workers, as `replay` takes it."""
# requests, and block ids, that are looked up at once
_REQUESTS, _IDS = 4096, 1 << 18


def replay(
    requests: Iterable[Request],
    *,
    block_size: int = BLOCK_SIZE,
    capacity_tokens: int | None = None,
    page_size: int | None = None,
    ttl_ms: float | None = None,
    workers: int = 1,
    affinity: Affinity = "none",
    check_chain: bool = False,
) -> Iterator[tuple[int, int]]:
    """(N, H) of each request in order: H = min(k page_size, N - 1), k the leading pages that earlier requests left.

    A request finds what was cached before it came, never its own blocks; after it all its blocks are cached. Generated
    tokens count once they return inside a later prompt. A request that brings its hit keeps it, up to N - 1 and cut to
    whole pages where a page size is given.

    Args:
        requests: in order of arrival.
        block_size: tokens per id; a block takes this much of the capacity, also one that the prompt does not fill.
        capacity_tokens: of each worker's cache; None for no limit. Otherwise the blocks used longest ago give way, of
            one request the last block first, so that what stays is a prefix.
        page_size: tokens that are cached and found together, a multiple of `block_size` where ids are given; a page
            that the prompt does not fill is not cached. None for single blocks.
        ttl_ms: a block that was not used for longer than this, in milliseconds, is gone; None for ever.
        workers: how many caches.
        affinity: "none" gives requests to the workers in turn; "session" keeps a session on the worker that is its turn
            when it begins; "prefix" chooses the worker with the longest match, of equal ones that with the fewest
            prompt tokens so far.
        check_chain: refuse an id that stands after two different ids, for it cannot stand for a prefix. With a limit,
            several workers or pages only ids that are still cached are compared.

    Memory without a limit is about 20 bytes per id, and with any about 150 bytes per block of the capacity.

    Raises:
        TypeError, ValueError: a size that is no integer in range, a page that is no multiple of a block, an unknown
            affinity; while reading, a request with neither ids nor hit, whose ids do not fit its length or, where that
            is checked, are no chain, without a timestamp where there is a time to live, or without a session where
            sessions have affinity.

    Example:
        >>> lists = (1, 2), (1, 3), (1, 2, 4)
        >>> requests = [cl.traces.Request(None, 512 * len(ids), None, ids, None) for ids in lists]
        >>> list(cl.traces.replay(requests))
        [(1024, 0), (1024, 512), (1536, 1024)]
        >>> list(cl.traces.replay(requests, capacity_tokens=1024))  # block 2 had to go for block 3
        [(1024, 0), (1024, 512), (1536, 512)]
    """
    block_size = _checks.integer("block_size", block_size, 1)
    if capacity_tokens is not None:
        capacity_tokens = _checks.integer("capacity_tokens", capacity_tokens, 0)
    if page_size is not None:
        page_size = _checks.integer("page_size", page_size, 1)
    if ttl_ms is not None:
        ttl_ms = _checks.number("ttl_ms", ttl_ms, 0)
    workers = _checks.integer("workers", workers, 1)
    if affinity not in AFFINITIES:
        raise ValueError(f"affinity: expected one of {AFFINITIES}, given {affinity!r}")
    if capacity_tokens is None and page_size is None and ttl_ms is None and workers == 1:
        return _unlimited(requests, block_size, check_chain)
    return _limited(requests, block_size, capacity_tokens, page_size, ttl_ms, workers, affinity, check_chain)


def _unlimited(requests: Iterable[Request], block_size: int, check_chain: bool) -> Iterator[tuple[int, int]]:
    """All that was ever seen is there; requests are looked up many at a time."""
    rest, seen, done = iter(requests), Seen(), 0
    while batch := _batch(rest):
        fault = None
        for number, request in enumerate(batch):
            if fault := _fault(request, block_size):
                batch = batch[:number]
                break
        found, odd, one = seen.leading([() if r.hit_tokens is not None else r.block_ids for r in batch])
        if check_chain and odd >= 0:
            batch, fault = batch[:odd], _broken(one)
        for request, leading in zip(batch, found.tolist(), strict=False):
            n, hit = request.input_tokens, request.hit_tokens
            yield n, min(leading * block_size if hit is None else hit, n - 1)
        done += len(batch)
        if fault:
            raise ValueError(f"requests[{done}]: {fault}")


def _batch(requests: Iterator[Request]) -> list[Request]:
    """The next requests: many, but of not too many ids."""
    batch, ids = [], 0
    for request in islice(requests, _REQUESTS):
        batch.append(request)
        ids += len(request.block_ids or ())
        if ids > _IDS:
            break
    return batch


def _fault(request: Request, block_size: int) -> str:
    if request.hit_tokens is not None:
        return ""
    if request.block_ids is None:
        return "expected block_ids or hit_tokens, given neither"
    fault = unfit(request.block_ids, request.input_tokens, block_size)
    return f"block_ids: {fault}" if fault else ""


def _broken(one: int | str | None) -> str:
    return (
        f"block_ids: expected ids that stand for a block and all before it, given {one!r} after two different ones; "
        f"--ids content (content_ids=True) chains ids that stand for their block alone"
    )


class _Cache:
    """The ids used last, at most `blocks` of them, none longer ago than `ttl`: id -> (time, id before it)."""

    def __init__(self, blocks: int | None, ttl: float | None) -> None:
        self._blocks, self._ttl = blocks, ttl
        self._order: OrderedDict[int | str, tuple[float, int | str | None]] = OrderedDict()
        self.tokens = 0

    def leading(self, ids: Sequence[int | str], now: float) -> int:
        order, ttl = self._order, self._ttl
        for k, one in enumerate(ids):
            if one not in order or (ttl is not None and now - order[one][0] > ttl):
                return k
        return len(ids)

    def insert(self, ids: Sequence[int | str], now: float, check: bool) -> int | str | None:
        """Use all ids, the last first; returns one that stood after another id, where that is asked."""
        order, move_to_end, pop = self._order, self._order.move_to_end, self._order.popitem
        odd = None
        for k in range(len(ids) - 1, -1, -1):
            one, before = ids[k], ids[k - 1] if k else None
            if one in order:
                if check and order[one][1] != before:
                    odd = one
                move_to_end(one)
            order[one] = now, before
        if self._ttl is not None:
            while order and now - next(iter(order.values()))[0] > self._ttl:
                pop(False)
        if self._blocks is not None:
            for _ in range(len(order) - self._blocks):
                pop(False)
        return odd


def _limited(
    requests: Iterable[Request],
    block_size: int,
    capacity_tokens: int | None,
    page_size: int | None,
    ttl_ms: float | None,
    workers: int,
    affinity: Affinity,
    check_chain: bool,
) -> Iterator[tuple[int, int]]:
    page = page_size or block_size
    blocks = None if capacity_tokens is None else capacity_tokens // page
    caches = [_Cache(blocks, ttl_ms) for _ in range(workers)]
    homes: dict[str, int] = {}
    turn = 0
    for number, request in enumerate(requests):
        if fault := _fault(request, block_size):
            raise ValueError(f"requests[{number}]: {fault}")
        n, hit = request.input_tokens, request.hit_tokens
        if hit is not None:
            yield n, min(hit, n - 1) if page_size is None else min(hit, n - 1) // page_size * page_size
            continue
        now = request.timestamp or 0.0
        if ttl_ms is not None and request.timestamp is None:
            raise ValueError(f"requests[{number}]: timestamp: expected a time, for a time to live is given")
        if page % block_size:
            raise ValueError(f"page_size: expected a multiple of block_size = {block_size}, given {page}")
        step = page // block_size
        # the last id of a page stands for it and all before it
        ids = request.block_ids if page_size is None else request.block_ids[step - 1 : n // page * step : step]
        if affinity == "prefix":
            found = [cache.leading(ids, now) for cache in caches]
            at = min(range(workers), key=lambda i: (-found[i], caches[i].tokens))
        elif affinity == "session":
            if request.session is None:
                raise ValueError(f"requests[{number}]: session: expected a name, for sessions have affinity")
            at = homes.setdefault(request.session, len(homes) % workers)
        else:
            at, turn = turn, (turn + 1) % workers
        cache = caches[at]
        cache.tokens += n
        leading = cache.leading(ids, now)
        odd = cache.insert(ids, now, check_chain)
        if odd is not None:
            raise ValueError(f"requests[{number}]: {_broken(odd)}")
        yield n, min(leading * page, n - 1)
