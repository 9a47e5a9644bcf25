"""Two flows along one field beside Heun's method written by hand, there and back with one set of parameters."""

import jax
import jax.numpy as jnp
import optax
import pytest

from .twins import arrays, assert_each_once, assert_same_losses, example, keys, step_of, trained
from .vanilla import mlp


def followed(p, points, time):
    for _ in range(5):
        slope = mlp(p, points, jnp.tanh)
        points = points + time / 5 * (slope + mlp(p, points + time / 5 * slope, jnp.tanh)) / 2
    return points


def twin_loss(p, batch):
    before, after = batch
    return jnp.mean((followed(p, before, 0.5) - after) ** 2) + jnp.mean((followed(p, after, -0.5) - before) ** 2)


@pytest.mark.slow
def test_same_losses_as_with_one_field():
    pytest.importorskip("diffrax")
    program = example("neural_ode")
    model = program.Clock(key=jax.random.key(0))
    params = arrays(model.future.field.mlp)
    batches = [program.new_batch(key) for key in keys()]
    tx = optax.adam(1e-2)
    params, twin_state, expected = trained(step_of(twin_loss, tx), params, tx.init(params), batches=batches)
    model, state, losses = trained(program.train_step, model, program.tx.init(model), batches=batches)

    assert_same_losses(losses, expected)
    assert_each_once(model, params, state, twin_state)
    assert model.future.field is model.past.field
    assert state[0].nu.future.field is state[0].nu.past.field
