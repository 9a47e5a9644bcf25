"""`summary`: what is counted, what is marked, what is collapsed, and how it prints."""

import html.parser
import io
import re
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import sharedtree as st
from tests import strategies as dags
from tests.strategies import paths_by_object

from .models import block, counted, language_model


class Page(html.parser.HTMLParser):
    """The tags, texts, names and links of a page; all that is opened is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.names, self.links = [], set(), [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag != "br":
            self.open.append(tag)
        attributes = dict(attrs)
        self.names += [attributes["id"]] if "id" in attributes else []
        self.links += [attributes["href"]] if "href" in attributes else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@given(dags.dags())
def test_totals_are_those_of_unique_objects_and_of_all_places(tree):
    table = st.summary(tree)
    assert (table.parameters, table.nbytes) == counted(tree, unique=True)
    assert (table.untied_parameters, table.untied_nbytes) == counted(tree, unique=False)
    assert table.parameters == st.count_parameters(tree)


@given(dags.dags())
def test_every_tie_is_in_the_table(tree):
    table = st.summary(tree)
    ties = [paths for paths in paths_by_object(tree) if len(paths) > 1]
    assert table.num_ties == len(ties)
    text = table.text()
    page = Page(table._repr_html_())
    # No more than two neighbours are equal in these trees but in lists of one object, so each place has its row.
    rows = {}
    for row in table.rows:
        if row.mark is not None:
            rows.setdefault(row.mark, []).append(row)
    assert sum(row.repeats for each in rows.values() for row in each) == sum(map(len, ties))
    for mark, each in rows.items():
        assert not each[0].is_again
        assert all(row.is_again and row.tied_to == each[0].path for row in each[1:])
        assert f"  #{mark}" in text
        assert f"#{mark}" in page.texts


@given(dags.dags())
def test_the_rows_add_up(tree):
    table = st.summary(tree)
    for depth in range(4):
        rows = st.summary(tree, depth=depth).rows
        assert all(row.depth <= depth for row in rows)
        # Of three or more equal arrays, one row has the bytes of all.
        ends = [row for row in rows if not row.is_again and (row.is_cut or not row.part.children)]
        assert sum(row.size.nbytes for row in ends) == table.nbytes


@given(dags.dags())
def test_links_in_html_lead_somewhere(tree):
    page = Page(st.summary(tree)._repr_html_())
    assert {link.removeprefix("#") for link in page.links} <= set(page.names)
    assert len(page.names) == len(set(page.names))


def test_equal_blocks_are_one_row_with_their_ties():
    table = st.summary(language_model(24))
    by_path = {row.path: row for row in table.rows}
    assert by_path[".blocks[0..23]"].repeats == 24
    assert by_path[".blocks[0..23]"].size.parameters == counted_of(language_model(1).blocks[0])
    assert len(table.rows) < 30
    assert table.num_ties == 26 == len(st.ties(language_model(24)))
    lines = [" ".join(line.split()) for line in table.text().splitlines()]
    assert "#1 .embed = .head.weight" in lines
    assert "#2 ×24 .blocks[0..23].attention[0] = .blocks[0..23].attention[1]" in lines
    assert "#3 .blocks[0..23].mask = one object in all of them" in lines
    assert len(st.summary(language_model(2)).rows) > len(table.rows), "two are shown as they are"


def counted_of(tree):
    return sum({id(leaf): leaf.size for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))}.values())


def test_a_block_that_something_else_is_tied_to_stands_for_itself():
    layers = [eqx.nn.Linear(3, 3, key=jax.random.key(i)) for i in range(9)]
    steps = [row.step for row in st.summary({"layers": layers, "probe": layers[4].weight}, depth=2).rows]
    assert steps == ["", "['layers']", "[0..3]", "[4]", "[5..8]", "['probe']"]


def test_one_layer_at_many_places():
    table = st.summary([block(jnp.ones(2))] * 12, depth=1)
    assert [(row.step, row.repeats, row.tied_to) for row in table.rows] == [
        ("", 1, None),
        ("[0]", 1, None),
        ("[1..11]", 11, "[0]"),
    ]
    assert table.untied_parameters == 12 * counted(counted_twin(), unique=False)[0]


def counted_twin():
    """The arrays of a block, one for each of its places."""
    return jax.tree.leaves(eqx.filter(block(jnp.ones(2)), eqx.is_array))


def test_keys_with_numbers_are_collapsed_too():
    layers = {f"layer_{i}": {"kernel": np.ones((2, 2))} for i in range(12)}
    rows = st.summary({**layers, "out": np.ones(2)}).rows
    assert [row.step for row in rows] == ["", "['layer_0..11']", "['kernel']", "['out']"]


def test_what_is_equal_but_for_one_shape_or_tie_is_not_collapsed():
    w = jnp.ones(2)
    assert [row.repeats for row in st.summary([jnp.ones(2), jnp.ones(2), jnp.ones(3)]).rows] == [1, 1, 1, 1]
    pairs = [[w, w], [jnp.ones(2), jnp.ones(2)], [jnp.ones(2), jnp.ones(2)]]
    assert [row.repeats for row in st.summary(pairs, depth=1).rows] == [1, 1, 1, 1]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_table_is_as_wide_as_there_is_room(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = str(st.summary(language_model(24))).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].split()[0] == "path"
    assert lines[0].split()[-1] == "tie"
    assert ("bytes" in lines[0]) == (width > 80)
    assert any(line.rstrip().endswith("#1") for line in lines)


def test_no_colour_but_with_rich(monkeypatch):
    rich = pytest.importorskip("rich.console")
    table = st.summary(language_model(3))
    assert "\x1b" not in str(table)
    for no_colour in (False, True):
        out = io.StringIO()
        rich.Console(file=out, force_terminal=True, width=100, no_color=no_colour, color_system="standard").print(table)
        text = out.getvalue()
        assert ("\x1b[36m" in text) is not no_colour
        assert re.sub(r"\x1b\[[\d;]*m", "", text).split() == table.text(100).split()


def test_texts_of_the_model_are_escaped():
    cls = type("<script>alert(1)</script>\x1b[2J", (list,), {})
    jax.tree_util.register_pytree_node(cls, lambda x: (tuple(x), None), lambda _, x: cls(x))
    w = jnp.ones(2)
    tree = {"<img src=x onerror=alert(1)>\x1b[2J\u202e\n": cls([w]), "b": w}
    table = st.summary(tree)
    assert all(char.isprintable() or char == "\n" for char in str(table))
    text = table._repr_html_()
    assert not {"script", "img"} & Page(text).tags
    assert "&lt;script&gt;" in text


def test_a_dag_is_its_model_and_nothing_is_kept():
    model = language_model(3)
    assert str(st.summary(st.Dag(model))) == str(st.summary(model))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), eqx.filter(model, eqx.is_array))
    assert st.summary(abstract).parameters == st.summary(model).untied_parameters


@pytest.mark.parametrize("empty", [None, [], {}, (), [None], {"a": None}, ["text"], eqx.nn.Identity(), st.Dag(None)])
def test_what_is_empty_is_an_empty_table_and_one_box(empty):
    table = st.summary(empty)
    assert (table.parameters, table.nbytes, table.num_ties, len(table.rows)) == (0, 0, 0, 1)
    assert table.text().splitlines()[1].startswith("(root)  ")
    assert "(root)" in Page(table._repr_html_()).texts
    pytest.importorskip("igraph")
    assert "1 boxes, 0 tied" in st.draw(empty).svg


def test_none_is_named_and_a_file_with_none_shows_the_same(command, tmp_path):
    assert st.summary(None).rows[0].part.name == st.summary(st.Dag(None)).rows[0].part.name == "None"
    assert st.summary(st.Dag("text")).rows[0].part.name == "a value without arrays"
    st.save(tmp_path / "none.safetensors", None)
    assert command("show", tmp_path / "none.safetensors")[1].partition("\n\n")[2] == f"{st.summary(None).text(120)}\n"


NO_MODELS = {
    "int": (3, "Pass a model, or an array"),
    "complex": (1j, "Pass a model, or an array"),
    "texts": (np.array(["a"]), "dtype is `<U1`"),
    "objects": (np.array([None]), "dtype is `object`"),
    "dtype class": (jnp.float32, "The class `float32`"),
    "module": (np, "A `module`"),
    "set": ({1, 2}, "sharedtree.summary(list("),
    "iterator": (iter([1]), "sharedtree.summary(list("),
    "built-in": (print, "the model or the parameters that it uses"),
    "compiled": (jax.jit(abs), "the model or the parameters that it uses"),
    "ellipsis": (..., "An `ellipsis`"),
}


@pytest.mark.parametrize(("value", "advice"), NO_MODELS.values(), ids=NO_MODELS)
def test_what_is_no_model_is_a_clear_error(value, advice):
    for show in (st.summary, st.draw):
        with pytest.raises(st.errors.UnregisteredTypeError, match=re.escape(advice)):
            show(value)


def test_what_is_no_pytree_says_what_to_do():
    class Plain:
        def __init__(self):
            self.w = jnp.ones(2)

    for value, advice in [
        (Plain(), "register_pytree_node(Plain"), (eqx.nn.Linear, "Linear(...)"), ("m.safetensors", "sharedtree show"),
        (object(), "register_pytree_node"), (lambda x: x, "the parameters that it uses"),
    ]:  # fmt: skip
        with pytest.raises(st.errors.UnregisteredTypeError, match=re.escape(advice)):
            st.summary(value)
    cycle = []
    cycle.append(cycle)
    with pytest.raises(st.errors.CycleError):
        st.summary(cycle)
    for options in ({"depth": -1}, {"lines": -1}):
        with pytest.raises(ValueError, match="at least 0"):
            st.summary([], **options)


@pytest.mark.slow
def test_a_hundred_thousand_nodes():
    arrays = [np.zeros(i % 7) for i in range(25_000)]
    table = st.summary([{"a": w, "b": [w]} for w in arrays])
    assert table.num_ties == 25_000
    assert table.nbytes == sum(w.nbytes for w in arrays)
    text = table.text()
    assert len(text.splitlines()) < 1_200
    assert "more lines; see `depth=` and `lines=`" in text
    assert len(table._repr_html_()) < 600_000
    assert len(st.summary(arrays[:7] * 3_000).rows) < 30_000


@pytest.mark.slow
def test_deep_trees_and_much_shared_ones():
    deep = jnp.ones(1)
    for _ in range(20_000):
        deep = [deep]
    table = st.summary(deep, lines=20_002)
    assert len(table.text()) < 20_000 * 1_000
    assert "(20000) [0]" in table.text()
    tower = st.summary(dags.tower(200, jnp.ones(2)))
    assert (tower.parameters, tower.num_ties) == (2, 200)
    assert tower.untied_parameters == 10**30
    assert "over 10^30 parameters" in str(tower)


@pytest.mark.parametrize("name", ["igraph", "drawsvg"])
def test_drawing_without_a_library_says_what_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    assert st.summary([1.0]).parameters == 1
    with pytest.raises(ImportError, match="sharedtree\\[show\\]") as error:
        st.draw([])
    assert "    pip install igraph drawsvg\n" in str(error.value)
