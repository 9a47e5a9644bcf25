"""`st.filter_…` is `eqx.filter_…`, with one array for a tied one: against Equinox on a model that holds it once."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import sharedtree as st

ONCE = st.Dag({"a": jnp.arange(3.0)})
TIED = st.Dag({"a": ONCE.tree["a"], "b": ONCE.tree["a"]})


def product(dag, name="text"):
    assert name == "text"
    return dag.tree["a"] * dag.tree.get("b", dag.tree["a"])


def total(dag, name="text"):
    return product(dag, name).sum()


CALLS = {
    "filter_jit": lambda transform, dag: transform(product)(dag, "text"),
    "filter_grad": lambda transform, dag: transform(total)(dag, "text"),
    "filter_value_and_grad": lambda transform, dag: transform(total)(dag, name="text"),
    "filter_vmap": lambda transform, dag: transform(product)(dag),
    "filter_checkpoint": lambda transform, dag: eqx.filter_jit(transform(product))(dag, "text"),
    "filter_vjp": lambda transform, dag: transform(product, dag)[1](jnp.ones(3)),
    "filter_jvp": lambda transform, dag: transform(product, (dag,), (dag,)),
    "filter_eval_shape": lambda transform, dag: transform(product, dag, "text"),
}


@pytest.mark.parametrize("name", CALLS)
def test_as_equinox_on_one_copy(name):
    want = CALLS[name](getattr(eqx, name), ONCE)
    found = CALLS[name](getattr(st, name), TIED)
    each = zip(st.tree.leaves(want), st.tree.leaves(found), strict=True)
    assert all(eqx.tree_equal(one, other) for one, other in each)
    assert jax.tree.structure(want).num_leaves in (1, 2)
