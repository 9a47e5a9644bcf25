"""Whatever is used for the first time by eight threads at once does in each what it does in one thread alone."""

import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import sharedtree as st
from tests import calls
from tests.strategies import Layer, Mutable, Pair, dags, partition
from tests.threads import at_once
from tests.transform_table import nets_in


class Wrong(BaseException):
    """Like an interrupt, no `Exception`."""


def part(model):
    return {"same": model.first, "new": st.tree.map(lambda x: x + 1, model)}


def by_shape(model):
    """Passes its argument through, or makes something new of it, or raises, as it comes."""
    size = np.size(model.first.weight)
    if size == 3:
        raise Wrong("three") if isinstance(model.second, tuple) else ValueError("three")
    return model if size == 2 else part(model)


def model_of(i):
    i %= 6
    shared = Layer(jnp.full(1 + i % 3, float(i)), None, [])
    return Pair(shared, (shared, Mutable(x=shared)) if i % 2 else [shared])


def outcome(f, model):
    try:
        result = f(model)
    except (ValueError, Wrong) as error:
        return type(error), str(error)
    found = [jax.tree.structure(st.Dag(result)), [np.asarray(x) for x in st.tree.leaves(result)]]
    passed = result.get("same") if isinstance(result, dict) else result
    return [*found, passed is model, passed is model.first]


def same(one, two):
    return jax.tree.structure(one) == jax.tree.structure(two) and all(
        map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(two))
    )


CALLS = {
    "jit": st.jit,
    "filter_jit": st.preserve_identities(eqx.filter_jit),
    "checkpoint": st.checkpoint,
    "static": lambda f: st.jit(lambda flag, model: f(model), static_argnums=0),
    "in place": st.preserve_identities(jax.jit, policy=st.Policy(in_place=True)),
    "nested": lambda f: st.jit(st.checkpoint(st.jit(f))),
}


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.slow
def test_a_cold_function_called_at_once(kind):
    flags = (None,) if kind == "static" else ()

    def calling(wrapper):
        return lambda model: wrapper(*flags, model)

    alone = [outcome(calling(CALLS[kind](by_shape)), model_of(i)) for i in range(6)]
    for _ in range(3):
        # Another function each time, so that nothing is known of it.
        cold = calling(CALLS[kind](lambda model: by_shape(model)))

        def work(i, cold=cold):
            return [outcome(cold, model_of(i + step)) for step in range(6)]

        for i, outcomes in enumerate(at_once(work)):
            for step, found in enumerate(outcomes):
                assert same(found, alone[(i + step) % 6]), (i, step)


def grown(model):
    """Looks at the ties that it is given: one array in two places of one layer in two places."""
    shared = model.first
    assert shared is model.second[0]
    assert shared.first is shared.second
    return st.tree.map(lambda w: w * 2, model)


@pytest.mark.slow
@pytest.mark.parametrize("name", calls.CALLS)
def test_first_calls_of_each_transform(name):
    def run(cold):
        w = jnp.arange(3.0)
        shared = Pair(w, w)
        nets = nets_in(calls.CALLS[name](cold, Pair(shared, [shared])))
        return jax.tree.structure(st.Dag(nets)), list(map(np.asarray, st.tree.leaves(nets)))

    structure, leaves = run(lambda m: grown(m))
    assert len(leaves) or name == "make_jaxpr"
    cold = lambda m: grown(m)  # noqa: E731 -- another function, of which nothing is known
    for found, values in at_once(lambda _: run(cold)):
        assert found == structure
        assert all(map(np.array_equal, values, leaves))


@pytest.mark.parametrize("name", calls.CALLS_IN_PLACE)
@pytest.mark.slow
def test_first_calls_in_place(name):
    """Each thread has a model of its own, and writes into that one only."""

    def work(cold):
        w = jnp.arange(3.0)[None]
        shared = Mutable(first=w, second=w)
        model = Mutable(first=shared, second=[shared], a=jnp.ones((1, 1)))
        calls.CALLS_IN_PLACE[name](cold, model)
        assert model.first is model.second[0] is shared
        assert shared.first is shared.second
        return np.asarray(shared.first).ravel()

    def cold(model):
        grown(model)
        model.first.first = model.second[0].second = model.first.first * 2 + 1
        return model.a * 2

    for values in at_once(lambda _: work(cold)):
        np.testing.assert_array_equal(values, [1, 3, 5])


@given(tree=dags())
def test_a_dag_has_one_tree_in_all_threads(tree):
    for _ in range(5):
        dag = jax.tree.map(lambda x: x, st.Dag([tree, Mutable(x=1.0)]))
        first, *others = at_once(lambda i, dag=dag: dag.tree)
        assert all(other is first for other in others)
        assert partition(first) == partition([tree, Mutable(x=1.0)])
        assert jax.tree.structure(st.Dag(first)) == jax.tree.structure(dag)


@pytest.mark.parametrize("wrap", [st.jit, st.checkpoint, st.preserve_identities(eqx.filter_jit)])
@pytest.mark.slow
def test_a_function_wrapped_and_cleared_by_many(wrap):
    model = model_of(1)

    def work(i):
        for step in range(6):
            f = wrap(part)
            assert f(model)["new"].first.weight[0] == 2
            if i % 4 == step and hasattr(f, "clear_cache"):
                f.clear_cache()

    at_once(work)


# --- a user's `==` that calls what asked for it --------------------------------------------------------------------


class Nosy:
    """Compares by number, and calls a function while it does."""

    call = staticmethod(lambda: None)
    busy = threading.local()

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        if not getattr(self.busy, "now", False):
            self.busy.now = True
            try:
                Nosy.call()
            finally:
                self.busy.now = False
        return type(other) is Nosy and self.number == other.number

    def __hash__(self):
        return 1


@pytest.mark.filterwarnings("ignore::sharedtree.RetraceWarning")
@pytest.mark.parametrize("holder", [lambda x: Layer(jnp.ones(2), x, []), lambda x: Pair((x,), jnp.ones(2))])
def test_a_comparison_may_call_the_function_that_compares(holder, monkeypatch):
    f = st.jit(lambda dag: dag.tree)
    monkeypatch.setattr(Nosy, "call", staticmethod(lambda: f(st.Dag(holder(1)))))

    def work(i):
        for step in range(6):
            f(st.Dag(holder(Nosy(step % 3))))

    for work_of_one in (lambda: at_once(work, 1), lambda: at_once(work)):
        work_of_one()
