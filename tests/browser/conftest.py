"""One JupyterLab and one Chromium for all tests of this folder; without them the tests are skipped, and say so."""

import os
import shutil
from pathlib import Path

import pytest

from tests.browser.lab import ROOT, Lab, Page, chromium


@pytest.fixture(scope="session")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: python -m workbench setup dev")
    if chromium() is None:
        pytest.skip("no Chromium on PATH and no $CHROMIUM: apt-get install --no-install-recommends chromium fonts-dejavu-core")
    from tests.browser.lab import CHROME
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=CHROME)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def lab(browser, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lessons")
    for book in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy(book, folder)
    server = Lab(folder, tmp_path_factory.mktemp("home"))
    yield server
    server.close()


@pytest.fixture
def new_page(browser, lab):
    pages = []

    def make(dark=False):
        pages.append(Page(browser, lab, dark))
        return pages[-1]

    yield make
    for page in pages:
        page.page.close()


@pytest.fixture(scope="session")
def axe_script():
    package = pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed: python -m workbench setup dev")
    return next(Path(package.__file__).parent.rglob("axe.min.js"))


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory):
    """Where screenshots go: $WORKBENCH_ARTIFACTS, or a temporary folder."""
    folder = Path(os.environ.get("WORKBENCH_ARTIFACTS") or tmp_path_factory.mktemp("artifacts"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
