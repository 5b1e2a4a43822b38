"""The formats of logs that are known, in the order in which they are tried, and which of them a record is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cascade_lab.traces.formats.agents import AGENTS
from cascade_lab.traces.formats.engines import ENGINES
from cascade_lab.traces.formats.form import Format
from cascade_lab.traces.formats.providers import PROVIDERS
from cascade_lab.traces.formats.published import PUBLISHED
from cascade_lab.traces.formats.texts import TEXTS
from cascade_lab.traces.records import Record

FORMATS: Mapping[str, Format] = {one.name: one for one in (*ENGINES, *PROVIDERS, *AGENTS, *PUBLISHED, *TEXTS)}
"""Every format by its name."""


def looks_like_log(line: str) -> bool:
    """Whether a line of text is of a format that is plain text."""
    return any(one.pattern is not None and one.pattern.search(line) for one in FORMATS.values())


def recognise(head: Sequence[Record]) -> tuple[Format, Mapping | str] | None:
    """The format of the first record that is of a known one, and that record; None if none is."""
    for _, record in head:
        for one in FORMATS.values():
            if not one.missing(record):
                return one, record
    return None


def near_miss(record: Mapping | str) -> tuple[str, list[str]]:
    """The format that a record lacks least of, and what it lacks."""

    def distance(one: Format) -> tuple[float, int]:
        gone = one.missing(record)
        return sum(not text.startswith("no ") for text in gone) / len(one.needs), len(gone)

    nearest = min((one for one in FORMATS.values() if one.needs), key=distance)
    return nearest.name, nearest.missing(record)
