"""`draw`: boxes, wires, ties that are seen, and SVG that any program reads."""

import importlib.util
import pathlib
import re
import xml.etree.ElementTree as ET

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

import sharedtree as st
from tests import strategies as dags
from tests.strategies import paths_by_object

from .models import block, language_model, random_dag

pytest.importorskip("igraph")
pytest.importorskip("drawsvg")

RULE = re.compile(r"\.([\w-]+)\{(.*?)\}")
NAMESPACE = "{http://www.w3.org/2000/svg}"


class Picture:
    """What is in a drawing."""

    def __init__(self, drawing):
        self.root = ET.fromstring(drawing.svg)
        self.all = list(self.root.iter())
        self.texts = ["".join(each.itertext()) for each in self.all if each.tag == f"{NAMESPACE}text"]

    def of(self, css):
        return [each for each in self.all if css in each.get("class", "").split()]

    def texts_of(self, css):
        return ["".join(each.itertext()) for each in self.of(css)]

    def titles(self):
        return [each.text for each in self.all if each.tag == f"{NAMESPACE}title"][1:]

    def marks(self):
        return {int(mark) for text in self.texts for mark in re.findall(r"#(\d+)", text)}


@given(dags.dags())
def test_every_tie_is_in_the_drawing(tree):
    picture = Picture(st.draw(tree))
    ties = [paths for paths in paths_by_object(tree) if len(paths) > 1]
    assert picture.marks() == set(range(1, len(ties) + 1))
    shown = sorted(int(title.split()[-2]) for title in picture.titles() if title.endswith("places"))
    assert shown == sorted(map(len, ties))
    assert len(picture.of("sharedtree-dot")) == len(picture.of("sharedtree-wire-tied")) >= len(ties)
    assert len(picture.of("sharedtree-frame")) == len(picture.of("sharedtree-badge")) == len(ties)


@given(dags.dags())
def test_nothing_lies_on_anything_else(tree):
    picture = Picture(st.draw(tree))
    _, _, width, height = map(float, picture.root.get("viewBox").split())
    boxes = []
    for each in picture.of("sharedtree-box") + picture.of("sharedtree-tied"):
        if each.tag == f"{NAMESPACE}rect":
            x, y, w, h = (float(each.get(name)) for name in ("x", "y", "width", "height"))
        else:
            numbers = list(map(float, re.findall(r"-?\d+(?:\.\d+)?", each.get("d"))))
            xs, ys = numbers[::2], numbers[1::2]
            x, y, w, h = min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
        boxes.append((x, y, w, h))
    for i, (x, y, w, h) in enumerate(boxes):
        for a, b, c, d in boxes[:i]:
            assert x + w <= a or a + c <= x or y + h <= b or b + d <= y


@given(dags.dags())
def test_the_same_model_has_the_same_drawing(tree):
    assert st.draw(tree).svg == st.draw(dags.copy_dag(tree, lambda x: x.copy())).svg == st.draw(st.Dag(tree)).svg


def test_a_tie_is_told_by_colour_by_shape_and_in_words():
    w = jnp.ones((4, 3))
    picture = Picture(st.draw({"embed": w, "head": w, "other": jnp.ones(2)}))
    assert picture.texts_of("sharedtree-badge-text") == ["#1"]
    assert picture.texts_of("sharedtree-label-tied") == ["['embed'] = ['head']"]
    assert "['other'] float32[2]" in picture.texts
    assert "12 parameters, at 2 places" in picture.texts
    assert "stroke-dasharray:7 4" in st.draw([]).svg


def test_programs_that_cannot_mix_colours_paint_it_light():
    """Each shape and text has a plain colour as attribute, which only rules under a condition override."""
    tree = {"a": (w := jnp.ones(2)), "b": w, "c": [block(jnp.ones(2)), *language_model(3).blocks]}
    picture = Picture(st.draw([tree, [], 3]))
    css = next(each.text for each in picture.all if each.tag == f"{NAMESPACE}style")
    plain, condition, painting = css.partition("@supports(fill:color-mix(in srgb,red,blue)){")
    assert condition
    assert "color-mix(" not in plain
    assert "currentColor" not in plain
    rules = {name: dict(re.findall(r"(fill|stroke):([^;]+)", rule)) for name, rule in RULE.findall(painting)}
    painted = [each for each in picture.all if each.tag.removeprefix(NAMESPACE) in ("rect", "path", "circle", "text")]
    assert {css for each in painted for css in each.get("class").split()} >= {*rules}
    for each in painted:
        assert re.fullmatch("#[0-9a-f]{3,6}|none", each.get("fill"))
        wanted = set().union(*[rules.get(name, {}) for name in each.get("class").split()])
        assert wanted == {what for what in ("fill", "stroke") if each.get(what) is not None}, each.get("class")


