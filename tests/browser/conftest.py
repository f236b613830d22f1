"""One JupyterLab, one Chromium and one page for all tests of a worker; without them the tests are skipped, and say so."""

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.browser.lab import ROOT, Lab, Page, chromium
from tests.browser.static import StaticPage


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


@pytest.fixture(scope="session")
def only_page(browser, lab):
    page = Page(browser, lab)
    yield page
    page.page.close()


@pytest.fixture
def desk(only_page):
    """JupyterLab in a page. No test of this folder may leave an error on the console or ask another host."""
    only_page.console.clear()
    only_page.others.clear()
    yield only_page
    assert only_page.errors() == [] and only_page.others == []


@pytest.fixture
def static(browser, tmp_path):
    """Makes pages that show a widget without Jupyter."""
    pages = []

    def make(widget, **kwargs):
        pages.append(StaticPage(browser, widget, tmp_path, **kwargs))
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


def group(nodeid):
    """The notebook that a test names, or else its file. Tests of a group stand together and go to one worker, which opens and runs
    the notebook once. (The groups of xdist's `loadgroup` are lost under pytest 9.)"""
    named = re.search(r"\d\d_\w+\.ipynb", nodeid)
    return named[0] if named else nodeid.partition("::")[0]


def pytest_collection_modifyitems(items):
    """The fresh copy of a notebook comes first."""
    here = sorted((i for i in items if "browser/" in i.nodeid), key=lambda i: (group(i.nodeid), "test_notebooks" not in i.nodeid))
    rest = iter(here)
    items[:] = [next(rest) if "browser/" in item.nodeid else item for item in items]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class ByNotebook(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group(nodeid)

    return ByNotebook(config, log)
