"""Ctrl-C, `kill` and a closed terminal, as one exception that leaves nothing half done.

`as_exceptions` turns the three signals into `Stopped`, so that every `finally` runs on the way out, `held_back` keeps
them waiting while a kernel is put away, and `put_in_place` while results take the place of earlier ones. A signal that
is ignored, as under nohup, stays ignored.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

# SIGHUP is unknown to Windows.
_WORDS = {"SIGINT": "interrupted", "SIGTERM": "terminated", "SIGHUP": "hung up"}
_SIGNALS = tuple(getattr(signal, name) for name in _WORDS if hasattr(signal, name))


class Stopped(KeyboardInterrupt):
    """The process was asked to stop.

    Attributes:
        signal: by which signal.
    """

    def __init__(self, number: int):
        self.signal = signal.Signals(number)
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
