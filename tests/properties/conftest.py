"""The Hypothesis profile of the property suites, and what a failure says about its seed."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, configuration, settings
from hypothesis.internal.conjecture import providers

from tests.properties.budget import EXAMPLES, FUZZING, SEED

# No deadline and no check of drawing times, for a shared machine stalls, and no database: a seed is all that a run
# depends on.
settings.register_profile("properties", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("properties")
# whatever else Hypothesis keeps, such as tables of characters
configuration.set_hypothesis_home_dir(Path(__file__).resolve().parents[2] / "build" / "hypothesis")

# Hypothesis also draws numbers that it finds in the modules loaded so far; cases would then depend on earlier tests.
mock.patch.object(providers, "_get_local_constants", return_value=providers.Constants()).start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call" and report.failed and hasattr(item.function, "stated_cases"):
        command = f"make fuzz SEED={SEED} EXAMPLES={EXAMPLES} TESTS={item.nodeid}"
        report.sections.append(("seed", command if FUZZING else f"{SEED}, the fixed one: {command}"))
    return report
