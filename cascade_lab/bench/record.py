"""Where a benchmark writes to: its record, and the last line of a terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cascade_lab.files import put_in_place

PACKAGE_ROOT = Path(__file__).resolve().parents[2]


def write_record(path: Path, record: dict[str, object]) -> None:
    """Put a record into place as JSON."""
    put_in_place({path: (json.dumps(record, indent=1, default=str) + "\n").encode()})


def progress(text: str) -> None:
    """Replace the last line on a terminal; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:110]}", end="", file=sys.stderr, flush=True)
