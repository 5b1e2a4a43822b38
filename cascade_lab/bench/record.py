"""Where a benchmark writes to: its record, and the last line of a terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cascade_lab.files import ForeignFileError, UsageError, put_in_place, read_json

PACKAGE_ROOT = Path(__file__).resolve().parents[2]


def place(output: Path | None, default: Path) -> Path:
    """The file of a record: as given when it ends in .json, else under the default's name in the folder that is given.

    Args:
        output: of the command line; None for the default.
        default: a file, from the folder of the call.
    """
    if output is None:
        return default
    return output if output.suffix == ".json" and not output.is_dir() else output / default.name


def begin_record(path: Path, record: dict[str, object]) -> None:
    """Write a record before anything is measured.

    Raises:
        UsageError: it cannot be written there.
    """
    try:
        write_record(path, record)
    except OSError as error:
        raise UsageError(
            f"--output: {path.as_posix()} cannot be written ({error.strerror or error}); "
            "give a folder that can: --output DIR"
        ) from None


def read_gpu_record(path: Path, option: str) -> dict:
    """The record of a GPU run, whole or stopped.

    Args:
        option: of the command line, for the message.

    Raises:
        UsageError: no such file, or one that is no such record.
    """
    try:
        found = read_json(path)
    except (ForeignFileError, OSError):
        found = None
    known = {"sections", "scale", "timings", "complete", "provenance"}
    if not isinstance(found, dict) or not known <= set(found) or not isinstance(found["sections"], dict):
        raise UsageError(f"{option}: expected the record of a GPU run, given {path.as_posix()}")
    return found


def write_record(path: Path, record: dict[str, object]) -> None:
    """Put a record into place as JSON."""
    put_in_place({path: (json.dumps(record, indent=1, default=str) + "\n").encode()})


def progress(text: str) -> None:
    """Replace the last line on a terminal; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:110]}", end="", file=sys.stderr, flush=True)
