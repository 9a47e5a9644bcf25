"""What treex wraps of Flax's Linen, against Flax itself."""

import importlib
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

if importlib.util.find_spec("treex") is None:
    pytest.skip("treex is not installed", allow_module_level=True)

from flax import linen

import sharedtree as st
from sharedtree.compat import treex as tx

# treex itself does not import it.
recurrent = importlib.import_module("treex.nn.recurrent")


class Classifier(linen.Module):
    @linen.compact
    def __call__(self, x, training):
        x = linen.Dense(4)(x)
        return linen.BatchNorm()(x, use_running_average=not training)


@pytest.mark.parametrize("go_backwards", [False, True])
def test_a_gru_is_the_cell_of_flax_step_by_step(go_backwards):
    x = jax.random.normal(jax.random.key(0), (5, 2, 3))
    gru = recurrent.GRU(4, time_axis=0, return_sequences=True, go_backwards=go_backwards).init(42, x)
    cell, state, states = linen.GRUCell(features=4), jnp.zeros((2, 4)), []
    for step in x[::-1] if go_backwards else x:
        state, _ = cell.apply({"params": gru.params}, state, step)
        states.append(state)
    np.testing.assert_allclose(gru(x), jnp.stack(states), rtol=1e-6, atol=1e-6)


def test_the_state_of_a_gru_is_made_as_treex_asks():
    gru = recurrent.GRU(4, initial_state_init=jax.nn.initializers.ones).init(42, jnp.ones((1, 2, 3)))
    np.testing.assert_array_equal(gru.initialize_state((2, 5)), jnp.ones((2, 5, 4)))


def test_the_cell_of_flax_is_what_it_was():
    with pytest.raises(TypeError, match="features"):
        linen.GRUCell()
    assert recurrent.flax_module.GRUCell is not linen.GRUCell


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_variables_of_the_user_are_left_alone(is_frozen):
    x = jnp.arange(6.0).reshape(2, 3)
    variables = Classifier().init(jax.random.key(0), x, training=False)
    if is_frozen:
        variables = linen.FrozenDict(variables)
    before = {name: jax.tree.map(np.array, dict(part)) for name, part in variables.items()}
    module = tx.FlaxModule(Classifier(), variables=variables).init(42, tx.Inputs(x))
    for _ in range(2):
        module(x)
    assert {name: jax.tree.structure(dict(part)) for name, part in variables.items()} == {
        name: jax.tree.structure(part) for name, part in before.items()
    }
    for mine, theirs in zip(jax.tree.leaves(dict(variables)), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    expected, updated = Classifier().apply(variables, x, training=True, mutable=["batch_stats"])
    _, updated = Classifier().apply({**variables, **updated}, x, training=True, mutable=["batch_stats"])
    np.testing.assert_allclose(module(x), expected, rtol=1e-6)
    fresh = tx.FlaxModule(Classifier(), variables=variables).init(42, tx.Inputs(x))
    fresh(x), fresh(x)
    for mine, theirs in zip(jax.tree.leaves(fresh.batch_stats_), jax.tree.leaves(updated["batch_stats"]), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    frozen = Classifier().apply({"params": fresh.params_, "batch_stats": fresh.batch_stats_}, x, training=False)
    np.testing.assert_allclose(fresh.eval()(x), frozen, rtol=1e-6)
    both = st.jit(lambda both, x: (both["a"](x), both)[1])({"a": fresh, "b": fresh}, x)
    assert both["a"] is both["b"]
