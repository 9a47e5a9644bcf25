"""A module under one of Equinox's transforms is a module whose leaves are those of the module."""

import copy

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharedtree as st
from tests.strategies import Pair


class Layer(eqx.Module):
    weight: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return self.weight @ x + self.bias


def layer():
    return Layer(jnp.array([[0.5, -1.0], [2.0, 0.3]]), jnp.ones(2))


TRANSFORMS = [
    eqx.filter_vmap,
    eqx.filter_jit,
    eqx.filter_grad,
    eqx.filter_value_and_grad,
    eqx.filter_checkpoint,
    eqx.filter_jacfwd,
]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_its_leaves_are_those_of_the_module(transform):
    mine = layer()
    wrapped = st.preserve_identities(transform)(mine)
    assert isinstance(wrapped, eqx.Module)
    arrays = [x for x in jax.tree.leaves(wrapped) if eqx.is_array(x)]
    assert len(arrays) == 2
    assert arrays[0] is mine.weight
    assert wrapped.__wrapped__ is mine
    assert jax.tree.structure(wrapped) == jax.tree.structure(st.preserve_identities(transform)(layer()))
    Pair(wrapped, None)  # without a warning


@pytest.mark.parametrize("transform", [jax.vmap, jax.jit, jax.grad, jax.checkpoint])
def test_the_warning_for_what_is_no_module_is_that_of_equinox(transform):
    for wrapped in (transform(layer()), st.preserve_identities(transform)(layer())):
        with pytest.warns(UserWarning, match="Possibly assigning a JAX-transformed callable"):
            Pair(wrapped, None)
    Pair(st.preserve_identities(transform)(lambda x: x), None)


class Model(eqx.Module):
    layers: list
    mapped: object

    def __call__(self, x):
        return self.mapped(self.layers[0](x)[None])[0].sum()


def test_a_model_that_holds_one_is_trained_whole():
    mine = layer()
    x = jnp.array([1.0, -2.0])
    model = Model([mine], st.preserve_identities(eqx.filter_vmap)(mine))
    twin = Model([mine], eqx.filter_vmap(mine))
    gradient, parts = st.grad(lambda m: m(x))(model), eqx.filter_grad(lambda m: m(x))(twin)
    assert gradient.layers[0] is gradient.mapped.function
    want = parts.layers[0].weight + parts.mapped._fun.weight
    np.testing.assert_allclose(gradient.layers[0].weight, want, rtol=1e-6)
    tx = st.optimizer(optax.sgd(0.1))
    state = tx.init(model)

    @st.jit
    def step(model, state):
        updates, state = tx.update(st.grad(lambda m: m(x))(model), state, model)
        return st.apply_updates(model, updates), state

    for _ in range(2):
        model, state = step(model, state)
    assert model.layers[0] is model.mapped.function
    assert not np.allclose(model.layers[0].weight, mine.weight)


def test_called_it_does_what_equinox_does():
    mine, x = layer(), jnp.ones((3, 2))
    for transform, args in ((eqx.filter_vmap, (x,)), (eqx.filter_jit, (x[0],)), (eqx.filter_checkpoint, (x[0],))):
        got = st.preserve_identities(transform)(mine)(*args)
        np.testing.assert_array_equal(got, transform(mine)(*args))
    wrapped = st.preserve_identities(eqx.filter_vmap)(mine, in_axes=0)
    with pytest.raises(RuntimeError, match="keyword"):
        wrapped(x=x)
    twin = copy.deepcopy(wrapped)
    assert jax.tree.structure(twin) == jax.tree.structure(wrapped)
    assert twin.function.weight is not wrapped.function.weight
    assert "traced" in str(st.explain(wrapped, Pair(jnp.ones(2), 1.0)))


def test_a_jitted_module_is_traced_once_for_equal_structures():
    traces = []

    class Counting(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            traces.append(1)
            return self.weight * x

    for i in range(3):
        wrapped = st.preserve_identities(eqx.filter_jit)(Counting(jnp.ones(2) * i))
        assert wrapped(2.0)[0] == 2 * i
    assert len(traces) == 1
    assert "stablehlo" in wrapped.lower(2.0).as_text()
