"""Clocks and power of a card, from an executable that stands in for nvidia-smi, or through torch."""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from cascade_lab.bench import clock as clocks
from cascade_lab.bench.gpu import sensors as module
from cascade_lab.bench.gpu.sensors import QUERIES, Sensors, parse, sensors
from tests.limits import HANGS_S

CARD = SimpleNamespace(meaningful=True, device=torch.device("cuda", 0))
# prints what nvidia-smi prints for the queries that it knows, then keeps running as it does in a loop
NVIDIA_SMI = """#!{python}
import os, sys, time
query = next(x for x in sys.argv if x.startswith("--query-gpu=")).split("=")[1]
assert query == "clocks.sm,clocks.mem,power.draw,temperature.gpu", query
assert "--format=csv,noheader,nounits" in sys.argv and "--loop-ms=500" in sys.argv
assert "--id=GPU-1234" in sys.argv
for line in {lines!r}:
    print(line, flush=True)
with open({pid!r} + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename({pid!r} + ".new", {pid!r})
time.sleep({seconds})
"""


@pytest.fixture
def smi(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    pid = tmp_path / "pid"

    def install(*lines):
        tool = tmp_path / "nvidia-smi"
        tool.write_text(NVIDIA_SMI.format(python=sys.executable, lines=lines, pid=str(pid), seconds=HANGS_S))
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return pid

    return install


def read_until(found, count):
    """Wait for the reader's thread, which has the lines once they are printed."""
    while found.missing is None and len(found._readings) < count:
        time.sleep(0.01)


def test_readings_are_summed_up_by_section_and_the_tool_is_ended(smi):
    pid = smi("1980, 2619, 300.5, 41", "1755, 2619, 690.0, 63", "1830, 2619, [N/A], 60")
    with sensors(CARD) as found:
        read_until(found, 3)
        assert found.source == "nvidia-smi"
        assert found.taken() == {
            "readings": 3,
            "sm_clock_mhz": [1755.0, 1830.0, 1980.0],
            "memory_clock_mhz": [2619.0, 2619.0, 2619.0],
            "power_w": [300.5, 495.25, 690.0],
            "temperature_c": [41.0, 60.0, 63.0],
        }
        assert found.taken() == {"readings": 0}
        while not pid.exists():
            time.sleep(0.01)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_what_the_tool_says_instead_is_the_reason_for_no_readings(smi):
    smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    with sensors(CARD) as found:
        read_until(found, 1)
        assert found.taken()["missing"].startswith("nvidia-smi: NVIDIA-SMI has failed")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("1980, 2619, 300.5, 41\n", dict(zip(QUERIES, (1980, 2619, 300.5, 41), strict=True))),
        ("[N/A], 2619, [Not Supported], 41", {"memory_clock_mhz": 2619, "temperature_c": 41}),
        ("No devices were found", {}),
        ("", {}),
    ],
)  # fmt: skip
def test_a_line_of_the_tool_is_read(line, found):
    assert parse(line) == found


def test_without_the_tool_torch_is_asked_once_a_section(monkeypatch):
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    power = iter([500_000, 650_000])
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 1500)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: next(power))
    monkeypatch.setattr(torch.cuda, "temperature", lambda device: 50)
    with sensors(CARD) as found:
        # the first reading is the trial
        assert found.taken() == {
            "readings": 1, "sm_clock_mhz": [1500] * 3, "power_w": [650] * 3, "temperature_c": [50] * 3,
        }  # fmt: skip
        assert found.source == "torch.cuda"


def test_where_nothing_can_be_read_the_reason_is_named(monkeypatch):
    def absent(device):
        raise ModuleNotFoundError("pynvml does not seem to be installed")

    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "clock_rate", absent)
    with sensors(CARD) as found:
        said = "no nvidia-smi, and torch: ModuleNotFoundError: pynvml does not seem to be installed"
        assert found.taken() == {"missing": said}
    with sensors(clocks.HostClock()) as found:
        assert found == Sensors(missing="no GPU", _lock=found._lock)
        assert found.taken() == {"missing": "no GPU"}
