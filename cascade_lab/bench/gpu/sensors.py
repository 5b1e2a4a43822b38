"""What the card ran at while it was measured: clocks, power and temperature, from `nvidia-smi` or through torch.

A card below its usual clocks makes every time longer and no share of its ceilings smaller, which one number cannot say:
so the record has for each section the least, the median and the most of what was read in it. Nothing is set or locked.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from cascade_lab.bench.clock import Clock
from cascade_lab.evidence.workers import end_group

# name in the record -> what nvidia-smi calls it
QUERIES = {
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
}
PERIOD_MS = 500


@dataclass
class Sensors:
    """Readings since the last `taken`.

    Attributes:
        source: where they come from, or None.
        missing: why there are none.
    """

    source: str | None = None
    missing: str | None = None
    _readings: list[Mapping[str, float]] = field(default_factory=list)
    _now: Callable[[], Mapping[str, float]] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, reading: Mapping[str, float]) -> None:
        with self._lock:
            self._readings.append(reading)

    def taken(self) -> dict[str, object]:
        """The readings since the last call as {"readings": n, name: [least, median, most]}, or why there are none."""
        if self.missing is not None:
            return {"missing": self.missing}
        if self._now is not None:
            try:
                self.add(self._now())
            except Exception as error:
                self.missing = _reason(error)
                return {"missing": self.missing}
        with self._lock:
            readings, self._readings = self._readings, []
        found: dict[str, object] = {"readings": len(readings)}
        for name in QUERIES:
            values = sorted(reading[name] for reading in readings if name in reading)
            if values:
                found[name] = [values[0], statistics.median(values), values[-1]]
        return found


@contextmanager
def sensors(clock: Clock) -> Iterator[Sensors]:
    """Read the card of the clock until the end of the block: twice a second by nvidia-smi, else once per `taken`."""
    if not clock.meaningful:
        yield Sensors(missing="no GPU")
        return
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield _through_torch(clock.device)
        return
    found = Sensors(source="nvidia-smi")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command(tool, clock.device), start_new_session=True, **pipes) as process:
        reader = threading.Thread(target=_read, args=(process, found), daemon=True)
        reader.start()
        try:
            yield found
        finally:
            end_group(process)
            reader.join()


def command(tool: str, device: torch.device) -> list[str]:
    """nvidia-smi's command line: one line of numbers per period for the one card."""
    query = f"--query-gpu={','.join(QUERIES.values())}"
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = [] if uuid is None else [f"--id=GPU-{uuid}"]
    return [tool, query, "--format=csv,noheader,nounits", f"--loop-ms={PERIOD_MS}", *which]


def parse(line: str) -> dict[str, float]:
    """One line of nvidia-smi; what it does not know, as "[N/A]", is left out."""
    found = {}
    for name, text in zip(QUERIES, line.split(","), strict=False):
        try:
            found[name] = float(text)
        except ValueError:
            continue
    return found


def _read(process: subprocess.Popen, found: Sensors) -> None:
    for line in process.stdout:
        reading = parse(line)
        if reading:
            found.add(reading)
        elif line.strip():
            found.missing = f"nvidia-smi: {line.strip()[:200]}"


def _through_torch(device: torch.device) -> Sensors:
    def now() -> dict[str, float]:
        return {
            "sm_clock_mhz": float(torch.cuda.clock_rate(device)),
            "power_w": torch.cuda.power_draw(device) / 1000,
            "temperature_c": float(torch.cuda.temperature(device)),
        }

    try:
        now()
    except Exception as error:
        return Sensors(missing=f"no nvidia-smi, and torch: {_reason(error)}")
    return Sensors(source="torch.cuda", _now=now)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
