"""Shared fixtures: the backend under test, its device, and the recorder that watches every Triton launch."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from cascade_lab import runtime

# The kernel tests of a machine with a GPU need neither Hypothesis nor the notebook tools, so it may lack them.
_NEEDED_BY = {"hypothesis": ["properties"], "nbformat": ["book", "project/test_examples.py"]}
_MISSING = [tool for tool in _NEEDED_BY if importlib.util.find_spec(tool) is None]
collect_ignore = [name for tool in _MISSING for name in _NEEDED_BY[tool]]

# tests work on tensors of a few hundred numbers, where waking a second thread costs more than the work
torch.set_num_threads(1)


def pytest_report_header() -> str:
    if _MISSING:
        return f"not installed: {', '.join(_MISSING)}; not collected: {', '.join(collect_ignore)}"
    from tests.properties.budget import header

    return header()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items) -> None:
    """Where kernels are compiled for a GPU, every test of the Triton backend carries the marker "gpu"."""
    if runtime.device().type != "cuda":
        return
    for item in items:
        if hasattr(item, "callspec") and item.callspec.params.get("backend") == "triton":
            item.add_marker(pytest.mark.gpu)


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


@pytest.fixture(scope="session", autouse=True)
def _no_launch_unwatched():
    """An interpreted launch outside every recorder, whichever test makes it, is held to the tensors it was given.

    Compilers cannot trace the test-wide recorder, and some tests call a kernel or a tool that opens none: their
    launches may touch exactly the elements of their tensor arguments.
    """
    if runtime.triton_mode() != "interpreted":
        yield
        return
    from triton.runtime.interpreter import GridExecutor

    from cascade_lab.evidence import reads

    launch = GridExecutor.__call__

    def watched(self, *args, **kwargs):
        if reads._active is not None:
            return launch(self, *args, **kwargs)
        given = {f"argument {i}": x for i, x in enumerate((*args, *kwargs.values())) if isinstance(x, torch.Tensor)}
        with reads.record_loads(**given):
            # the recorder has put its own launch in place
            return GridExecutor.__call__(self, *args, **kwargs)

    GridExecutor.__call__ = watched
    yield
    GridExecutor.__call__ = launch
