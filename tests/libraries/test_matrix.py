"""Each cell of the page of libraries, run."""

import importlib.metadata

import jax
import optax
import pytest
from packaging.version import Version

import sharedtree as st
from tests.libraries import matrix

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def model_of(library):
    try:
        version = importlib.metadata.version(library.distribution)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{library.distribution} is not installed")
    if Version(version) < Version(library.since):
        pytest.skip(f"{library.distribution} {version} is older than {library.since}")
    return matrix.Model(library)


# Made of Equinox's modules, as the row of Equinox is.
COMPILE_LONG = ("diffrax", "optimistix", "lineax", "distreqx", "quax")


EACH = [pytest.param(each, marks=pytest.mark.slow) if each.file in COMPILE_LONG else each for each in matrix.LIBRARIES]


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("column", matrix.COLUMNS)
@pytest.mark.parametrize("library", EACH, ids=lambda library: library.file)
def test_cell(library, column):
    model = model_of(library)
    if column == "in place" and model.change is None:
        pytest.skip("its objects cannot be changed")
    if (library.file, column) in matrix.UNMET:
        error, _ = matrix.UNMET[library.file, column]
        with pytest.raises(error):
            matrix.COLUMNS[column](model)
    else:
        matrix.COLUMNS[column](model)


@pytest.mark.parametrize("library", EACH, ids=lambda library: library.file)
def test_the_page_says_so(library):
    model_of(library)
    rows = [line.split(" | ") for line in matrix.PAGE.read_text(encoding="utf-8").splitlines()]
    (row,) = [row for row in rows if row[0] == f"| {library.title}"]
    assert [each.rstrip(" |") for each in row[2:]] == [matrix.cell(library, column) for column in matrix.COLUMNS]


def named(file):
    return model_of(next(library for library in matrix.LIBRARIES if library.file == file))


def test_a_dag_of_distributions_is_trained():
    model = named("distrax")
    tx = optax.adam(0.1)
    dag, params = st.Dag(model.new()), model.params
    gradient = jax.grad(lambda dag: model.loss(dag.tree, matrix.X))(dag)
    updates, _ = tx.update(gradient, tx.init(dag), dag)
    want, _ = tx.update(jax.grad(model.single)(params, matrix.X), tx.init(params), params)
    trained = optax.apply_updates(dag, updates).tree
    assert model.is_tied(trained)
    assert matrix.same(model.arrays(trained), optax.apply_updates(params, want)[:2])


def test_a_train_state_is_saved_without_its_transformation(tmp_path):
    model = named("flax_train_state")
    state = model.new()
    st.save(tmp_path / "state.safetensors", state.replace(tx=None))
    loaded = st.load(tmp_path / "state.safetensors").replace(tx=state.tx)
    assert model.is_tied(loaded)
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
