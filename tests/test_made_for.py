"""Programs, compiled or exported, that are called with other arguments than those that they were made for."""

import gc
import re
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import sharedtree as st
from tests.strategies import Mutable, Pair

W = jnp.arange(2.0)
TIED, UNTIED = Pair(W, W), Pair(W, W + 0)
filter_jit = st.preserve_identities(eqx.filter_jit)


def difference(call, *args, **kwargs):
    """The differences that the error lists, and its paths."""
    with pytest.raises(st.SharingMismatchError, match="cannot be traced again") as error:
        call(*args, **kwargs)
    return re.findall("(?m)^    (`.*)$", str(error.value)), error.value.paths


@pytest.mark.parametrize("jit", [st.jit, filter_jit])
def test_ties(jit):
    for first, second, were, are in ((TIED, UNTIED, "one object", "two"), (UNTIED, TIED, "two objects", "one")):
        compiled = jit(lambda model: model.first + model.second).lower(first).compile()
        words = f"`model.first` and `model.second` were {were}, and are {are}"
        assert difference(compiled, second) == ([words], ("model.first", "model.second"))
        assert compiled(first).tolist() == [0, 2]


def test_a_tied_module_is_one_difference():
    f = st.jit(lambda nets: nets[0].first)
    assert difference(f.lower((TIED,)).compile(), (st.Dag((TIED, TIED)),))[0] == [
        "`nets[0]` was a `Pair` with 2 children, and is a `Dag` with 1 children"
    ]
    class_of_two = Pair(TIED, TIED)
    found, paths = difference(
        st.jit(lambda net: net.first.first).lower(class_of_two).compile(), Pair(TIED, Pair(W + 0, W + 1))
    )
    assert found[0] == "`net.first` and `net.second` were one object, and are two"
    assert all("`net.first.first` and `net.second" not in line for line in found)
    assert paths[:2] == ("net.first", "net.second")


def test_in_a_dag():
    v = W + 1
    compiled = st.jit(lambda dag: dag.tree["x"]).lower(st.Dag({"x": W, "y": W, "z": v})).compile()
    assert difference(compiled, st.Dag({"x": W, "y": v, "z": v}))[0] == [
        "`dag.tree['x']` and `dag.tree['y']` were one object, and are two",
        "`dag.tree['y']` and `dag.tree['z']` were two objects, and are one",
    ]
    assert difference(compiled, st.Dag({"x": W, "y": W + 2, "z": v}))[0] == [
        "`dag.tree['x']` and `dag.tree['y']` were one object, and are two"
    ]
    assert difference(compiled, st.Dag({"x": W, "y": W}))[1] == ("dag.tree",)


def test_static_arguments_are_not_counted():
    compiled = st.jit(lambda n, model: n * model.first, static_argnums=0).lower(3, TIED).compile()
    assert difference(compiled, UNTIED)[1] == ("model.first", "model.second")

    class Holder:
        @st.preserve_identities(jax.jit, static_argnums=(0, 1))
        def method(self, n, model):
            return n * model.first

    assert difference(Holder.method.lower(Holder(), 3, TIED).compile(), UNTIED)[1] == ("model.first", "model.second")


def test_a_keyword_that_is_called_as_a_positional_argument():
    def f(m, /, **others):
        return m.first + others["m"].first

    compiled = filter_jit(f).lower(TIED, m=TIED).compile()
    assert difference(compiled, TIED, m=UNTIED)[0]
    assert compiled(TIED, m=TIED).tolist() == [0, 2]


def test_static_values():
    class Scaled(eqx.Module):
        a: jax.Array
        n: int

    for jit in (st.jit, filter_jit):
        compiled = jit(lambda net: net.a * net.n).lower(Scaled(W, 1)).compile()
        assert difference(compiled, Scaled(W, 2)) == (
            ["`net.n` was the static value 1, and is the static value 2"],
            ("net.n",),
        )


@pytest.mark.parametrize("name", ["lower", "trace"])
@pytest.mark.parametrize("options", [{}, {"in_place": True}, {"static_argnums": 1}])
def test_a_program_keeps_no_argument_alive(name, options):
    weight = W + 1
    model, alive = Pair(weight, weight), weakref.ref(weight)
    stage = getattr(st.jit(lambda m, n: 2 * m.first, **options), name)(model, 1)
    program = stage.compile() if name == "lower" else stage.lower().compile()
    del model, weight, stage  # what JAX 0.8 has traced keeps its arguments
    gc.collect()
    assert alive() is None
    assert program(TIED, *([] if "static_argnums" in options else [1])).tolist() == [0, 2]


def test_many_prefixes_are_translated_in_linear_work():
    flattened = []

    class Counted(Mutable):
        def tree_flatten(self):
            flattened.append(self)
            return super().tree_flatten()

    jax.tree_util.register_pytree_node_class(Counted)
    counts = []
    for n in (5, 20):
        models = [Counted(a=jnp.ones((2, 2)), b=jnp.ones((2, 2))) for _ in range(n)]
        flattened.clear()
        st.vmap(lambda *models: models[0].a, in_axes=tuple([Counted(a=0, b=1) for _ in models]))(*models)
        counts.append(len(flattened))
    assert 0 < counts[1] <= 4 * counts[0]
