"""A browser for the checks of this folder: `make browser-test` runs them, `make test` collects none of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# No sandbox, for containers run as root; the rest keeps Chromium from calling home.
SWITCHES = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def browser():
    """The system's Chromium, headless."""
    from playwright.sync_api import sync_playwright

    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.exit(f"no browser found ({', '.join(BROWSERS)}); on Debian: apt-get install chromium", returncode=1)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=SWITCHES)
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def pictures():
    """Where screenshots go, to be looked at."""
    folder = CHECKOUT / "build" / "browser"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
