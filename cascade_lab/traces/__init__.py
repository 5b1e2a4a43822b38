"""What prefix hits are worth on real traffic: sums over requests, never functions of a mean.

A request of N tokens with a hit of H keeps N - H of its token-linear work and N(N + 1)/2 - H(H + 1)/2 of its query-key
pairs, so over a trace, with h = H/N and weights w = N(N + 1) / sum of N(N + 1),

    pairs left / pairs = 1 - sum w H(H + 1)/(N(N + 1)) = 1 - sum w h^2 - (sum of H(1 - h)) / (sum of N(N + 1)),

and the last term is below 1 / (4 x the token-weighted mean length). So the pairs follow the root mean square of h under
w, the linear work follows the token-weighted mean of h, and no single mean serves both. Lengths and block ids decide
everything here; nothing is timed.
"""

from cascade_lab.traces.bounds import Bounds, bounds_of_lengths, bounds_of_totals
from cascade_lab.traces.formats import FORMATS
from cascade_lab.traces.formats.form import Format
from cascade_lab.traces.generate import AGENTIC, CONVERSATION, Traffic, generate
from cascade_lab.traces.mapping import FIELDS
from cascade_lab.traces.models import REGIONS, read_model, region
from cascade_lab.traces.read import (
    Log,
    read_hits_csv,
    read_logs,
    read_mooncake,
    read_table,
    read_trace,
    write_mooncake,
)
from cascade_lab.traces.records import MAX_LINE
from cascade_lab.traces.replay import AFFINITIES, replay
from cascade_lab.traces.request import BLOCK_SIZE, MAX_TOKENS, Request, Totals, TraceError
from cascade_lab.traces.summary import MODELS, OTHER_MODELS, ModelShape, Sums, TraceSummary, formula_errors, summarize

__all__ = [
    "AFFINITIES",
    "AGENTIC",
    "BLOCK_SIZE",
    "Bounds",
    "CONVERSATION",
    "FIELDS",
    "FORMATS",
    "Format",
    "Log",
    "MAX_LINE",
    "MAX_TOKENS",
    "MODELS",
    "ModelShape",
    "OTHER_MODELS",
    "REGIONS",
    "Request",
    "Sums",
    "Totals",
    "TraceError",
    "TraceSummary",
    "Traffic",
    "bounds_of_lengths",
    "bounds_of_totals",
    "formula_errors",
    "generate",
    "read_hits_csv",
    "read_logs",
    "read_model",
    "read_mooncake",
    "read_table",
    "read_trace",
    "region",
    "replay",
    "summarize",
    "write_mooncake",
]
