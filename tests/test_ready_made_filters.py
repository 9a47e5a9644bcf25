"""`st.filter_…` is `eqx.filter_…`, with one array for a tied one: against Equinox on a model that holds it once."""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import sharedtree as st

ONCE = st.Dag({"a": jnp.arange(3.0)})
TIED = st.Dag({"a": ONCE.tree["a"], "b": ONCE.tree["a"]})


def product(dag, text="text"):
    assert text == "text"
    return dag.tree["a"] * dag.tree.get("b", dag.tree["a"])


CALLS = {
    **dict.fromkeys(["filter_jit", "filter_checkpoint"], lambda transform, dag: transform(product)(dag)),
    "filter_vmap": lambda transform, dag: transform(lambda dag: (product(dag), 1), out_axes=(0, 0))(dag),
    "filter_grad": lambda transform, dag: transform(lambda *args: product(*args).sum())(dag, "text"),
    "filter_value_and_grad": lambda transform, dag: transform(lambda *args: product(*args).sum())(dag, "text"),
    "filter_vjp": lambda transform, dag: transform(product, dag)[1](jnp.ones(3)),
    "filter_jvp": lambda transform, dag: transform(product, (dag,), (dag,)),
    "filter_eval_shape": lambda transform, dag: transform(product, dag, "text"),
}


@pytest.mark.parametrize("name", CALLS)
def test_as_equinox_on_one_copy(name):
    want, found = CALLS[name](getattr(eqx, name), ONCE), CALLS[name](getattr(st, name), TIED)
    assert eqx.tree_equal(st.tree.leaves(want), st.tree.leaves(found))


@pytest.mark.parametrize(("name", "vanilla"), [("jit", jax.jit), ("grad", jax.grad), ("filter_vmap", eqx.filter_vmap)])
def test_what_help_shows(name, vanilla):
    ours, (_, *options) = inspect.signature(getattr(st, name)).parameters, inspect.signature(vanilla).parameters
    added = {"function", "policy", "in_place"} | ({"wrt"} if name == "grad" else set())
    assert ours.keys() == {*options, *added}
    doc = inspect.getdoc(getattr(st, name))
    assert all(part in doc for part in ("Args:", "Example:", "See `preserve_identities`"))
