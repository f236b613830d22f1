"""A real JupyterLab and a real Chromium, for the tests of this folder."""

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROME = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync", "--disable-background-networking",
          "--disable-component-update", "--force-device-scale-factor=1"]
SETTINGS = {  # no news, no look-up of updates, every cell really in the page, no kernel without its notebook, no autosave
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none", "kernelShutdown": True},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False}}
HARMLESS: tuple[str, ...] = ()  # beginnings of console errors that JupyterLab makes by itself; 4.6 makes none


AXE_OK = {"scrollable-region-focusable"}  # JupyterLab's own output area scrolls long text
CLOSE = """async () => { const c = window.jupyterapp.commands; await c.execute('docmanager:save'); await c.execute('application:close-all');
    await c.execute('apputils:change-theme', {theme: 'JupyterLab Light'}); }"""


def chromium():
    return os.environ.get("CHROMIUM") or next((p for p in map(shutil.which, BROWSERS) if p), None)


def widget(inner):
    """The widget of ours that an element belongs to."""
    return inner.locator("xpath=ancestor::*[contains(concat(' ', @class, ' '), ' wb ')][1]")


class Lab:
    """A running server: `base` address, `token`, `folder` with the notebooks."""

    def __init__(self, folder, home):
        self.folder, self.home, self.token = folder, home, secrets.token_hex(8)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.base = f"http://127.0.0.1:{port}"
        for name, value in SETTINGS.items():
            self.setting(name, value)
        env = dict(os.environ, JUPYTERLAB_SETTINGS_DIR=str(home / "settings"), JUPYTERLAB_WORKSPACES_DIR=str(home / "ws"),
                   JUPYTER_CONFIG_DIR=str(home / "cfg"), JUPYTER_RUNTIME_DIR=str(home / "run"), JUPYTER_DATA_DIR=str(home / "data"),
                   IPYTHONDIR=str(home / "ipy"), PYTHONPATH=str(ROOT))
        self.log = open(home / "lab.log", "wb")
        root = ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0",
             "--LabApp.expose_app_in_browser=True", f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={folder}", *root], env=env, stdout=self.log, stderr=self.log)
        self._wait(time.monotonic() + 90)

    def setting(self, name, value):
        file = self.home / "settings" / (name + ".jupyterlab-settings")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(value))

    def _wait(self, end):
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.base}/api/status?token={self.token}", timeout=2).read()
                return
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("jupyter lab did not start:\n" + (self.home / "lab.log").read_text()[-2000:])
            time.sleep(0.2)

    def close(self):
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