PAGES = {
    "JupyterLab light": ((255, 255, 255), (33, 33, 33)),
    "JupyterLab dark": ((17, 17, 17), (255, 255, 255)),
    "Furo light": ((255, 255, 255), (0, 0, 0)),
    "Furo dark": ((19, 20, 22), (207, 208, 208)),
}


def contrast(a, b):
    """The ratio of WCAG 2."""

    def luminance(colour):
        parts = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    bright, dark = sorted([luminance(a), luminance(b)], reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(("page", "text"), PAGES.values(), ids=PAGES)
def test_ties_and_quiet_texts_can_be_read_on_light_and_dark_pages(page, text):
    for css in (st.draw([]).svg, st.summary([])._repr_html_()):
        assert "prefers-color-scheme" not in css
        assert "color-mix(in srgb,currentColor 50%,#e07000)" in css
    orange = (0xE0, 0x70, 0x00)
    assert contrast([(t + o) / 2 for t, o in zip(text, orange, strict=True)], page) >= 4.5
    assert "color-mix(in srgb,currentColor 80%,transparent)" in st.draw([]).svg
    assert contrast([0.8 * t + 0.2 * p for t, p in zip(text, page, strict=True)], page) >= 4.5
    assert contrast((255, 255, 255), (0xB3, 0x4F, 0x00)) >= 4.5


def test_a_notebook_gets_html_so_that_the_drawing_has_the_colours_of_the_page():
    drawing = st.draw(language_model(1))
    html = drawing._repr_html_()
    assert html.startswith("<div><svg ")
    assert html.endswith("</svg></div>")
    # A file of its own, or an image, has no page around it, and gets a ground.
    assert "svg:root>.sharedtree-page{fill:#fff}" in drawing.svg
    assert ".sharedtree-page{fill:none}" in drawing.svg


def size_of(picture):
    return float(picture.root.get("width")), float(picture.root.get("height"))


W = jnp.ones(2)
MODELS = {
    "one layer": language_model(1),
    "two layers": language_model(2),
    "24 layers": language_model(24),
    "unequal layers": {"layers": [eqx.nn.Linear(i + 1, 2, key=jax.random.key(0)) for i in range(12)]},
    "a long name": {"a" * 60: []},
    "long names of one array": {letter * 60: W for letter in "abcdefgh"},
    "a deep tree": [[[[{"a": [W, [i, jnp.ones(i)]]} for i in range(j)] for j in range(4)] for _ in range(2)], W],
    "hidden ties": [[[[W, jnp.ones(i)], [W, jnp.ones(i)]] for i in range(j)] for j in range(90)],
    "a DAG of a thousand nodes": random_dag(1_000),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_no_drawing_is_wider_than_a_page_or_much_wider_than_high(model):
    picture = Picture(st.draw(model))
    width, height = size_of(picture)
    assert width <= 730
    assert width <= 3 * height + 1
    assert min(float(text.get("font-size")) for text in picture.all if text.tag == f"{NAMESPACE}text") >= 12
    style = next(each.text for each in picture.all if each.tag == f"{NAMESPACE}style")
    assert min(map(int, re.findall(r"font-size:(\d+)px", style))) >= 12


def test_two_equal_neighbours_are_folded_only_where_there_is_no_room():
    narrow = Picture(st.draw([eqx.nn.Linear(2, 2, key=jax.random.key(0)) for _ in range(2)]))
    assert narrow.texts_of("sharedtree-count-text") == []
    wide = Picture(st.draw(language_model(2)))
    assert "×2" in wide.texts_of("sharedtree-count-text")
    # Ties keep the numbers that they have in the table.
    table = st.summary(language_model(2))
    marks = {row.part.shape: row.mark for row in table.rows if row.mark and row.part.shape}
    assert f"#{marks[10, 4]}" in wide.texts_of("sharedtree-badge-text")
    assert f"#{marks[2, 2]}" in wide.texts_of("sharedtree-badge-text")


def test_a_tie_stays_up_where_others_make_room():
    first = eqx.nn.Linear(100, 2, key=jax.random.key(0))
    layers = [eqx.nn.Linear(i + 1, 2, key=jax.random.key(0)) for i in range(11)]
    picture = Picture(st.draw([*layers, first, first]))
    (tied,) = [each for each in picture.of("sharedtree-tied") if each.tag == f"{NAMESPACE}rect"]
    others = [each for each in picture.of("sharedtree-box") if each.tag == f"{NAMESPACE}rect"]
    tops = sorted(float(each.get("y")) for each in others)
    assert tops[0] < float(tied.get("y")) == tops[1] < tops[-1]


def test_24_layers_are_a_stack():
    drawing = st.draw(language_model(24))
    picture = Picture(drawing)
    # The two linear layers of each block are equal neighbours, too.
    assert picture.texts_of("sharedtree-count-text") == ["×24", "×2"]
    assert "×24" in " ".join(picture.texts_of("sharedtree-label"))
    assert picture.texts_of("sharedtree-badge-text") == ["#1", "#2 ×24", "#3"]
    assert "4 parameters, at 24 places" in picture.texts
    assert len(drawing.svg) < 20_000
    assert float(picture.root.get("width")) <= 730


def test_one_layer_at_many_places_is_one_box():
    picture = Picture(st.draw([block(jnp.ones(2))] * 12))
    assert "[0] = [1..11] ×11" in picture.texts
    assert any("at 12 places" in text for text in picture.texts)


@pytest.mark.slow
def test_many_boxes_and_little_depth_are_lines_with_marks():
    layers = [eqx.nn.Linear(i + 1, 2, key=jax.random.key(0)) for i in range(40)]
    model = {"layers": layers, "probes": [layer.weight for layer in layers]}
    picture = Picture(st.draw(model))
    assert len(picture.of("sharedtree-box")) < 40
    assert any("more" in text for text in picture.texts)
    assert "ties within what is not drawn" in " ".join(picture.texts)
    picture = Picture(st.draw(language_model(24), depth=1))
    assert "[0..23] ×24 Block ..." in picture.texts
    assert "ties within what is not drawn: #2, #3" in picture.texts
    assert len(Picture(st.draw(language_model(2), boxes=1)).of("sharedtree-box")) == 1


def test_texts_of_the_model_are_escaped():
    w = jnp.ones(2)
    drawing = st.draw({"<script>alert(1)</script>\x1b[2J\u202e\0": w, "]]></style>": w})
    picture = Picture(drawing)
    assert not [each for each in picture.all if each.tag.endswith("script")]
    assert all(char.isprintable() or char == "\n" for char in drawing.svg)


def test_it_is_saved_as_utf_8_and_shown_in_notebooks(tmp_path):
    drawing = st.draw(language_model(3))
    drawing.save(tmp_path / "m.svg")
    assert (tmp_path / "m.svg").read_text("utf-8") == drawing.svg
    assert drawing._repr_svg_().startswith("<svg")
    assert "m.svg" in repr(drawing)
    with pytest.raises(ValueError, match=r"SVG, and `\.png`"):
        drawing.save("m.png")


@pytest.mark.slow
def test_a_hundred_thousand_nodes_and_what_is_no_pytree():
    arrays = [jax.ShapeDtypeStruct((i,), "float32") for i in range(25_000)]
    drawing = st.draw([{"a": w, "b": [w]} for w in arrays])
    assert len(drawing.svg) < 200_000
    cycle = []
    cycle.append(cycle)
    with pytest.raises(st.errors.CycleError):
        st.draw(cycle)
    with pytest.raises(st.errors.UnregisteredTypeError):
        st.draw(object())
    for options in ({"depth": -1}, {"boxes": 0}):
        with pytest.raises(ValueError, match="at least"):
            st.draw([], **options)


@pytest.mark.slow
def test_the_pictures_of_the_documentation_are_those_of_its_script():
    folder = pathlib.Path(__file__).parents[2] / "docs"
    spec = importlib.util.spec_from_file_location("pictures_of_docs", folder / "pictures.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    made = script.pictures()
    assert set(made) == {path.name for path in (folder / "pictures").iterdir()}
    for name, drawing in made.items():
        theirs, ours = ET.fromstring((folder / "pictures" / name).read_text("utf-8")), ET.fromstring(drawing.svg)
        # Where boxes lie may differ with the version of igraph; what they say does not.
        assert sorted(map(str.strip, theirs.itertext())) == sorted(map(str.strip, ours.itertext()))


def test_tied_parts_below_a_long_list_are_drawn():
    """The list alone could fill the drawing, and its ties would be marks in lines."""
    layers = [eqx.nn.Linear(2, 2, key=jax.random.key(i)) for i in range(10)]
    parts = [eqx.nn.Sequential([layers[i % 10], layers[(i + 1) % 10], *[eqx.nn.Identity()] * i]) for i in range(40)]
    picture = Picture(st.draw(parts, boxes=15))
    assert len(picture.of("sharedtree-box")) + len(picture.of("sharedtree-tied")) <= 15
    assert len(picture.of("sharedtree-tied")) >= 2
