"""Which block ids were there before, for many requests at once: an open table of 12 bytes an entry, in NumPy.

An id is taken as its 64 bits, a string as its hash. Besides the id the table holds 32 bits of the id before it, so that
an id that stands after two different ones, and so is none of a prefix, is found.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# the table is cut by the leading bits of a key, so that only a part of it is there twice while it grows
_PARTS = 4
_SPREAD, _FOLD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_FULL, _GROWTH = 0.7, 1.5


class Seen:
    """Every id ever seen, with the one before it."""

    def __init__(self) -> None:
        self._parts = [_Part() for _ in range(_PARTS)]

    def leading(self, prompts: Sequence[Sequence[int | str]]) -> tuple[np.ndarray, int, int | str | None]:
        """Of each prompt the number of leading ids that earlier prompts had; then all of them are seen.

        Returns:
            The numbers; the first prompt with an id that stood after another one before, and that id, or -1 and None.
        """
        counts = np.fromiter(map(len, prompts), np.int64, len(prompts))
        flat = [one for ids in prompts for one in ids]
        found = np.zeros(len(prompts), np.int64)
        if not flat:
            return found, -1, None
        keys = _keys(flat)
        starts = np.cumsum(counts) - counts
        owner = np.repeat(np.arange(len(prompts)), counts)
        before = np.zeros_like(keys)
        before[1:] = keys[:-1]
        before[starts[counts > 0]] = 0
        parents = ((before * _FOLD) >> np.uint64(32)).astype(np.uint32)
        distinct, first, where = np.unique(keys, return_index=True, return_inverse=True)
        known, stored = self._put(distinct, parents[first])
        there = known[where] | (owner[first][where] < owner)
        misses = np.append(np.flatnonzero(~there), len(flat))
        found = np.minimum(misses[np.searchsorted(misses, starts)] - starts, counts)
        odd = np.flatnonzero(stored[where] != parents)
        if odd.size:
            return found, int(owner[odd[0]]), flat[odd[0]]
        return found, -1, None

    def _put(self, keys: np.ndarray, parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Add sorted, distinct keys; whether each was there, and what stands before it."""
        known, stored = np.zeros(len(keys), bool), parents.copy()
        edges = (np.arange(1, _PARTS, dtype=np.uint64) << np.uint64(64 - _PARTS.bit_length() + 1)).astype(np.uint64)
        cuts = [0, *np.searchsorted(keys, edges).tolist(), len(keys)]
        for part, start, stop in zip(self._parts, cuts, cuts[1:], strict=False):
            if stop > start:
                known[start:stop], stored[start:stop] = part.put(keys[start:stop], parents[start:stop])
        return known, stored


class _Part:
    def __init__(self) -> None:
        self._keys, self._parents, self._count = np.zeros(1 << 10, np.uint64), np.zeros(1 << 10, np.uint32), 0

    def put(self, keys: np.ndarray, parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        size = len(self._keys)
        if self._count + len(keys) > _FULL * size:
            held = self._keys != 0
            old_keys, old_parents = self._keys[held], self._parents[held]
            while self._count + len(keys) > _FULL * size:
                size = int(size * _GROWTH)
            self._keys, self._parents = np.zeros(size, np.uint64), np.zeros(size, np.uint32)
            # in the order of their places, a stretch at a time, to hold little beside them
            for i in range(0, len(old_keys), 1 << 18):
                self._place(old_keys[i : i + (1 << 18)], old_parents[i : i + (1 << 18)])
            del old_keys, old_parents
        known, stored = self._place(keys, parents)
        self._count += int(len(keys) - known.sum())
        return known, stored

    def _place(self, keys: np.ndarray, parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Linear probing for all keys at once; of several that want one free place, one takes it."""
        table, above, size = self._keys, self._parents, len(self._keys)
        known, stored = np.zeros(len(keys), bool), parents.copy()
        low = (keys << np.uint64(_PARTS.bit_length() - 1)) >> np.uint64(32)
        place = ((low * np.uint64(size)) >> np.uint64(32)).astype(np.int64)
        todo = np.arange(len(keys))
        while todo.size:
            at, wanted = place[todo], keys[todo]
            held = table[at]
            hit, free = held == wanted, held == 0
            known[todo[hit]], stored[todo[hit]] = True, above[at[hit]]
            table[at[free]] = wanted[free]
            won = free & (table[at] == wanted)
            above[at[won]] = parents[todo[won]]
            todo = todo[~(hit | won)]
            place[todo] += 1
            place[todo[place[todo] == size]] = 0
        return known, stored


def _keys(ids: Sequence[int | str]) -> np.ndarray:
    """64 bits of each id, spread evenly, none of them 0."""
    try:
        if type(ids[0]) is str:
            made = np.fromiter(map(hash, ids), np.int64, len(ids)).view(np.uint64)
        else:
            made = np.array(ids, np.int64).view(np.uint64)
    except (OverflowError, ValueError, TypeError):
        made = np.fromiter(map(_bits, ids), np.uint64, len(ids))
    made = (made ^ (made >> np.uint64(32))) * _SPREAD
    made ^= made >> np.uint64(29)
    made *= _FOLD
    made[made == 0] = 1
    return made


def _bits(one: int | str) -> int:
    # hash(-1) == hash(-2), and a hash of an integer has 61 bits
    return (one if type(one) is int else hash(one)) & (2**64 - 1)
