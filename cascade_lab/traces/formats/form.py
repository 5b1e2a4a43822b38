"""What a format is: a recogniser, a mapping of fields, and, where records are not requests, how they become rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from cascade_lab.traces.mapping import lookup
from cascade_lab.traces.records import Complain, Record

Gives = Literal["block ids", "hits", "lengths", "sums"]
Rows = Callable[[Iterator[Record], Complain], Iterator[tuple[int, Mapping]]]


@dataclass(frozen=True)
class Format:
    """A format of logs.

    Attributes:
        name: as `--format` takes it.
        about: what a record is.
        source: the documentation that its fields are from.
        needs: what a record has to have to be recognised; "a | b" for either.
        fields: `mapping.FIELDS` to the expressions that read them.
        lacks: what a record of it never has.
        pattern: of a line, where the log is plain text.
        rows: what makes rows of the records, where they are not rows themselves.
        block_size: tokens per block id where the format fixes it.
        content_ids: an id stands for its block alone, so that ids are chained here.
        session_clock: times count from each session's start.
        deltas: a row holds the tokens that its turn adds to its session.
        estimated: what of the numbers is an estimate, in words.

    Example:
        >>> fields = {"input_tokens": "fresh + cached", "hit_tokens": "cached"}
        >>> ours = cl.traces.Format("ours", "a request", "our documentation", fields, needs=("fresh", "cached"))
        >>> ours.gives, ours.missing({"cached": 3})
        ('hits', ['fresh'])
    """

    name: str
    about: str
    source: str
    fields: Mapping[str, str]
    needs: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    rows: Rows | None = field(default=None, repr=False)
    block_size: int | None = None
    content_ids: bool = False
    session_clock: bool = False
    deltas: bool = False
    estimated: str = ""

    @property
    def gives(self) -> Gives:
        """What hits can be known from: "block ids", "hits", "sums" of hits, or "lengths" alone."""
        if self.fields.keys() & {"block_ids", "token_ids", "text"} or self.deltas:
            return "block ids"
        if "hit_tokens" not in self.fields:
            return "lengths"
        return "sums" if "requests" in self.fields else "hits"

    def missing(self, record: dict | str) -> list[str]:
        """What a record lacks to be of this format; empty for one that is."""
        if isinstance(record, str):
            return [] if self.pattern and self.pattern.search(record) else ["a line of its kind"]
        if self.pattern:
            return ["a line of its kind"]
        gone = [need for need in self.needs if not any(_there(record, path) for path in need.split(" | "))]
        return gone or [f"no {path}" for path in self.lacks if _there(record, path)]


def _there(record: Mapping, path: str) -> bool:
    """Whether a record has a path; "a=b" asks for a value too."""
    path, _, wanted = path.partition("=")
    if not wanted:
        return path in record or lookup(record, path) is not None
    return str(lookup(record, path)) == wanted
