"""`summary` tells parameters from state and from the state of optimizers: in rows, in totals, and in files."""

import html.parser
import importlib
import re
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given

import sharedtree as st
from tests import strategies as dags

from .models import counted, language_model
from .tables import table_of_file


def size(tree):
    """Numbers of all arrays in a tree, each path counted."""
    return sum(np.size(leaf) for leaf in jax.tree.leaves(tree))


def nbytes(tree):
    """Bytes of all arrays in a tree, each path counted."""
    return sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree))


def uses(table):
    """The three counts of a table."""
    return table.parameters, table.state, table.optimizer_state


def last_lines(table):
    """The lines below a table, each split into its words."""
    return [line.split() for line in table.text().partition("\n\n")[2].splitlines()]


class Normalised(eqx.Module):
    layer: eqx.nn.Linear
    norm: eqx.nn.BatchNorm


def equinox_model():
    """A model with a batch norm, and its state."""
    make = lambda: Normalised(
        eqx.nn.Linear(3, 4, key=jax.random.key(0)), eqx.nn.BatchNorm(4, axis_name="batch", mode="ema")
    )
    return eqx.nn.make_with_state(make)()


def test_an_equinox_state_is_no_parameter():
    model, state = equinox_model()
    table = st.summary((model, state))
    parameters = eqx.filter(model, eqx.is_inexact_array)
    assert uses(table) == (size(parameters), size(state), 0)
    assert last_lines(table) == [
        ["parameters", f"{size(parameters)},", str(nbytes(parameters)), "bytes"],
        ["state", f"{size(state)},", str(nbytes(state)), "bytes"],
        ["total", str(nbytes(parameters) + nbytes(state)), "bytes"],
    ]
    assert st.summary(model).text().splitlines()[0].split() == [
        "path",
        "class",
        "shape",
        "dtype",
        "parameters",
        "bytes",
    ]


def nnx_model():
    """A model of NNX with statistics and a random stream, and its optimizer."""
    nnx = pytest.importorskip("flax.nnx")
    from .nnx_net import net

    model = net()
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def test_nnx_has_columns_for_state_and_for_the_optimizer():
    nnx = pytest.importorskip("flax.nnx")
    model, optimizer = nnx_model()
    rows = {row.path: row for row in st.summary((model, optimizer)).rows}
    parameters = size(nnx.state(model, nnx.Param))
    # Two statistics of two numbers; a key and a count.
    assert uses(st.summary(model)) == (parameters, 2 * 2 + 2, 0)
    assert rows["[0].norm.mean"].size == (0, 8, 2, 0)
    assert rows["[0].norm"].size == (4, 32, 4, 0)
    # NNX's optimizer has two moments of each parameter, a count and a step.
    assert rows["[1]"].size == (0, nbytes(nnx.state(optimizer)), 0, 2 * parameters + 2)
    assert rows[""].size[2:] == (6, 2 * parameters + 2)
    assert st.count_parameters((model, optimizer)) == parameters


def linen_state(cls=None):
    """Flax's `TrainState` for a Linen model with a batch norm, whose statistics are a field of a subclass."""
    nn = pytest.importorskip("flax.linen")
    train_state = pytest.importorskip("flax.training.train_state")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(nn.BatchNorm(use_running_average=True)(nn.Dense(4)(x)))

    # A class of this module, as files need it.
    global WithStatistics

    class WithStatistics(cls or train_state.TrainState):
        batch_stats: object = None

    WithStatistics.__qualname__ = "WithStatistics"
    model = Model()
    variables = model.init(jax.random.key(0), jnp.ones((1, 3)))
    # Without its functions, as files are saved.
    return WithStatistics.create(apply_fn=None, tx=optax.adamw(1e-3), **variables)


@pytest.mark.parametrize("kind", ["Flax", "sharedtree"])
def test_the_parameters_of_a_train_state_are_those_of_its_params(kind):
    pytest.importorskip("flax.linen")
    from sharedtree.linen import TrainState

    state = linen_state(TrainState if kind == "sharedtree" else None)
    table = st.summary(state)
    # The number of steps is state, too.
    assert uses(table) == (size(state.params), size(state.batch_stats) + 1, size(state.opt_state))
    assert st.count_parameters(state) == size(state.params)
    assert ["optimizer", f"{size(state.opt_state)},", str(nbytes(state.opt_state)), "bytes"] in last_lines(table)


