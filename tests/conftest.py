"""Shared fixtures: the backend under test, its device, and the recorder that watches every Triton launch."""

from __future__ import annotations

import pytest
import torch

from cascade_lab import runtime

# tests work on tensors of a few hundred numbers, where waking a second thread costs more than the work
torch.set_num_threads(1)


@pytest.fixture(params=["torch", "triton"])
def backend(request) -> str:
    """Both backends in turn; Triton runs interpreted on a machine without GPU."""
    if request.param == "triton" and runtime.triton_mode() == "absent":
        pytest.skip("Triton is not installed")
    return request.param


@pytest.fixture
def device(request) -> torch.device:
    """Where the backend under test keeps its tensors."""
    if "backend" in request.fixturenames and request.getfixturevalue("backend") == "triton":
        return runtime.device()
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def loads(request):
    """The active `Record` of every interpreted Triton test, else None.

    It is open before the test body runs, so all tensors of the test are known, uninitialised memory is NaN,
    and any load or store outside known memory fails the test.
    """
    name = request.getfixturevalue("backend") if "backend" in request.fixturenames else None
    if name != "triton" or runtime.triton_mode() != "interpreted":
        yield None
        return
    from cascade_lab.evidence.reads import record_loads

    with record_loads() as record:
        yield record