class Page:
    """A browser page that notes console errors and requests to other hosts. Loading JupyterLab costs more than anything else does, so
    one page shows one notebook after the other. name: of the notebook that it shows, ran: whether all of it was run."""

    def __init__(self, browser, lab):
        self.lab, self.console, self.others, self.name, self.ran = lab, [], [], "", False
        self.page = browser.new_page(viewport={"width": 1280, "height": 1000})
        self.page.set_default_timeout(90_000)
        self.page.on("console", lambda m: m.type == "error" and self.console.append(m.text[:300]))
        self.page.on("pageerror", lambda e: self.console.append("pageerror: " + str(e)[:300]))
        self.page.on("request", self._note)

    def _note(self, request):
        if request.url.startswith(("http", "ws")) and "127.0.0.1" not in request.url.split("/")[2]:
            self.others.append(request.url[:200])

    def errors(self):
        return [text for text in self.console if not text.startswith(HARMLESS)]

    def open(self, name):
        """A fresh copy. Ready means three things together: all cells are in the page, a kernel is attached, and it is idle."""
        if self.name:
            self.page.evaluate(CLOSE)
            self.page.wait_for_function("() => !document.querySelector('.jp-Notebook')")
        if (ROOT / "notebooks" / name).exists():
            shutil.copy(ROOT / "notebooks" / name, self.lab.folder)
        n = len(json.loads((self.lab.folder / name).read_text("utf-8"))["cells"])
        if self.name:
            self.page.evaluate("async path => { await window.jupyterapp.commands.execute('docmanager:open', {path, factory: 'Notebook'}); }", name)
        else:
            self.page.goto(f"{self.lab.base}/lab/tree/{name}?reset&token={self.lab.token}")
        self.name, self.ran = name, False
        self.page.wait_for_function(r"""n => document.querySelectorAll('.jp-Notebook .jp-Cell').length === n
            && !/No Kernel/.test(document.querySelector('.jp-Toolbar-kernelName')?.textContent ?? 'No Kernel')
            && [...document.querySelectorAll('#jp-main-statusbar .jp-StatusBar-TextItem')].some(e => /\| Idle$/.test(e.textContent.trim()))""", arg=n)

    def lesson(self, name):
        """The page with this notebook open and run: as it stands, if that is so already."""
        if (self.name, self.ran) != (name, True):
            self.open(name)
            self.run_all()
        return self.page

    def menu(self, *items):
        for item in items:
            self.page.get_by_role("menuitem", name=item, exact=True).click()

    def theme(self, name):
        """Change to the theme "Light" or "Dark", by the command behind the menu, and wait until it is there. The next notebook is light."""
        self.page.evaluate("name => window.jupyterapp.commands.execute('apputils:change-theme', {theme: `JupyterLab ${name}`})", name)
        self.page.wait_for_function("light => document.body.dataset.jpThemeLight === light", arg=str(name == "Light").lower())
        self.page.wait_for_timeout(300)

    def start_all(self):
        """Clear, so that every prompt is "[ ]:", and run; does not wait."""
        self.menu("Edit", "Clear Outputs of All Cells")
        self.menu("Run", "Run All Cells")

    def run_all(self):
        self.start_all()
        self.page.wait_for_function(r"""() => { const all = [...document.querySelectorAll('.jp-CodeCell')]
                .filter(c => c.querySelector('.cm-content').innerText.trim()).map(c => c.querySelector('.jp-InputPrompt').textContent.trim());
            const done = document.querySelector('.jp-Notebook-ExecutionIndicator').dataset.status === 'idle'
                && !all.includes('[*]:') && /^\[\d+\]:$/.test(all[0]);
            window.__since = done ? (window.__since ?? performance.now()) : undefined;
            return done && performance.now() - window.__since > 500 }""")
        self.ran = True

    def save(self, name):
        """The notebook as saved: in the page an error looks like any stderr."""
        file = self.lab.folder / name
        before = file.stat().st_mtime_ns
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("Control+s")
        for _ in range(400):
            self.page.wait_for_timeout(50)
            if file.stat().st_mtime_ns != before:
                with contextlib.suppress(ValueError):  # the server is still writing
                    return json.loads(file.read_text("utf-8"))
        raise TimeoutError(f"{name} was not saved")

    def axe(self, script, *rules):
        """Serious findings in output areas, of these rules or of all: (rule, impact, number of places, first place)."""
        self.page.add_script_tag(path=script)
        found = self.page.evaluate("""rules => axe.run({include: [['.jp-Cell-outputArea']]}, {resultTypes: ['violations'], ...(rules.length && {runOnly: rules})})
            .then(r => r.violations.map(v => [v.id, v.impact, v.nodes.length, v.nodes[0].target.join(' '), v.nodes[0].failureSummary]))""", rules)
        return [v for v in found if v[1] in ("serious", "critical") and v[0] not in AXE_OK]

    def both_themes(self, script, file):
        """Serious findings in the light theme, and then in the dark one, where only contrast can differ; a picture of each."""
        self.theme("Light")
        found = {"light": self.axe(script)}
        self.shot(file.with_name(file.name + "-light.png"))
        self.theme("Dark")
        found["dark"] = self.axe(script, "color-contrast")
        self.shot(file.with_name(file.name + "-dark.png"))
        return {theme: some for theme, some in found.items() if some}

    def shot(self, file):
        """The whole notebook as one long picture, where somebody wants to look at it."""
        if "WORKBENCH_ARTIFACTS" not in os.environ:
            return
        panel = "document.querySelector('.jp-WindowedPanel-outer')"
        height = self.page.evaluate(f"() => Math.min(16000, {panel}.scrollHeight + 160)")
        self.page.set_viewport_size({"width": 1280, "height": max(1000, int(height))})
        self.page.evaluate(f"() => {{ {panel}.scrollTop = 0; }}")
        self.page.wait_for_timeout(700)
        self.page.screenshot(path=file)
        self.page.set_viewport_size({"width": 1280, "height": 1000})
