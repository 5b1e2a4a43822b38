"""Files: those of others read within bounds and shown on one line, ours put in place whole or not at all.

Nothing here is evaluated or unpickled: a file is bytes, text or JSON, and JSON has no repeated keys, no NaN and no
infinity, which the standard parser would let pass. Ctrl-C, `kill` and a closed terminal become one exception,
`Stopped`, that leaves nothing half done: `held_back` keeps the signals waiting, as `put_in_place` does while results
take the place of earlier ones. A signal that is ignored, as under nohup, stays ignored.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import BinaryIO, NoReturn

MAX_JSON, MAX_DEPTH = 1 << 26, 64
# the environment variable that names the folder into which pictures are written
FIGURES = "CASCADE_LAB_FIGURES"
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
# Control, format and line-breaking characters, the reordering of right-to-left text among them.
_UNSHOWN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


class ForeignFileError(ValueError):
    """A file that is not what was expected; the text names file and line where there is one."""


def open_regular(path: Path) -> BinaryIO:
    """The file opened for reading, never waiting for the other end of a pipe.

    Raises:
        ForeignFileError: a directory, a pipe, a socket or a device.
        OSError: it cannot be opened.
    """
    if path.is_dir():
        raise ForeignFileError(f"{path.as_posix()}: expected a file, given a directory")
    waiting = getattr(os, "O_NONBLOCK", 0)
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | waiting))  # noqa: SIM115
    mode = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(mode):
        file.close()
        kind = next((name for test, name in _KINDS if test(mode)), "something else")
        raise ForeignFileError(f"{path.as_posix()}: expected a file, given {kind}")
    return file


def read_bytes(path: Path, limit: int = MAX_JSON) -> bytes:
    """All bytes of a file of at most `limit` bytes.

    Raises:
        ForeignFileError: more bytes, or not a regular file.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ForeignFileError(f"{path.as_posix()}: expected at most {limit} bytes, given more")
    return content


def read_text(path: Path, limit: int = MAX_JSON) -> str:
    """The text of a UTF-8 file, with or without a byte order mark.

    Raises:
        ForeignFileError: other bytes, naming their line; or as `read_bytes`.
        OSError: it cannot be read.
    """
    content = read_bytes(path, limit)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        what = text_fault(content) or f"byte 0x{content[error.start]:02x}"
        raise ForeignFileError(f"{path.as_posix()}, line {line}: expected UTF-8 text, given {what}") from None


def read_json(path: Path, limit: int = MAX_JSON) -> object:
    """The value of a JSON file.

    Raises:
        ForeignFileError: no JSON, a repeated key, a number that is not finite, values nested too deep, naming the line
            where the parser knows it; or as `read_text`.
        OSError: it cannot be read.
    """
    text = read_text(path, limit)
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        where, fault = f"{path.as_posix()}, line {error.lineno}", f"({error.msg}, column {error.colno})"
    except ValueError as error:
        where, fault = path.as_posix(), f"({error})"
    raise ForeignFileError(f"{where}: expected JSON {one_line(fault)}")


def parse_json(text: str) -> object:
    """The value of a JSON text.

    Raises:
        ValueError: no JSON, a repeated key, a number that is not finite, or values nested too deep.
    """
    try:
        value = json.loads(text, object_pairs_hook=unique_keys, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deep") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list)))
        level = [child for children in inner for child in children]
        if not level:
            return value
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")


def unique_keys(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """The object of these pairs, for `json.loads`.

    Raises:
        ValueError: a key twice, of which a parser would drop all values but the last.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {one_line(repr(twice), 40)} is given twice")
    return found


def text_fault(start: bytes) -> str:
    """What bytes that should be text really are, by how they begin; empty where that is not known."""
    if start.startswith(b"\x1f\x8b"):
        return "gzip-compressed data (decompress it first)"
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16 text"
    if start.startswith((b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")):
        return "compressed data (decompress it first)"
    return ""


def one_line(text: object, limit: int = 300) -> str:
    """`text` as a terminal may show it: one line of at most `limit` characters, control characters written out."""
    # Colours would double the length at worst, so this much is enough to fill the line.
    shown = _ANSI.sub("", str(text)[: 8 * limit]).strip()
    shown = _UNSHOWN.sub(lambda found: found[0].encode("unicode_escape").decode(), shown)
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"number {one_line(digits, 40)} is too large")
    return value


class UsageError(ValueError):
    """A command that cannot be carried out: unknown notebook or parameter, value of the wrong type."""


# SIGHUP is unknown to Windows.
_WORDS = {"SIGINT": "interrupted", "SIGTERM": "terminated", "SIGHUP": "hung up"}
_SIGNALS = tuple(getattr(signal, name) for name in _WORDS if hasattr(signal, name))


class Stopped(KeyboardInterrupt):
    """The process was asked to stop.

    Attributes:
        signal: by which signal.
    """

    def __init__(self, number: int):
        self.signal: signal.Signals = signal.Signals(number)
        super().__init__(_WORDS[self.signal.name])

    @property
    def status(self) -> int:
        """The exit status that shells give to a command ended by this signal: 130, 143 or 129."""
        return 128 + self.signal


@contextlib.contextmanager
def as_exceptions() -> Iterator[None]:
    """Raise `Stopped` inside the block on SIGINT, SIGTERM and SIGHUP; outside the main thread nothing changes."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    with _handled_by(stop):
        yield


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Let the signals wait for the end of the block; the first of them is then raised again."""
    waiting: list[int] = []

    def wait(number: int, frame: FrameType | None) -> None:
        waiting.append(number)

    try:
        with _handled_by(wait):
            yield
    finally:
        if waiting:
            signal.raise_signal(waiting[0])


def put_in_place(contents: Mapping[Path, bytes], then: Callable[[], object] | None = None) -> None:
    """Write all files or none: first all of them under other names, and only when that went well rename them.

    Raises:
        OSError: the disk is full, or a place cannot be written or is a folder; everything is as it was.
    """
    written: dict[Path, Path] = {}
    try:
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir() and not path.is_symlink():
                raise IsADirectoryError(errno.EISDIR, f"{path.name} is a folder", str(path))
            fresh = path.with_name(f".{path.name}.{os.getpid()}")
            written[path] = fresh
            fresh.write_bytes(content)
        with held_back():
            for path, fresh in written.items():
                os.replace(fresh, path)
            if then is not None:
                then()
    finally:
        with held_back():
            for fresh in written.values():
                fresh.unlink(missing_ok=True)


def write_file(path: Path, content: bytes) -> None:
    """All of it or nothing; a link leads to its file, and a pipe or device takes it as it comes."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_bytes(content)
    else:
        put_in_place({path: content})


@contextlib.contextmanager
def _handled_by(handler: object) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # None is a handler that another language installed and Python could not put back.
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    taken = [number for number, kept in before.items() if kept not in (signal.SIG_IGN, None)]
    for number in taken:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])