def test_a_file_says_the_same_of_a_train_state():
    state = linen_state().replace(step=jnp.int32(3))
    data = st.to_bytes(state, leave_out=["apply_fn", "tx"])
    assert uses(table_of_file(data)) == uses(st.summary(state))
    assert last_lines(table_of_file(data)) == last_lines(st.summary(state))


def test_the_names_of_its_fields_make_no_train_state_of_a_dict():
    table = st.summary({"step": jnp.ones(2), "params": jnp.ones(3), "opt_state": jnp.ones(4)})
    assert uses(table) == (9, 0, 0)


@pytest.mark.parametrize("make", [equinox_model, nnx_model])
def test_a_file_of_a_training_says_the_same(make):
    model, state = make()
    tree = {"model": model, "state": getattr(state, "opt_state", state), "masks": jnp.ones(3, bool)}
    table = table_of_file(st.to_bytes(tree))
    assert table.text() == st.summary(tree).text()
    assert table.state > 0
    assert ["other", "3,", "3", "bytes"] in last_lines(table)


@given(dags.dags())
def test_the_state_of_an_optimizer_adds_no_parameters(tree):
    moments = optax.ScaleByAdamState(jnp.zeros((), jnp.int32), tree, [jnp.ones(2)])
    table = st.summary({"moments": moments, "more": jnp.ones(2)})
    assert table.parameters == 2 == st.count_parameters([moments, jnp.ones(2)])
    assert table.nbytes == counted({"moments": tree}, unique=True)[1] + 4 + 8 + 8
    # What is also outside the state is a parameter.
    both = st.summary({"model": tree, "moments": moments})
    assert both.parameters == counted(tree, unique=True)[0]
    assert both.untied_parameters >= both.parameters


def classes_of_optax():
    """All namedtuples that optax has."""
    for package in ("optax.contrib", "optax.experimental"):
        importlib.import_module(package)
    classes = {}
    for name, module in list(sys.modules.items()):
        for value in list(vars(module).values()) if name.split(".")[0] == "optax" else ():
            if isinstance(value, type) and issubclass(value, tuple) and value.__module__.startswith("optax."):
                classes[value.__name__] = value
    return classes


# Namedtuples of optax that are no states, or parts of one only.
NO_STATES = {
    "Aggregator", "Aux", "BacktrackingLinesearchInfo", "GaLoreDimensionNumbers", "GradientTransformation",
    "GradientTransformationExtraArgs", "LookaheadParams", "MaskedNode", "MuonDimensionNumbers",
    "SplitRealAndImaginaryArrays", "ZoomLinesearchInfo",
}  # fmt: skip


def test_every_state_of_optax_is_known():
    classes = classes_of_optax()
    assert len(classes) > 50
    for name, cls in classes.items():
        if cls._fields:
            obj = cls(*[jnp.ones(2) for _ in cls._fields])
            numbers = 2 * len(cls._fields)
            expected = (numbers, 0, 0) if name in NO_STATES else (0, 0, numbers)
            assert uses(st.summary(obj)) == expected, name


def test_an_optimizer_leaves_the_state_of_another_alone():
    tree = {"w": jnp.ones(2), "moments": optax.TraceState(jnp.ones(2))}
    tx = st.optimizer(optax.sgd(1.0))
    updates, _ = tx.update({"w": jnp.ones(2), "moments": optax.TraceState(jnp.ones(2))}, tx.init(tree), tree)
    updated = st.apply_updates(tree, updates)
    assert updated["w"].tolist() == [0, 0]
    assert updated["moments"].trace.tolist() == [1, 1]


def training():
    """A language model of 24 equal blocks with a tied head, and the state of Adam."""
    model = language_model(24)
    return {"model": model, "state": st.optimizer(optax.adam(1e-3)).init(model)}


