"""Block ids made here: from token ids, from text, from ids of blocks alone, and from what the turns of a session add.

Every id is a 64-bit hash of its block and the id before it, so that an id stands for a block and all before it. Of 15
million distinct ids, two are equal by chance with a probability of 6e-6.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Hashable, Sequence
from hashlib import blake2b

from cascade_lab.traces.formats.texts import CHARACTERS_PER_TOKEN


def chained(ids: Sequence[Hashable], before: int = 0) -> tuple[int, ...]:
    """Ids that stand for a block and all before it, from ids of blocks alone."""
    made = []
    for one in ids:
        before = hash((before, one))
        made.append(before)
    return tuple(made)


def ids_of_tokens(tokens: Sequence[int], block_size: int) -> tuple[int, ...]:
    """Ids of the whole blocks of a prompt; the block that is not full is found by no other prompt."""
    content = array("q", tokens).tobytes()
    size = 8 * block_size
    return _hashed([content[i : i + size] for i in range(0, len(content), size)], len(tokens) // block_size)


def ids_of_text(text: str, block_size: int) -> tuple[int, tuple[int, ...]]:
    """A prompt's length in tokens, at `CHARACTERS_PER_TOKEN` each, and the ids of its whole blocks."""
    n = max(1, -(-len(text) // CHARACTERS_PER_TOKEN))
    size = block_size * CHARACTERS_PER_TOKEN
    parts = [text[i : i + size].encode("utf-8", "surrogatepass") for i in range(0, len(text), size)]
    return n, _hashed(parts, n // block_size)


def _hashed(parts: Sequence[bytes], whole: int) -> tuple[int, ...]:
    made, before = [], b""
    for part in parts[:whole]:
        before = blake2b(before + part, digest_size=8).digest()
        made.append(int.from_bytes(before, "little"))
    return tuple(made)


def as_text(prompt: object) -> str | None:
    """A prompt as text: itself, or its messages with their roles; None if it is neither."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(one, dict) for one in prompt):
        return "".join(json.dumps(one, ensure_ascii=False, sort_keys=True) for one in prompt)
    return None


class Sessions:
    """The prompts of sessions from what each turn adds: before it stand all earlier turns and the answers to them.

    A prompt is a run of pieces, (key, tokens): blocks with their ids, turns without ids, answers. A block of a whole
    prompt is known by the parts of pieces in it, so that a session finds its history again, and another one finds a
    first turn that begins with the same ids.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        # per session: turns, ids of whole blocks, and the pieces after them
        self._states: dict[str, tuple[int, list[int], list[tuple[Hashable, int, int]]]] = {}

    def turn(self, session: str, added: int, answer: int, ids: Sequence[int | str] = ()) -> tuple[int, tuple[int, ...]]:
        """The whole prompt of the next turn: its length and its ids.

        Args:
            session: its name.
            added: tokens that the turn adds.
            answer: tokens of the answer, which stand before the next turn.
            ids: of the blocks of what is added, where known.
        """
        size = self._block_size
        turns, chain, rest = self._states.get(session, (0, [], []))
        if ids:
            pieces = [((one, "id"), 0, min(size, added - i * size)) for i, one in enumerate(ids) if i * size < added]
            pieces += [((session, turns, "tail"), 0, gap)] if (gap := added - sum(p[2] for p in pieces)) else []
        else:
            pieces = [((session, turns, "turn"), 0, added)]
        rest = self._cut(chain, rest + pieces)
        n = len(chain) * size + sum(p[2] for p in rest)
        prompt = n, tuple(chain)
        rest = self._cut(chain, [*rest, ((session, turns, "answer"), 0, answer)])
        self._states[session] = turns + 1, chain, rest
        return prompt

    def _cut(self, chain: list[int], pieces: list[tuple[Hashable, int, int]]) -> list[tuple[Hashable, int, int]]:
        """Whole blocks of (key, from, tokens) pieces go to the chain; what is left comes back."""
        block: list[tuple[Hashable, int, int]] = []
        filled = 0
        for key, start, length in pieces:
            while length:
                part = min(length, self._block_size - filled)
                block.append((key, start, part))
                start, length, filled = start + part, length - part, filled + part
                if filled == self._block_size:
                    chain.append(hash((chain[-1] if chain else 0, tuple(block))))
                    block, filled = [], 0
        return block
