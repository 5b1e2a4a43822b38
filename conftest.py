"""Cells of a notebook run in order in one kernel, so whoever spreads nbval over workers gives each notebook to one."""


def pytest_configure(config) -> None:
    if config.getoption("nbval", False) and config.getoption("dist", "no") in ("load", "loadgroup", "worksteal"):
        config.option.dist = "loadfile"
