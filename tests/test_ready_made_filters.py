"""`st.filter_…` is `eqx.filter_…`, with one array for a tied one: against Equinox on a model that holds it once."""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import sharedtree as st
from sharedtree.transforms import _signatures

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


@pytest.mark.parametrize(
    ("vanilla", "told"),
    [
        (jax.jit, _signatures.Compiling),
        (eqx.filter_jit, _signatures.FilterCompiling),
        (jax.checkpoint, _signatures.Rematerialising),
        (eqx.filter_checkpoint, _signatures.Rematerialising),
        *[(t, _signatures.Argnums) for t in (jax.grad, jax.value_and_grad, jax.jacfwd, jax.jacrev, jax.hessian)],
        *[(t, _signatures.Argnums) for t in (eqx.filter_grad, eqx.filter_value_and_grad)],
        (jax.vmap, _signatures.Vectorising),
        (eqx.filter_vmap, _signatures.Vectorising),
        (jax.pmap, _signatures.Parallelising),
        (jax.shard_map, _signatures.Sharding),
        (jax.make_jaxpr, _signatures.Tracing),
        (jax.lax.scan, _signatures.Scanning),
    ],
)
def test_type_checkers_know_all_options(vanilla, told):
    _, *options = inspect.signature(vanilla).parameters.values()
    names = {each.name for each in options if each.kind is not each.VAR_KEYWORD}
    assert names <= told.__annotations__.keys() | inspect.signature(st.scan).parameters.keys()
