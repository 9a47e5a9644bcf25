"""Ties in treescope's views: marks, paths and links, for models of every library, and in the repr of a Dag."""

import dataclasses
import html.parser
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import sharedtree as st

treescope = pytest.importorskip("treescope")

# It looks at all public names of the libraries that it knows, deprecated ones too.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    left: object
    right: object


@pytest.fixture
def registered():
    before = treescope.active_renderer.get()
    st.show.register()
    st.show.register()
    yield
    treescope.active_renderer.set_globally(before)


def nnx_model():
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.encoder = nnx.Linear(2, 2, rngs=rngs)
            self.decoder = self.encoder

    return Net(nnx.Rngs(0)), ".decoder = .encoder"


def equinox_model():
    layer = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    return eqx.nn.Sequential([layer, layer]), ".layers[0] = .layers[1]"


def dataclass_model():
    w = jnp.ones(3)
    return Record(w, Record(w, 1)), ".left = .right.left"


def dict_model():
    w = jnp.ones(3)
    return {"a": w, "b": [w]}, "['a'] = ['b'][0]"


MODELS = [nnx_model, equinox_model, dataclass_model, dict_model]


class Links(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.ties, self.titles = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if "data-tie" in attributes:
            self.ties.append(attributes["data-tie"])
            self.titles.append(attributes["title"])
            assert "scrollIntoView" in attributes["onclick"]


@pytest.mark.parametrize("make", MODELS)
def test_each_place_has_the_mark_the_paths_and_a_link(make, registered):
    model, paths = make()
    text = treescope.render_to_text(model)
    assert text.count("#1 ") >= 2
    assert f"# tie #1: {paths}" in text
    links = Links(treescope.render_to_html(model, compressed=False))
    assert len(links.ties) == 2
    assert len(set(links.ties)) == 1
    again = Links(treescope.render_to_html(model, compressed=False))
    assert links.ties[0] != again.ties[0], "two views on one page are not linked"
    assert links.titles[0] == "one object at " + paths.replace(" = ", ", ")


@pytest.mark.parametrize("make", MODELS)
def test_a_dag_has_its_ties_without_register(make):
    model, paths = make()
    assert "#1" not in treescope.render_to_text(model)
    for each in (st.Dag(model), [st.Dag(model)]):
        text = treescope.render_to_text(each)
        assert "Dag(" in text
        assert f"# tie #1: {paths}" in text
    assert len(Links(treescope.render_to_html(st.Dag(model), compressed=False)).ties) == 2


def test_a_dag_among_others(registered):
    w = jnp.ones(2)
    text = treescope.render_to_text([st.Dag({"a": w, "b": w}), {"c": w}])
    assert "Dag(" in text
    assert "#1" in text


def test_what_has_no_ties_and_what_has_a_cycle_is_shown_as_ever(registered):
    assert "#1" not in treescope.render_to_text({"a": jnp.ones(2), "b": (1, 2), "c": 1.0})
    cycle = []
    cycle.append(cycle)
    assert "cyclic reference" in treescope.render_to_text(cycle)
    assert treescope.render_to_text("text") == "'text'"


def test_texts_are_escaped(registered):
    w = jnp.ones(2)
    page = treescope.render_to_html({"<img src=x>\x1b": w, "b": w}, compressed=False)
    assert "<img src=x>" not in page
    assert "\x1b" not in page


def test_without_treescope_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "treescope", None)
    with pytest.raises(ImportError, match=r"    pip install treescope$"):
        st.show.register()
    assert str(st.Dag([1.0])) == "Dag([1.0])"
