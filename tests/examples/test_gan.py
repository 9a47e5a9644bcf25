"""The GAN with a shared trunk beside one whose critics are two layers on what one trunk gives."""

import jax
import jax.numpy as jnp
import optax
import pytest

from .twins import arrays, assert_each_once, assert_same_losses, example, keys, trained
from .vanilla import linear, log_losses, mlp


def made_of(generator, noise, codes):
    return mlp(generator, jnp.concatenate([noise, jnp.eye(3)[codes]], axis=1), jnp.tanh)


def judged(critics, points):
    features = jnp.tanh(mlp(critics["trunk"], points, jnp.tanh))
    return linear(critics["is_real"], features)[:, 0], linear(critics["code"], features)


def critics_loss(critics, generator, batch):
    real, noise, codes = batch
    of_real, _ = judged(critics, real)
    of_made, logits = judged(critics, made_of(generator, noise, codes))
    return jnp.logaddexp(0, -of_real).mean() + jnp.logaddexp(0, of_made).mean() + log_losses(logits, codes).mean()


def generator_loss(generator, critics, batch):
    _, noise, codes = batch
    of_made, logits = judged(critics, made_of(generator, noise, codes))
    return jnp.logaddexp(0, -of_made).mean() + log_losses(logits, codes).mean()


critics_tx, generator_tx = optax.adam(1e-2, b1=0.5), optax.adam(3e-3, b1=0.5)


@jax.jit
def twin_step(critics, generator, states, batch):
    of_critics, gradient = jax.value_and_grad(critics_loss)(critics, generator, batch)
    updates, critics_state = critics_tx.update(gradient, states[0])
    critics = optax.apply_updates(critics, updates)
    of_generator, gradient = jax.value_and_grad(generator_loss)(generator, critics, batch)
    updates, generator_state = generator_tx.update(gradient, states[1])
    generator = optax.apply_updates(generator, updates)
    return critics, generator, (critics_state, generator_state), jnp.stack([of_critics, of_generator])


@pytest.mark.slow
def test_same_losses_as_with_one_trunk():
    gan = example("gan")
    model = gan.InfoGAN.new(jax.random.key(0))
    generator = arrays(model.generator)
    critics = {
        "trunk": arrays(model.discriminator.trunk),
        "is_real": arrays(model.discriminator.head),
        "code": arrays(model.recogniser.head),
    }
    batches = [gan.new_batch(key) for key in keys()]
    twin_states = critics_tx.init(critics), generator_tx.init(generator)
    critics, generator, twin_states, expected = trained(twin_step, critics, generator, twin_states, batches=batches)
    model, states, losses = trained(gan.train_step, model, gan.init(model), batches=batches)

    assert_same_losses(losses, expected)
    assert_each_once(model, (critics, generator))
    for state, twin_state in zip(states, twin_states, strict=True):
        assert_each_once(state, twin_state)
    assert model.discriminator.trunk is model.recogniser.trunk
    assert states[0][0].nu.discriminator.trunk is states[0][0].nu.recogniser.trunk
