"""The actor and the critic on one encoder beside two layers on what one encoder gives."""

import jax
import jax.numpy as jnp
import optax
import pytest

from .twins import arrays, assert_each_once, assert_same_losses, example, keys, step_of, trained
from .vanilla import linear, log_losses, mlp


def twin_loss(p, batch):
    observations, actions, rewards = batch
    features = jnp.tanh(mlp(p["encoder"], observations, jnp.tanh))
    logits, values = linear(p["actor"], features), linear(p["critic"], features)[:, 0]
    advantages = jax.lax.stop_gradient(rewards - values)
    log_chances = logits - jax.nn.logsumexp(logits, axis=1, keepdims=True)
    negentropy = (jnp.exp(log_chances) * log_chances).sum(axis=1)
    return jnp.mean(advantages * log_losses(logits, actions) + 0.5 * (rewards - values) ** 2 + 0.01 * negentropy)


@pytest.mark.slow
def test_same_losses_as_with_one_encoder():
    program = example("actor_critic")
    model = program.ActorCritic.new(jax.random.key(0))
    params = {
        "encoder": arrays(model.actor.encoder),
        "actor": arrays(model.actor.layer),
        "critic": arrays(model.critic.layer),
    }
    # Both learn from one record of what was played, for the actor throws dice.
    batches = [program.play(model, key) for key in keys()]
    rates = {"encoder": optax.adam(1e-2), "actor": optax.adam(2e-2), "critic": optax.sgd(0.1)}
    tx = optax.multi_transform(rates, {name: name for name in params})
    params, twin_state, expected = trained(step_of(twin_loss, tx), params, tx.init(params), batches=batches)
    model, state, losses = trained(program.train_step, model, program.tx.init(model), batches=batches)

    assert_same_losses(losses, expected)
    assert_each_once(model, params, state, twin_state)
    assert model.actor.encoder is model.critic.encoder
    moments = state.inner_states["encoder"].inner_state[0].nu
    assert moments.actor.encoder is moments.critic.encoder
