"""The Siamese network and its target beside one encoder that is called twice, and one average of it."""

import jax
import jax.numpy as jnp
import optax
import pytest

import sharedtree as st

from .twins import arrays, assert_each_once, assert_same_losses, example, keys, trained
from .vanilla import mlp


def contrast(a, b, is_same):
    distance = jnp.sqrt(((a - b) ** 2).sum(axis=-1) + 1e-6)
    return jnp.where(is_same, distance**2, jnp.maximum(1 - distance, 0) ** 2).mean()


def twin_loss(encoder, average, batch):
    (left, right), is_same = batch
    fast = [mlp(encoder, x, jnp.tanh) for x in (left, right)]
    slow = [mlp(average, x, jnp.tanh) for x in (left, right)]
    across = contrast(fast[0], slow[1], is_same) + contrast(slow[0], fast[1], is_same)
    return contrast(*fast, is_same) + across / 2


twin_tx = optax.adam(3e-3)


@jax.jit
def twin_step(encoder, average, state, batch):
    loss, gradient = jax.value_and_grad(twin_loss)(encoder, average, batch)
    updates, state = twin_tx.update(gradient, state)
    encoder = optax.apply_updates(encoder, updates)
    average = jax.tree.map(lambda slow, fast: 0.9 * slow + (1 - 0.9) * fast, average, encoder)
    return encoder, average, state, loss


@pytest.mark.slow
def test_same_losses_as_with_one_encoder():
    siamese = example("siamese")
    model = siamese.Siamese(key=jax.random.key(0))
    target = st.copy(model)
    encoder = average = arrays(model.left)
    batches = [siamese.new_batch(key) for key in keys()]
    twin_state = twin_tx.init(encoder)
    encoder, average, twin_state, expected = trained(twin_step, encoder, average, twin_state, batches=batches)
    state = siamese.tx.init(model)
    model, target, state, losses = trained(siamese.train_step, model, target, state, batches=batches)

    assert_same_losses(losses, expected)
    assert_each_once(model, encoder, state, twin_state)
    assert_each_once(target, average)
    assert model.left is model.right
    assert target.left is target.right
    assert target.left is not model.left
    assert state[0].nu.left is state[0].nu.right
