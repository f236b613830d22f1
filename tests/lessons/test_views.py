"""Views: one bundle of HTML and PNG with alt text, the same bytes each time, and nothing of a hostile name but its text."""

import base64
import io
import threading
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import workbench as wb
from workbench import views
from workbench.errors import shown
from workbench.tensors import ops
from workbench.views.palette import HATCHES, ink_on
from workbench.widgets import Stepper

NASTY = "<script>alert(1)</script>$\\frac{\x07\n\u202e名"


def some_figure():
    figure = views.new_figure(3, 2)
    figure.add_subplot(title=NASTY).plot([1, 3, 2])
    return figure


def test_a_picture_is_html_with_alt_and_png_in_one_bundle():
    picture = views.picture(some_figure(), 'a line that "rises"', "It rises & falls.")
    data, metadata = picture._repr_mimebundle_()
    assert set(data) == {"text/html", "image/png", "text/plain"}
    assert 'alt="a line that &quot;rises&quot;"' in data["text/html"] and "<figcaption>It rises &amp; falls.</figcaption>" in data["text/html"]
    assert data["image/png"] in data["text/html"]
    assert metadata["image/png"]["needs_background"] == "light"
    image = Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).convert("RGB")
    assert image.size == (330, 220) and image.getpixel((2, 2)) == (255, 255, 255)


def test_pictures_are_the_same_bytes_each_time_on_any_thread():
    wanted = views.picture(some_figure(), "alt", "caption").png
    got = []
    threads = [threading.Thread(target=lambda: got.append(views.picture(some_figure(), "alt", "caption").png)) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == [wanted] * 4


def nasty_graph():
    with wb.Context(1 << 20) as context:
        w = context.new_tensor("f32", 4, 8, name=NASTY)
        x = context.new_tensor("f32", 4, 2, name="x")
        hidden = ops.mul_mat(w, x).named(NASTY)
        out = ops.add(ops.silu(hidden), ops.reshape(hidden, 8, 2))
        yield wb.build(out)


def test_graph_pictures_show_hostile_names_as_text():
    for graph in nasty_graph():
        picture = views.graph_picture(graph.nodes, NASTY)
        page = picture.html()
        assert "<script" not in page.replace("&lt;script", "") and "\x07" not in page and "\u202e" not in page
        assert "MUL_MAT" in picture.alt and "ADD" in picture.alt
        assert len(picture.png) < 40_000


def test_graph_pictures_follow_the_graph():
    with wb.Context(1 << 20) as context:
        a = context.new_tensor("f32", 4, name="a")
        one, two = ops.silu(a).named("one"), ops.sqr(a).named("two")
        parallel, chain = wb.build(ops.add(one, two)), wb.build(ops.sqr(ops.silu(a)))
        assert views.graph_picture(parallel.nodes, "c").png != views.graph_picture(chain.nodes, "c").png
        assert "one is SILU of a" in views.graph_picture(parallel.nodes, "c").alt


def test_tables_escape_align_and_format():
    table = views.table(["name", "n", "share"], [[NASTY, 1234567, 0.123456], ["名前", 5, np.float32(2)], ["none", None, 1.0]], "caption <b>")
    assert "<script" not in table.html() and "caption &lt;b&gt;" in table.html()
    assert '<th scope=col style="text-align:right">n</th>' in table.html()
    lines = repr(table).splitlines()
    assert "1,234,567" in lines[2] and "0.1235" in lines[2] and "\x07" not in repr(table)
    assert lines[-1] == "caption <b>"


def test_side_by_side_adds_the_ratio():
    table = views.side_by_side([("bytes", 200, 50), ("nothing", 0, 1)])
    assert table.rows[0] == ["bytes", "200", "50", "0.250"] and table.rows[1][3] == "-"


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = set(), ""

    def handle_starttag(self, tag, attrs):
        self.tags |= {tag, *(name for name, _ in attrs)}

    def handle_data(self, data):
        self.text += data


@given(st.text(max_size=40) | st.sampled_from(["<img onerror=x>", "</table><script>", "&lt;b&gt;", '"><b onclick=1>']))
@settings(max_examples=60, deadline=None)
def test_no_text_becomes_markup(text):
    for page in (views.table([text], [[text]], text).html(), views.Card("note", text, [(text, text or "-")]).html()):
        reader = Reader()
        reader.feed(page)
        reader.close()
        assert reader.tags <= {"table", "caption", "thead", "tbody", "tr", "th", "td", "div", "b", "style", "scope"}
        assert shown(text) in reader.text


@pytest.mark.parametrize("colour", views.OKABE_ITO)
def test_every_label_is_readable_on_its_colour(colour):
    def luminance(c):
        parts = [int(c[i: i + 2], 16) / 255 for i in (1, 3, 5)]
        return sum(k * (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4) for k, p in zip((0.2126, 0.7152, 0.0722), parts))

    a, b = sorted((luminance(colour), luminance(ink_on(colour))))
    assert (b + 0.05) / (a + 0.05) >= 4.5


def test_sixteen_experts_differ_by_colour_or_hatch():
    assert len({(views.style(i).fill, views.style(i).hatch) for i in range(len(views.OKABE_ITO) * len(HATCHES))}) == 32


ROUTES = st.lists(st.lists(st.integers(0, 7), min_size=2, max_size=2, unique=True), min_size=1, max_size=12)


def tokens_of(routes):
    return [{"text": f"t{i}", "experts": [ids], "weights": [[0.75, 0.25]]} for i, ids in enumerate(routes)]


@given(ROUTES, st.integers(0, 11))
@settings(max_examples=60, deadline=None)
def test_a_step_depends_on_nothing_behind_it(routes, k):
    whole = views.route_steps(tokens_of(routes), 0, 8)["steps"]
    assert views.route_steps(tokens_of(routes[: k + 1]), 0, 8)["steps"] == whole[: k + 1]


@given(ROUTES)
@settings(max_examples=60, deadline=None)
def test_every_step_names_its_cause(routes):
    steps = views.route_steps(tokens_of(routes), 0, 8)["steps"]
    for i, step in enumerate(steps):
        new = set(routes[i]) - set(routes[i - 1] if i else [])
        assert step["new"] == len(new) and step["change"] == bool(new)
        assert step["cause"] == ("start" if i == 0 else ["same", "some new", "all new"][len(new)])
        assert f"t{i}" in step["sentence"] and all(str(e) in step["sentence"] for e in routes[i])


def test_changing_one_event_changes_the_stored_picture():
    routes = [[0, 1], [1, 2], [3, 4]]
    before = views.route_steps(tokens_of(routes), 0, 8)
    routes[1] = [1, 5]
    after = views.route_steps(tokens_of(routes), 0, 8)
    assert views.raster_picture(before, "c").png != views.raster_picture(after, "c").png
    assert views.raster_picture(before, "c", k=0).png == views.raster_picture(after, "c", k=0).png
    assert "expert 5" in Stepper(after).stored_html() and "expert 5" in views.raster_picture(after, "c").alt