def test_a_folded_row_has_the_numbers_of_each():
    model = language_model(24)
    table = st.summary(model)
    rows = {row.path: row for row in table.rows}
    block = eqx.filter(model.blocks[0], eqx.is_array)
    # In a block, the first two layers are one object.
    one = size(block) - size(block.attention[0])
    assert rows[".blocks[0..23]"].size.parameters == one
    # All blocks hold one mask.
    assert rows[".blocks"].size.parameters == 24 * (one - 4) + 4
    (line,) = [line for line in table.text().splitlines() if "×24 each" in line and "Block" in line]
    assert line.split() == ["[0..23]", "×24", "each", "Block", str(one), str(4 * one)]
    assert "×N each  N equal neighbours" in table.text()
    assert "<strong>×N each</strong> N equal neighbours" in table._repr_html_()
    # What has no numbers has nothing for each.
    text = st.summary({"layers": [eqx.nn.Identity() for _ in range(3)], "w": jnp.ones(2)}).text()
    assert "[0..2] ×3  Identity" in text
    assert "each" not in text
    # Neither is it explained where no row says it.
    assert "each" not in st.summary(model, depth=1).text().replace("each counted once", "").replace("each place", "")


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_columns_fit_a_terminal(width):
    for tree in (training(), nnx_model(), linen_state()):
        lines = st.summary(tree).text(width).splitlines()
        assert max(map(len, lines)) <= width
        heads = lines[0].split()
        assert {"path", "parameters"} <= set(heads)
        assert ("optimizer" in heads) >= (width == 160)
        totals = " ".join(lines)
        assert "optimizer" in totals
        assert "each place had its own" in " ".join(totals.split()) or "untied" not in totals


class Cells(html.parser.HTMLParser):
    """Heads of a table, and the number of cells in each of its rows."""

    def __init__(self, text):
        super().__init__()
        self.tag, self.heads, self.rows, self.names, self.links = "", [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tag = tag
        if tag == "tr":
            self.rows.append(0)
        if tag == "td":
            self.rows[-1] += 1
        self.names += [value for name, value in attrs if name == "id"]
        self.links += [value.removeprefix("#") for name, value in attrs if name == "href"]

    def handle_data(self, data):
        if self.tag == "th":
            self.heads.append(data)


def test_html_has_the_columns_that_are_not_empty():
    common = ["class", "shape", "dtype", "parameters"]
    # Ties stand in the second column, which is in view on a narrow page.
    for tree, ties, uses in [
        (language_model(3), ["tie"], []),
        (equinox_model(), [], ["state"]),
        (training(), ["tie"], ["optimizer"]),
        (linen_state(), [], ["state", "optimizer"]),
    ]:
        cells = Cells(st.summary(tree)._repr_html_())
        assert cells.heads == ["path", *ties, *common, *uses, "bytes"]
        assert set(cells.rows[1:]) == {len(cells.heads)}


def test_two_tables_of_one_structure_in_a_page_have_links_of_their_own():
    pages = [Cells(st.summary(language_model(3))._repr_html_()) for _ in range(2)]
    pages.append(Cells(st.summary(language_model(3))._repr_html_()))
    names = [name for page in pages for name in page.names]
    assert len(names) == len(set(names)) > 0
    for page in pages:
        assert set(page.links) <= set(page.names)


def test_two_drawings_in_a_page_refer_to_nothing_in_each_other():
    pytest.importorskip("igraph")
    pytest.importorskip("drawsvg")
    cells = Cells(st.draw(language_model(3))._repr_html_())
    assert (cells.names, cells.links) == ([], [])
    assert "url(#" not in st.draw(language_model(3)).svg


def test_the_style_outranks_that_of_a_notebook_for_all_tables():
    style = re.search("<style>(.*?)</style>", st.summary(language_model(1))._repr_html_(), re.DOTALL)[1]
    selectors = [selector for rule in re.findall(r"([^{}]+)\{", style) for selector in re.split(r",(?![^(]*\))", rule)]
    assert len(selectors) > 10
    # As strong as a selector with an id. That of JupyterLab has two classes and an element.
    strong = ":is(.sharedtree-summary,#sharedtree-none)"
    assert [selector for selector in selectors if not selector.strip().startswith(strong)] == []
    assert "sharedtree-none" not in st.summary(language_model(1))._repr_html_().replace(style, "")
