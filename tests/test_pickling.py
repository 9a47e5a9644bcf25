"""Structures, treedefs and `Dag`s that are pickled, here and in another process; wrapped functions that are copied."""

import concurrent.futures
import copy
import functools
import multiprocessing
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.experimental import serialize_executable

import sharedtree as st
from sharedtree.ties._policy_and_context import pack_alone
from tests.deep import lists
from tests.strategies import Layer, Mutable, Pair, Point, dags, partition


class Titled(dict):
    """A dictionary that its author has registered."""


jax.tree_util.register_pytree_node(
    Titled, lambda d: (tuple(d.values()), tuple(d)), lambda keys, values: Titled(zip(keys, values, strict=True))
)


class Unknown:
    """Registered in one test only."""

    def __init__(self, x):
        self.x = x


class Net(eqx.Module):
    embed: jax.Array
    head: jax.Array
    parts: list
    activation: object = eqx.field(static=True)

    def __call__(self, x):
        return (self.embed * self.head).sum() * x


def tied(value=1.0):
    w = jnp.full(3, value)
    box = [w, Point(w, 2), Titled(a=w)]
    return Net(w, w, [box, box], functools.partial(jnp.sum, axis=0))


def there_and_back(obj):
    return pickle.loads(pickle.dumps(obj))


# --- structures --------------------------------------------------------------------------------------------------


@given(tree=dags())
def test_a_structure_arrives_as_itself(tree):
    structure = pack_alone(tree)[1]
    assert there_and_back(structure) is structure
    assert copy.copy(structure) is copy.deepcopy(structure) is structure
    treedef = jax.tree.structure(st.Dag(tree))
    assert there_and_back(treedef) == treedef


@given(tree=dags())
def test_a_dag_arrives_with_its_ties(tree):
    dag = st.Dag(tree)
    twin = there_and_back(dag)
    assert twin.structure is dag.structure
    assert partition(twin.tree) == partition(tree)
    assert there_and_back([dag, dag])[0].tree is not dag.tree


def test_structures_of_one_context_arrive_together():
    shared = [jnp.ones(2)]
    with st.Context():
        trees = [st.tree.flatten({"a": shared}), st.tree.flatten({"b": shared})]
    with st.Context():
        one, two = (st.tree.unflatten(structure, leaves) for leaves, structure in there_and_back(trees))
    assert one["a"] is two["b"]


def test_a_deep_structure_is_pickled_without_recursion():
    structure = pack_alone(lists(5_000, jnp.ones(2)))[1]
    assert there_and_back(structure) is structure


def test_a_class_that_is_not_registered_where_it_arrives(monkeypatch):
    from sharedtree.core import _node_types

    st.register_node(Unknown, lambda u: ((u.x,), None), lambda aux, children: Unknown(*children))
    text = pickle.dumps(pack_alone(Unknown(jnp.ones(2)))[1])
    monkeypatch.delitem(_node_types.node_types_by_class, Unknown)
    with pytest.raises(st.errors.UnregisteredTypeError, match="`Unknown` was a pytree node where this was pickled"):
        pickle.loads(text)


# --- in another process ------------------------------------------------------------------------------------------


def doubled(dag):
    model = dag.tree
    assert model.embed is model.head
    assert model.parts[0] is model.parts[1]
    assert model.embed is model.parts[0][2]["a"]
    assert st.Dag(model).structure is dag.structure
    return jax.tree.map(lambda x: 2 * x, dag)


def loaded(payload, treedefs, dag):
    compiled = serialize_executable.deserialize_and_load(payload, *pickle.loads(treedefs))
    return st.Dag(compiled(dag).tree)


@pytest.mark.slow
def test_dags_and_executables_cross_into_a_spawned_process():
    dag = st.Dag(tied())
    double = jax.jit(lambda d: jax.tree.map(lambda x: 2 * x, d))
    payload, *treedefs = serialize_executable.serialize(double.lower(dag).compile())
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        there = pool.submit(doubled, dag).result(), pool.submit(loaded, payload, pickle.dumps(treedefs), dag).result()
    for twin in there:
        assert twin.structure is dag.structure
        assert twin.tree.embed is twin.tree.parts[1][0]
        np.testing.assert_array_equal(twin.tree.embed, np.full(3, 2.0))


# --- wrapped functions -------------------------------------------------------------------------------------------


def scaled(model, x=1.0):
    return st.tree.map(lambda leaf: leaf * x, model)


def first(model):
    return model.first.sum()


@st.jit
def decorated(model):
    return model.first


WRAPPERS = [st.jit, st.grad, st.vmap, st.checkpoint, st.preserve_identities(eqx.filter_jit)]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_wrapped_functions_are_copied(wrap):
    f = wrap(first if wrap is st.grad else scaled)
    model = Pair(jnp.ones(2), jnp.ones(2))
    want = f(model)
    for copied in (copy.copy(f), copy.deepcopy(f), there_and_back(f)):
        got = copied(model)
        assert jax.tree.structure(st.Dag(got)) == jax.tree.structure(st.Dag(want))
        np.testing.assert_array_equal(got.first, want.first)
        assert copied.__name__ == f.__name__


def counted(model):
    model.count = model.count + 1


@pytest.mark.parametrize("wrap", [st.jit, st.vmap, st.checkpoint])
def test_what_is_wrapped_in_place_stays_so(wrap):
    f = wrap(counted, in_place=True)
    for copied in (f, copy.copy(f), copy.deepcopy(f), there_and_back(f)):
        model = Mutable(count=jnp.zeros(2))
        copied(model)
        assert model.count.tolist() == [1, 1]


def test_a_deep_copy_is_as_of_a_function():
    f = st.jit(scaled)
    assert copy.deepcopy(f) is f

    class Counter:
        def __init__(self):
            self.weights = [1.0]

        def __call__(self, x):
            return x * self.weights[0]

    counter = Counter()
    twin = copy.deepcopy(st.jit(counter))
    counter.weights[0] = 5.0
    assert float(twin(1.0)) == 1.0
    assert twin.__wrapped__ is not counter
    layer = eqx.nn.LayerNorm(2)
    twin = copy.deepcopy(st.preserve_identities(eqx.filter_jit)(layer))
    np.testing.assert_array_equal(twin(jnp.ones(2)), layer(jnp.ones(2)))


def test_a_decorated_function_is_pickled_by_its_name():
    assert there_and_back(decorated) is decorated


def test_models_that_hold_wrapped_functions():
    traces = []

    def activate(x):
        traces.append(1)
        return x + 1

    model = Layer(jnp.ones(2), st.jit(activate), ())
    step = st.jit(lambda m: m.activation(m.weight))
    for twin in (model, copy.copy(model), copy.deepcopy(model), st.untie(model)):
        np.testing.assert_array_equal(step(twin), [2.0, 2.0])
        np.testing.assert_array_equal(twin.activation(twin.weight), [2.0, 2.0])
    assert len(traces) == 1
