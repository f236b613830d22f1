"""A widget on a page without Jupyter and without a kernel: its module, its stored state, and a model that cannot be saved."""

import base64
import json

DARK = {"--jp-layout-color0": "#111111", "--jp-layout-color1": "#111111", "--jp-layout-color2": "#424242", "--jp-content-font-color1": "#ffffff", "--jp-border-color1": "#616161"}
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>A stored page</title><style>%(css)s body{margin:8px;%(theme)s}</style></head>
<body><main class="jp-Cell-outputArea" id="out"></main><script type="module">
const state = JSON.parse(new TextDecoder().decode(Uint8Array.from(atob('%(state)s'), c => c.charCodeAt(0)))), listeners = {};
const code = new TextDecoder().decode(Uint8Array.from(atob('%(code)s'), c => c.charCodeAt(0)));
window.model = {get: k => state[k], on: (e, f) => (listeners[e] ??= []).push(f), off: (e, f) => { listeners[e] = (listeners[e] ?? []).filter(g => g !== f); },
  set: (k, v) => { if (state[k] !== v) { state[k] = v; for (const f of listeners['change:' + k] ?? []) f(); } },
  save_changes: () => { throw new Error('no kernel'); }, send: () => { throw new Error('no kernel'); }};
window.code = URL.createObjectURL(new Blob([code + (code.includes('function stateAt') ? '\\nexport { stateAt };' : '')], {type: 'text/javascript'}));
const module = await import(window.code);
module.default.render({model, el: document.getElementById('out')});
window.ready = true;
</script></body></html>"""


def page_of(widget, dark=False):
    state = {name: getattr(widget, name) for name in widget.traits(sync=True) if not name.startswith("_")}
    state = {k: v for k, v in state.items() if isinstance(v, (str, int, float, list, dict, bool))}
    pack = lambda text: base64.b64encode(text.encode()).decode()  # noqa: E731
    theme = "".join(f"{k}:{v};" for k, v in DARK.items()) + "background:#111;" if dark else ""
    return PAGE % {"css": widget._css, "theme": theme, "state": pack(json.dumps(state)), "code": pack(widget._esm)}


class StaticPage:
    """The page, open in a browser; `errors` are those of its console."""

    def __init__(self, browser, widget, folder, dark=False, width=1000, height=1100):
        file = folder / "page.html"
        file.write_text(page_of(widget, dark), "utf-8")
        self.page = browser.new_page(viewport={"width": width, "height": height})
        self.errors, self.others = [], []
        self.page.on("console", lambda m: m.type == "error" and self.errors.append(m.text[:300]))
        self.page.on("pageerror", lambda e: self.errors.append(str(e)[:300]))
        self.page.on("request", lambda r: r.url.startswith("http") and self.others.append(r.url))
        self.page.goto(file.as_uri())
        try:
            self.page.wait_for_function("() => window.ready", timeout=10_000)
        except Exception as e:
            e.add_note(f"console: {self.errors}")
            raise

    def redraw_ms(self, selector, keys):
        """Milliseconds from key press to painted redraw, for each key."""
        self.page.evaluate("""sel => { const e = document.querySelector(sel); e.focus(); window.took = [];
            window.addEventListener('keydown', () => { const t = performance.now();
              requestAnimationFrame(() => { const c = new MessageChannel(); c.port1.onmessage = () => window.took.push(performance.now() - t); c.port2.postMessage(0); }); }, true); }""", selector)
        for key in keys:
            self.page.keyboard.press(key)
        self.page.wait_for_function("n => window.took.length >= n", arg=len(keys))
        return self.page.evaluate("() => window.took")
