"""The table for moving on to Equinox, in docs/treex.md: each pair computes the same, or holds the same."""

import importlib.util

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharedtree as st

if importlib.util.find_spec("treex") is None or importlib.util.find_spec("treeo") is None:
    pytest.skip("treex is not installed", allow_module_level=True)

from sharedtree.compat import treex as tx

X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
KEY = jax.random.key(0)


def ported(layer, linear):
    """An `eqx.nn.Linear` with the weights of a `tx.Linear`."""
    return st.tree.at(lambda layer: (layer.weight, layer.bias), layer, (linear.kernel.T, linear.bias))


def check(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_linear():
    theirs = tx.Linear(4).init(0, X)
    ours = ported(eqx.nn.Linear(3, 4, key=KEY), theirs)
    assert theirs.kernel.shape == ours.weight.shape[::-1]
    check(jax.vmap(ours)(X), theirs(X))


def test_conv():
    x = np.random.default_rng(1).normal(size=(2, 7, 3)).astype(np.float32)
    theirs = tx.Conv(4, (3,)).init(0, x)
    ours = eqx.nn.Conv1d(3, 4, 3, padding="SAME", key=KEY)
    # Spatial axes, in, out; and out, in, spatial axes. Equinox has channels first.
    weights = (theirs.kernel.transpose(2, 1, 0), theirs.bias[:, None])
    ours = st.tree.at(lambda conv: (conv.weight, conv.bias), ours, weights)
    check(jax.vmap(ours)(x.transpose(0, 2, 1)).transpose(0, 2, 1), theirs(x))


def test_embed():
    theirs = tx.Embed(5, 3).init(0, np.array([1]))
    ours = st.tree.at(lambda embed: embed.weight, eqx.nn.Embedding(5, 3, key=KEY), theirs.embedding)
    check(jax.vmap(ours)(np.array([4, 0])), theirs(np.array([4, 0])))


def test_layer_norm():
    check(jax.vmap(eqx.nn.LayerNorm(3))(X), tx.LayerNorm().init(0, X)(X))


def test_mlp():
    theirs = tx.MLP([4, 4, 2]).init(0, X)
    ours = eqx.nn.MLP(3, 2, 4, depth=2, key=KEY)
    layers = [ported(layer, getattr(theirs, name)) for layer, name in zip(ours.layers, theirs._subtrees, strict=True)]
    ours = st.tree.at(lambda mlp: mlp.layers, ours, tuple(layers))
    check(jax.vmap(ours)(X), theirs(X))


def test_sequential():
    theirs = tx.Sequential(tx.Linear(3), jnp.tanh, tx.Linear(2)).init(0, X)
    first, last = eqx.nn.Linear(3, 3, key=KEY), eqx.nn.Linear(3, 2, key=KEY)
    ours = eqx.nn.Sequential([ported(first, theirs.layers[0]), eqx.nn.Lambda(jnp.tanh), ported(last, theirs.layers[2])])
    check(jax.vmap(ours)(X), theirs(X))


def test_batch_norm_and_modes():
    theirs = tx.BatchNorm(momentum=0.5, epsilon=1e-5).init(0, X).train()
    ours, state = st.make_with_state(eqx.nn.BatchNorm)(3, "batch", momentum=0.5, eps=1e-5, mode="batch")
    y, state = jax.vmap(ours, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(X, state)
    check(y, theirs(X))
    evaluating = st.inference_mode(ours)
    assert evaluating.inference
    assert not theirs.eval().training
    assert jax.vmap(evaluating, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(X, state)[0].shape == X.shape


def test_dropout():
    theirs = tx.Dropout(0.5).init(0)
    ours = eqx.nn.Dropout(0.5)
    check(st.inference_mode(ours)(X), theirs.eval()(X))
    for kept in (ours(X, key=KEY), theirs(X)):
        assert all(
            np.isclose(each, 0) or np.isclose(each, 2 * x) for each, x in zip(kept.ravel(), X.ravel(), strict=True)
        )


def test_edits_and_gradients():
    theirs = tx.Linear(2).init(0, X)
    ours = ported(eqx.nn.Linear(3, 2, key=KEY), theirs)
    params, rest = st.tree.partition(ours, eqx.is_inexact_array)
    whole = st.tree.combine(params, rest)
    assert whole.weight is ours.weight
    bias = jnp.ones(2)
    theirs_moved = theirs.copy()
    theirs_moved.bias = bias
    check(jax.vmap(st.tree.at(lambda layer: layer.bias, ours, bias))(X), theirs_moved(X))
    doubled = theirs.map(lambda leaf: 2 * leaf)
    check(jax.vmap(st.tree.map(lambda leaf: 2 * leaf, ours))(X), doubled(X))

    def loss(layer, x):
        return (jax.vmap(layer)(x) ** 2).mean()

    def loss_of_treex(params, layer, x):
        return (layer.merge(params)(x) ** 2).mean()

    gradient = st.grad(loss)(ours, X)
    gradient_of_treex = st.grad(loss_of_treex)(theirs.filter(tx.Parameter), theirs, X)
    check(gradient.weight.T, gradient_of_treex.kernel)

    optimizer, optimizer_of_treex = st.optimizer(optax.adam(1e-2)), tx.Optimizer(optax.adam(1e-2))
    updates, _ = optimizer.update(gradient, optimizer.init(eqx.filter(ours, eqx.is_inexact_array)), ours)
    params = theirs.filter(tx.Parameter)
    new = optimizer_of_treex.init(params).update(gradient_of_treex, params)
    check(st.apply_updates(ours, updates).weight.T, new.kernel)
