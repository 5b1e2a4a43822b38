"""What a trace is made of: requests with block ids or hits, sums where a log has only those, and faults of a file.

What a file does not say is None, never 0: a request without a hit is not a miss.
"""

from __future__ import annotations

from typing import NamedTuple

BLOCK_SIZE = 512
"""Tokens per id in Mooncake's published traces."""
MAX_TOKENS = 10**9
"""The most tokens that a request of a file may have."""


class Request(NamedTuple):
    """One request of a trace.

    Attributes:
        timestamp: milliseconds on the trace's own clock; None where the file has none.
        input_tokens: prompt length N >= 1.
        output_tokens: generated tokens; None where the file has none.
        block_ids: one id per block of the prompt, an id standing for the block and all before it; None without ids.
        hit_tokens: the hit where the trace records it; None if it does not.
        session, model, tenant: whose request it is; None where the file does not say.

    Example:
        >>> request = cl.traces.Request(0.0, 1024, output_tokens=None, block_ids=(1, 2), hit_tokens=None)
        >>> list(cl.traces.replay([request, request]))  # the last token is always computed
        [(1024, 0), (1024, 1023)]
    """

    timestamp: float | None
    input_tokens: int
    output_tokens: int | None
    block_ids: tuple[int | str, ...] | None
    hit_tokens: int | None
    session: str | None = None
    model: str | None = None
    tenant: str | None = None


class Totals(NamedTuple):
    """Sums over requests, where a log has nothing finer.

    Attributes:
        timestamp: milliseconds on the log's own clock; None where it has none.
        requests: how many; None where the log does not say.
        tokens, hit_tokens: sum of N, sum of H.
        model, tenant: whose requests they are; None where the log does not say.

    Example:
        >>> hour = cl.traces.Totals(timestamp=0.0, requests=2, tokens=16, hit_tokens=8)
        >>> hour.hit_tokens / hour.tokens
        0.5
    """

    timestamp: float | None
    requests: int | None
    tokens: int
    hit_tokens: int
    model: str | None = None
    tenant: str | None = None


class TraceError(ValueError):
    """A line that is no request.

    Attributes:
        path: the file as given.
        line: its number from 1; of an array or a table, the number of the entry.
        field: the field at fault, or "line" for the line as a whole.

    Example:
        >>> error = cl.traces.TraceError("log.jsonl", 3, "input_tokens", "missing")
        >>> str(error), error.line
        ('log.jsonl, line 3, input_tokens: missing', 3)
    """

    def __init__(self, path: str, line: int, field: str, fault: str, unit: str = "line") -> None:
        super().__init__(f"{path}, {unit} {line}, {field}: {fault}")
        self.path: str = path
        self.line: int = line
        self.field: str = field


class Fault(ValueError):
    """What is wrong with which field; the reader adds file and line."""

    def __init__(self, field: str, fault: str) -> None:
        super().__init__(field, fault)
        self.field: str = field
        self.fault: str = fault


class HeaderFault(Fault):
    """Nothing after it can be read."""
