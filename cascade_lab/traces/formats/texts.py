"""Prompts as text: cut into blocks, each hashed with all before it.

Without the model's tokenizer a token is taken to be four characters, so lengths are estimates, and what two prompts
share is exact in characters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cascade_lab.traces.formats.form import Format
from cascade_lab.traces.records import Complain, Record
from cascade_lab.traces.request import Fault

CHARACTERS_PER_TOKEN = 4
"""Of English text in the tokenizers of present models, about."""
_ESTIMATE = f"a token is taken to be {CHARACTERS_PER_TOKEN} characters"
_WHO = {
    "session": "session_id",
    "model": "model",
    "tenant": "user",
}


def _whole(records: Iterator[Record], complain: Complain) -> Iterator[tuple[int, Mapping]]:
    """Rows with whole prompts; one that holds new messages alone lacks the answers before them."""
    for line, row in records:
        if row.get("message_mode") == "delta":
            complain(
                line, Fault("message_mode", "expected whole prompts, given new messages without the answers before")
            )
        else:
            yield line, row


TEXTS = (
    Format(
        "lmcache",
        "one request a line, its prompt as text",
        "LMCache/lmcache-agent-trace, README",
        needs=("input", "output", "session_id | timestamp"),
        lacks=("usage",),
        fields={"text": "input", "time": "timestamp"} | _WHO,
        block_size=16,
        estimated=_ESTIMATE,
    ),
    Format(
        "messages",
        "one request a line, its prompt as text or messages",
        "AIPerf documentation, Trace Replay with Mooncake Traces, pre-formatted messages",
        needs=("messages | text_input | prompt",),
        lacks=("usage", "hash_ids", "input_length", "prompt_tokens"),
        rows=_whole,
        fields={
            "text": "messages | text_input | prompt",
            "output_tokens": "output_length",
            "time": "timestamp:ms | created",
        }
        | _WHO,
        block_size=16,
        estimated=_ESTIMATE,
    ),
)
